"""Records every operator of a block, forward and backward, with a dispatch mode."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from firstnan.observe.higher_order import accept, call_chosen_branch
from firstnan.observe.module_stack import ModuleStack
from firstnan.observe.patches import Patches
from firstnan.observe.sites import Ownership
from firstnan.records import Role, Trace
from firstnan.tensors.finite import extremes, readable, surely_finite
from firstnan.tensors.models import Parts, is_safe
from firstnan.tracing.examine import examine, in_float64, numbers_in
from firstnan.tracing.memory import Memory
from firstnan.tracing.operators import OpInfo, arguments_keep_finite, info, tensors_of
from firstnan.tracing.recording import Raw, Read, fingerprint, to_trace

_MAX_RAISED = 16
_SMALL = 1 << 14  # Elements; up to this size an argument is copied before an in-place operator overwrites it.
_LARGE = 1 << 18
_MAX_EVENTS = 1 << 14
_sequence_number = torch._C._autograd._get_sequence_nr
_NO_SEQUENCE = 1 << 62  # AccumulateGrad and the like have no usable sequence number.


class Tracer:
    """Records the operators of the thread that starts it, or trains; `trace()` returns the finished record."""

    def __init__(self, ownership: Ownership | None = None) -> None:
        self.ownership = ownership or Ownership()
        self.step = 0
        self.region = "setup"
        self.in_optimizer = False
        self.in_closure = False
        """The optimizer computes its loss through a closure (LBFGS): what runs there with gradients on is forward."""
        self.raws: list[Raw] = []
        self.memory = Memory()
        self.modules = ModuleStack(self._called)
        self.looks_for_training = False
        """Until the first step, whichever thread calls a module with gradients on counts as the one that trains."""
        self.marks = False
        """Keeps what is needed to compare every operator with a replay of the same step."""
        self.trouble: str | None = None
        """The first error of our own while recording."""
        self._sequence: dict[int, int] = {}
        """Sequence number of an autograd node -> the event that made it."""
        self._last_node = -1
        """Autograd nodes up to this number have their event, or have none."""
        self._mode: _Mode | None = None
        self._patches = Patches()
        self._pauses = 0
        self._skips_update = False
        self._cleanup_at = _MAX_EVENTS

    @property
    def running(self) -> bool:
        return self._mode is not None

    def at(
        self,
        *,
        step: int | None = None,
        region: str | None = None,
        marks: bool | None = None,
        in_optimizer: bool | None = None,
        looks_for_training: bool | None = None,
    ) -> None:
        """Says where the program is, and what is wanted of the operators from here on; None: as before."""
        self.step = self.step if step is None else step
        self.region = self.region if region is None else region
        self.marks = self.marks if marks is None else marks
        self.in_optimizer = self.in_optimizer if in_optimizer is None else in_optimizer
        self.looks_for_training = self.looks_for_training if looks_for_training is None else looks_for_training

    def start(self) -> None:
        if self._mode is None:
            self.modules.attach()
            accept(_Mode)
            call_chosen_branch(self._patches, _Mode)
            self._enter()

    def follow(self) -> None:
        """Records this thread from now on: the program trains here, not in the thread recorded so far."""
        if self._mode is not None and self._mode.thread != threading.get_ident():
            self._mode.on = False
            self._sequence.clear()  # Autograd numbers its nodes per thread.
            self._enter()

    def _called(self) -> None:
        self.goes_on()
        if self.looks_for_training and self.region == "setup":
            self.follow()

    def _enter(self) -> None:
        self._last_node = _sequence_number() - 1
        self._mode = _Mode(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        if self._pauses:
            self._mode.suspend()

    def stop(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            if self._pauses:
                mode.resume()
            mode.on = False
            self.modules.detach()
            self._patches.remove()
            # A mode belongs to its thread. In another one it stays on the stack and does nothing.
            if mode.thread == threading.get_ident():
                mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own

    def __enter__(self) -> Tracer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Does not record what runs inside, which is firstnan's own code."""
        self._suspend()
        try:
            yield
        finally:
            self._resume()

    def _suspend(self) -> None:
        self._pauses += 1
        if self._pauses == 1 and self._mode is not None:
            self._mode.suspend()

    def _resume(self) -> None:
        self._pauses -= 1
        if self._pauses == 0 and self._mode is not None:
            self._mode.resume()

    def update_begins(self, optimizer: Any, closure: bool, grad_norm: float | None) -> bool:
        """Called before the optimizer's step; returns whether it is certain to stay finite and is not recorded."""
        self.update_ended()  # the previous one, if an exception ended it
        self.in_optimizer, self.in_closure = True, closure
        self._skips_update = not closure and is_safe(optimizer, grad_norm)
        if self._skips_update:
            self._suspend()
        return self._skips_update

    def goes_on(self) -> None:
        """Called when the program computes again: an unrecorded update is over, even if an exception ended it."""
        if self._skips_update:
            self.update_ended()

    def update_ended(self) -> None:
        if self._skips_update:
            self._resume()
        self.in_optimizer = self._skips_update = False

    def relabel(self, old: str, new: str) -> None:
        """Changes the region of the latest events."""
        for raw in reversed(self.raws):
            if raw.region != old:
                break
            raw.region = new

    def give_role(self, tensor: Tensor, role: Role, label: str) -> None:
        """Notes what a tensor is to the program, to name it in the trace."""
        key = self.memory.key(tensor)
        if key is not None:
            self.memory.roles[key] = (role, label)

    def last_bad(self, tensor: Tensor) -> int | None:
        """The event that last wrote non-finite values into this tensor's elements."""
        bad = self.memory.bad_writers(self.memory.key(tensor), tensor)
        return bad[-1] if bad else None

    def forget_healthy(self) -> None:
        """Drops events that no later failure can depend on, so that tracing many steps uses bounded memory."""
        raised = [i for i, r in enumerate(self.raws) if r.raised]
        roots = self.memory.roots() | set(raised[-_MAX_RAISED:])
        self._sequence.clear()
        if not roots:
            self.raws = []
            self.memory.renumber({}, set())
            return
        kept = self._ancestors(roots)
        new = {old: i for i, old in enumerate(sorted(kept))}
        self.raws = [self.raws[i] for i in new]
        for r in self.raws:
            for read in r.reads:
                read.writer = None if read.writer is None else new.get(read.writer)
                read.bad_writers = tuple(new[w] for w in read.bad_writers)
            r.forward = None if r.forward is None else new[r.forward]
        self.memory.renumber(new, {k for r in self.raws for k in (*r.writes, *(read.key for read in r.reads))})

    def _clean_up(self) -> None:
        """Drops events while nothing is trained, since no step ends then; keeps what backward may refer to."""
        if not self._sequence:
            self.forget_healthy()
        self._cleanup_at = len(self.raws) + _MAX_EVENTS

    def _ancestors(self, roots: set[int]) -> set[int]:
        """These events and all those that their non-finite values came from."""
        found, stack = set(roots), list(roots)
        while stack:
            raw = self.raws[stack.pop()]
            before = {w for read in raw.reads for w in read.bad_writers}
            if raw.forward is not None:
                before.add(raw.forward)
            stack += before - found
            found |= before
        return found

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator and records it. Called for every operator, so it has to be fast."""
        op = info(func)
        if op.ignored or (op.view and not self.marks and not torch.is_grad_enabled()):
            return func(*args, **kwargs)  # A view shares its storage; it is recorded only where autograd makes a node.
        if len(self.raws) >= self._cleanup_at:
            self._clean_up()
        # `torch.tensor` and `from_numpy` read no tensor.
        given = tensors_of(op, args, kwargs) if op.name != "tensor" else []
        tensors = [(n, t) for n, t in given if n not in op.overwritten] if op.overwritten else given
        try:
            # Before the call: an operator may overwrite what it reads.
            reads, dirty = self._read(tensors)
            before = {}
            if op.mutated:
                # A large argument is copied only if it may hold non-finite values.
                kept = [t for n, t in tensors if n in op.mutated and (id(t) in dirty or t.numel() <= _SMALL)]
                before = {id(t): t.detach().clone() for t in kept}
        except Exception as error:
            self._note_error(op, error)
            return func(*args, **kwargs)
        raised = None
        results: list[Tensor] = []
        try:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor):
                results = [out]
            elif isinstance(out, list | tuple):
                results = [o for o in out if isinstance(o, Tensor)]
            return out
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
            raise
        finally:
            try:
                if op.mutated:
                    results += [t for n, t in given if n in op.mutated and all(t is not r for r in results)]
                raw = self._append(op, args, kwargs, tensors, results, before, reads, dirty, raised)
                if raw.detail is not None and raw.detail.born and not raw.detail.on_purpose:
                    raw.detail = replace(raw.detail, in_float64=in_float64(func, op, args, kwargs, before))
            except Exception as error:
                self._note_error(op, error)

    def _note_error(self, op: OpInfo, error: Exception) -> None:
        """Remembers an error of our own, which must never reach the program."""
        self.trouble = self.trouble or f"{op.aten}: {type(error).__name__}: {error}"

    def _read(self, tensors: list[tuple[str, Tensor]]) -> tuple[list[Read], set[int]]:
        """What is read and who wrote it, and the ids of the tensors that may hold non-finite values."""
        reads: list[Read] = []
        dirty: set[int] = set()
        memory = self.memory
        for name, t in tensors:
            key = memory.key(t)
            read = Read(name, None if key is None else memory.writer.get(key), key)
            if memory.may_be_bad(key, t):
                dirty.add(id(t))
                read.bad_writers = memory.bad_writers(key, t)
            reads.append(read)
        return reads, dirty

    def _append(
        self,
        op: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[tuple[str, Tensor]],
        results: list[Tensor],
        before: dict[int, Tensor],
        reads: list[Read],
        dirty: set[int],
        raised: str | None,
    ) -> Raw:
        raw = Raw()
        raw.func, raw.raised, raw.detail, raw.scalars, raw.fingerprint = op, raised, None, (), None
        raw.step, raw.region, raw.reads = self.step, self.region, reads
        raw.outputs, raw.writes, raw.uninitialized = [], [], op.empty
        self._locate(raw, sys._getframe(3))
        index = len(self.raws)
        self.raws.append(raw)
        enabled = torch.is_grad_enabled()
        raw.grad = enabled and any(t.requires_grad for _, t in tensors)
        if raw.grad or not enabled:
            self._assign_node(index)
        bad = False
        # A number may be infinite itself (`masked_fill(mask, -inf)`).
        known = op.keeps_finite and not dirty and arguments_keep_finite(args)
        for t in results:
            if op.name == "set":
                self.memory.arrived(t)
            elif op.empty:
                self._allocated(raw, t, index)
            elif op.view:
                raw.outputs.append((t.shape, t.dtype, None, None))
            elif self._wrote(raw, t, index, known):
                bad = True
        if self.marks:
            outside = [t for read, (_, t) in zip(reads, tensors, strict=True) if not self._in_step(read.writer)]
            raw.fingerprint = fingerprint(op, args, kwargs, outside, results)
        if bad or raised:
            raw.scalars = numbers_in(op, args, kwargs)
            raw.detail = examine(op, tensors, results, raw.scalars, before)
        return raw

    def _in_step(self, writer: int | None) -> bool:
        return writer is not None and self.raws[writer].region == "step"

    def _assign_node(self, index: int) -> None:
        """Assigns the autograd node that was just made to this event.

        A node without an event belongs to an `autograd.Function` whose forward, which runs without gradients, begins.
        """
        number = _sequence_number() - 1
        if number > self._last_node:
            self._last_node = number
            self._sequence[number] = index

    def _wrote(self, raw: Raw, t: Tensor, index: int, known: bool) -> bool:
        """Notes a result and returns whether it is non-finite; it is not read if it is `known` to be finite."""
        low: float | None = None
        high: float | None = None
        # Ranges are evidence in forward. Elsewhere, and for large results, it only matters whether all is finite.
        quick = raw.backward != "forward" or t.numel() > (_LARGE if raw.grad else _SMALL)
        if not (known or (quick and surely_finite(t))) and (plain := readable(t)) is not None:
            low, high = extremes(plain) or (None, None)
        raw.outputs.append((t.shape, t.dtype, low, high))
        bad = low is not None and high is not None and not (math.isfinite(low) and math.isfinite(high))
        key = self.memory.key(t)
        if key is not None:
            raw.writes.append(key)
            self.memory.wrote(key, t, index, bad)
        return bad

    def _allocated(self, raw: Raw, t: Tensor, index: int) -> None:
        raw.outputs.append((t.shape, t.dtype, None, None))
        key = self.memory.key(t)
        if key is not None:
            raw.writes.append(key)
            self.memory.allocated(key, index)

    def _locate(self, raw: Raw, frame: Any) -> None:
        """Notes the source line, the layer and the pass in which the operator runs."""
        raw.spot, raw.inner, raw.engine = self.ownership.spots(frame)
        node = torch._C._current_autograd_node()
        raw.node = raw.forward = None
        raw.python_backward = False
        if node is None:
            updating = self.in_optimizer and not (self.in_closure and torch.is_grad_enabled())
            raw.backward = "optimizer" if updating else "forward"
            raw.module = self.modules.current()
            return
        recomputing = not raw.engine and raw.spot is not None and _in_checkpoint(frame)
        raw.python_backward = not raw.engine and raw.spot is not None and not recomputing
        raw.backward = "forward" if recomputing else "backward"
        raw.node = node.name()
        sequence = node._sequence_nr()
        if raw.node.endswith("CopySlices"):
            # An in-place write to a view: this node was made right after the one of the operator that wrote.
            sequence -= 1
        raw.forward = self._sequence.get(sequence) if sequence < _NO_SEQUENCE else None
        raw.module = self.modules.current() if recomputing or raw.forward is None else self.raws[raw.forward].module

    def trace(self, parts: Parts | None = None) -> Trace:
        """Everything recorded so far as plain values; module paths start at the models in `parts`."""
        return to_trace(self.raws, self.memory, parts or {})


def _in_checkpoint(frame: Any) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("checkpoint.py") and f"torch{os.sep}utils" in name:
            return True
        if frame.f_code.co_name == "_engine_run_backward":
            return False
        frame = frame.f_back
    return False


class _Mode(TorchDispatchMode):
    """Passes each operator to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.tracer = tracer
        self.on = True
        self._suspended = self._popped = False
        self.thread = threading.get_ident()
        _running.add(self)

    def suspend(self) -> None:
        """Records nothing until `resume`; off the stack if possible, so that operators cost nothing meanwhile."""
        self._suspended = True
        self._popped = _get_current_dispatch_mode() is self  # Another mode may be above, or this is another thread.
        if self._popped:
            _pop_mode()

    def resume(self) -> None:
        if self._popped and self.thread == threading.get_ident():
            _push_mode(self)
        self._suspended = self._popped = False

    # `while_loop`, `flex_attention` and the like are one operator each: torch runs what they call without modes.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled during a trace, and the wrapper this would add costs as much as a small operator.
        return False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended or not self.on:
            return func(*args, **kwargs)
        return self.tracer.record(func, args, kwargs)


_running: weakref.WeakSet[_Mode] = weakref.WeakSet()


def _stop_in_child() -> None:
    """Stops recording in a forked DataLoader worker, which inherits the mode of its parent."""
    for mode in _running:
        mode.on = False


os.register_at_fork(after_in_child=_stop_in_child)
