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
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from firstnan.observe.higher_order import accept, call_chosen_branch
from firstnan.observe.module_stack import ModuleStack
from firstnan.observe.new_threads import NewThreads
from firstnan.observe.patches import Patches
from firstnan.observe.sites import ENGINE, Ownership, Spots
from firstnan.records import Role, TensorStat, Trace
from firstnan.tensors.finite import extremes, readable, shape_of, surely_finite
from firstnan.tensors.models import Parts, is_safe
from firstnan.tracing.examine import Detail, examine, in_float64, numbers_in
from firstnan.tracing.memory import Memory
from firstnan.tracing.operators import KNOWN, OpInfo, arguments_keep_finite, info, tensors_of
from firstnan.tracing.recording import INCOMPLETE, Events, NonFiniteCall, OperatorCall, Raw, fingerprint

_MAX_RAISED = 16
_SMALL = 1 << 14  # Elements; up to this size an argument is copied before an in-place operator overwrites it.
_LARGE = 1 << 18
_MAX_EVENTS = 1 << 14
_MAX_RECORDS = 1 << 20  # Records of one step; about 300 bytes each.
_MAX_HISTOGRAMS = 256  # Operators of one step that create a value and whose inputs get histograms.
_MAX_DETAILED = 1 << 15  # Findings of one step that hold all statistics; about 2,000 bytes each.
_MAX_NODES = 1 << 12  # Autograd nodes of one step; see `_node`.
_NODES_OF_STEP, _NODES_OF_HELPER, _MANY_NODES = 1 << 14, 1 << 12, 1 << 16
"""Autograd nodes that the rest of a step may make, and a thread in it; and after so many, numbers from 0 are free."""
_graph_task = torch._C._current_graph_task_id
_sequence_number = torch._C._autograd._get_sequence_nr
_SHARED_FROM = 1024
"""From so many records on, equal calls share an object: it saves memory in long steps, but costs time in short ones."""
_new = tuple.__new__
"""Makes a named tuple of its fields in order, without the Python function that its class would call."""
_name, _tensor, _requires_grad = itemgetter(0), itemgetter(1), attrgetter("requires_grad")
_NOT_READ = (None, None)
_MOST_LEVELS = 8
"""Transforms of `torch.func` inside each other, and operators that one call becomes under `vmap`."""
_NO_SEQUENCE = 1 << 62  # AccumulateGrad and the like have no usable sequence number.


class _Executed(NamedTuple):
    """An operator that ran: what it was given and what it returned."""

    func: Any
    op: OpInfo
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[tuple[str, Tensor]]
    results: list[Tensor]
    before: dict[int, Tensor]
    """Copies of arguments that it overwrote, by id."""
    raised: str | None


class Tracer:
    """Records the operators of the thread that starts it, or trains; `trace()` returns the finished record.

    With `helpers` also those of threads that are started meanwhile: parts of a model may run in threads of their own.
    """

    def __init__(self, ownership: Ownership | None = None, *, helpers: bool = False) -> None:
        self.ownership = ownership or Ownership()
        self._lock = threading.RLock()
        self._helpers: dict[int, _Mode] = {}
        """The other threads that are recorded, by their ids."""
        self._helpers_started = 0
        self._new_threads = NewThreads(self._helper_started) if helpers else None
        self.of_helpers: set[int] = set()
        """The events of those threads."""
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
        self._levels: dict[int, int] = {}
        """The same for nodes of an outer `torch.func` transform: each level makes one before the operator runs."""
        self._last_node = -1
        """Autograd nodes up to this number have their event, or have none."""
        self._nodes = self._detailed = self._created = 0
        """How many autograd nodes were asked for in this step, and how many findings were made in it."""
        self._last_asked = -1
        self._backward: tuple[int, Spots] = (-1, (None, None, False))
        """The number of the backward call that runs, and the place of what the engine computes in it."""
        self._calls: dict[Any, OperatorCall] = {}
        self._stats: dict[TensorStat, TensorStat] = {}
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
            if self._new_threads is not None:
                self._new_threads.begin()

    def _helper_started(self) -> None:
        """A thread begins while the step is recorded. Autograd numbers its nodes per thread, so it begins elsewhere."""
        with self._lock:
            mode = self._helpers[threading.get_ident()] = _Mode(self)
            self._helpers_started += 1  # A new thread may have the id of one that has ended.
            base = self._last_node + _NODES_OF_STEP if self._last_node < _MANY_NODES else 0
            begin = base + self._helpers_started * _NODES_OF_HELPER
        leaf = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            while _sequence_number() < begin:
                leaf.view_as(leaf)
        mode.last_node = _sequence_number() - 1
        mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own; it ends with the thread

    def follow(self) -> None:
        """Records this thread from now on: the program trains here, not in the thread recorded so far."""
        if self._mode is not None and self._mode.thread != threading.get_ident():
            self._mode.on = False
            self._levels.clear()
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
            if self._new_threads is not None:
                self._new_threads.end()
            for helper in self._helpers.values():
                helper.on = False
            self._helpers.clear()
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
        helper = self._helpers.get(threading.get_ident())
        if helper is not None:
            helper.pauses += 1
            return
        self._pauses += 1
        if self._pauses == 1 and self._mode is not None:
            self._mode.suspend()

    def _resume(self) -> None:
        helper = self._helpers.get(threading.get_ident())
        if helper is not None:
            helper.pauses -= 1
            return
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

    def label_setup(self) -> None:
        """Everything since the last update was the setup of another stage of training."""
        for raw in reversed(self.raws):
            if raw.region not in ("between", "body"):
                break
            raw.region = "setup"

    def give_role(self, tensor: Tensor, role: Role, label: str) -> None:
        """Notes what a tensor is to the program, to name it in the trace."""
        key = self.memory.key(tensor)
        if key is not None:
            self.memory.roles[key] = (role, label)
            if role == "parameter":
                self.memory.parameters[key] = tensor

    def last_bad(self, tensor: Tensor) -> int | None:
        """The event that last wrote non-finite values into this tensor's elements."""
        bad = self.memory.bad_writers(self.memory.key(tensor), tensor)
        return bad[-1] if bad else None

    def last_event(self) -> int:
        """The last operator of the thread that is recorded; -1 if there is none."""
        return next((i for i in range(len(self.raws) - 1, -1, -1) if i not in self.of_helpers), -1)

    def forget_healthy(self) -> None:
        """Drops events that no later failure can depend on, so that tracing many steps uses bounded memory."""
        raised = [i for i, raw in enumerate(self.raws) if raw.finding is not None and raw.finding.raised]
        self._sequence.clear()
        self._levels.clear()
        self._nodes = self._detailed = self._created = 0
        self._keep(self._ancestors(self.memory.roots() | set(raised[-_MAX_RAISED:])))

    def _clean_up(self) -> None:
        """Drops events while no step ends: if nothing is trained those that are healthy, in a long step the oldest."""
        if not self._sequence:
            self.forget_healthy()
        elif len(self.raws) >= _MAX_RECORDS:
            newest = range(len(self.raws) - _MAX_RECORDS // 2, len(self.raws))
            self._keep(self._ancestors(self.memory.roots()).union(newest))
            self.raws[0].fingerprint = INCOMPLETE
            self.trouble = self.trouble or (
                f"step {self.step} has more than {_MAX_RECORDS:,} operators; of the oldest only those with non-finite "
                "results were kept, to limit memory"
            )
        self._cleanup_at = len(self.raws) + _MAX_EVENTS

    def _keep(self, kept: set[int]) -> None:
        """Drops all other events and renumbers these."""
        new = {old: i for i, old in enumerate(sorted(kept))}
        self.raws = [self.raws[i] for i in new]
        self.of_helpers = {new[i] for i in self.of_helpers if i in new}
        self._sequence = {n: new[i] for n, i in self._sequence.items() if i in new}
        self._levels = {n: new[i] for n, i in self._levels.items() if i in new}
        self._calls.clear()
        self._stats.clear()
        for raw in self.raws:
            raw.renumber(new)
        self.memory.renumber(new, {k for raw in self.raws for k in raw.storages})

    def _ancestors(self, roots: set[int]) -> set[int]:
        """These events and all those that their non-finite values came from."""
        found, stack = set(roots), list(roots)
        while stack:
            before = self.raws[stack.pop()].depends_on()
            stack += before - found
            found |= before
        return found

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one operator and records it. Called for every operator, so it has to be fast."""
        known = KNOWN.get(id(func))
        op = known[0] if known is not None else info(func)
        if op.ignored:
            return func(*args, **kwargs)
        if (
            op.view
            and not self.marks
            and not (torch.is_grad_enabled() and (not args or getattr(args[0], "requires_grad", True)))
        ):
            return func(*args, **kwargs)  # A view shares its storage; it is recorded only where autograd makes a node.
        if len(self.raws) >= self._cleanup_at and not self._helpers:
            self._clean_up()
        # `torch.tensor` and `from_numpy` read no tensor.
        given = tensors_of(op, args, kwargs) if op.name != "tensor" else []
        tensors = [(n, t) for n, t in given if n not in op.overwritten] if op.overwritten else given
        try:
            # Before the call: an operator may overwrite what it reads.
            with self._lock:
                reads, dirty = self.memory.read(tensors)
            before = {}
            if op.mutated:
                # A large argument is copied only if it may hold non-finite values.
                kept = [
                    t for i, (n, t) in enumerate(tensors) if n in op.mutated and (i in dirty or t.numel() <= _SMALL)
                ]
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
                done = _new(_Executed, (func, op, args, kwargs, tensors, results, before, raised))
                with self._lock:
                    self._append(done, reads, dirty)
            except Exception as error:
                self._note_error(op, error)

    def _note_error(self, op: OpInfo, error: Exception) -> None:
        """Remembers an error of our own, which must never reach the program."""
        self.trouble = self.trouble or f"{op.aten}: {type(error).__name__}: {error}"

    def _append(self, done: _Executed, reads: list[int | None], dirty: dict[int, tuple[int, ...]]) -> None:
        op, results, is_set = done.op, done.results, done.op.name == "set"
        enabled = torch.is_grad_enabled()
        # Not by comprehensions, each of which is a function call.
        names = tuple(map(_name, done.tensors))
        grad = enabled and any(map(_requires_grad, map(_tensor, done.tensors)))
        raw = Raw()
        raw.region, raw.fingerprint, raw.finding, raw.numbers, raw.ranges = self.region, None, None, tuple(reads), ()
        forms: tuple[Any, ...] = ()
        for t in results if not is_set else ():
            forms += ((shape_of(t) if t.is_nested else t.shape, t.dtype),)
        frame = sys._getframe(3)
        asked = self._nodes < _MAX_NODES
        self._locate(raw, op, names, forms, grad, frame, asked)
        index = len(self.raws)
        self.raws.append(raw)
        if self._helpers and threading.get_ident() in self._helpers:
            self.of_helpers.add(index)
        self._assign_node(index, grad or not enabled)
        memory = self.memory
        # A number may be infinite itself (`masked_fill(mask, -inf)`).
        unread = op.empty or op.view or (op.keeps_finite and not dirty and arguments_keep_finite(done.args))
        # Ranges are evidence in forward. Elsewhere, and for larger results, it only matters whether all is finite.
        quick = (_LARGE if grad else _SMALL) if raw.call.phase == "forward" else -1
        ranges: list[float | None] = []
        bad = measured = False
        for t in results if not is_set else ():
            wrong = False
            if unread or (t.numel() > quick and surely_finite(t)):
                ranges += _NOT_READ
                if op.view:
                    continue
            else:
                low, high = _ends(t)
                ranges += (low, high)
                if low is not None and high is not None:
                    measured, wrong = True, not (math.isfinite(low) and math.isfinite(high))
                    bad = bad or wrong
            key = memory.key(t)
            if key is not None:
                reads.append(key)
                if op.empty:
                    memory.allocated(key, index)
                else:
                    memory.wrote(key, t, index, wrong)
                    if dirty and t.dtype is torch.uint8 and op.name == "copy":  # as `deepcopy` copies a buffer
                        memory.copied_bytes(key, t, dirty.get(len(done.tensors) - 1, ()))
        if is_set:
            for t in results:
                memory.arrived(t)
        raw.numbers = tuple(reads)
        if measured:
            raw.ranges = tuple(ranges)
        if self.marks:
            outside = [t for w, (_, t) in zip(raw.writers, done.tensors, strict=True) if not self._in_step(w)]
            raw.fingerprint = fingerprint(op, done.args, done.kwargs, outside, results)
        if bad or done.raised:
            scalars = numbers_in(op, done.args, done.kwargs)
            detail = self._examine(done, scalars)
            bad_writers = tuple([dirty.get(i, ()) for i in range(len(names))])
            raw.finding = NonFiniteCall(detail, scalars, bad_writers, done.raised)
            if not asked and (detail.born or detail.nan_from_inf) and self._nodes < 2 * _MAX_NODES:
                self._locate(raw, op, names, forms, grad, frame, ask=True)

    def _examine(self, done: _Executed, scalars: tuple[tuple[str, Any], ...]) -> Detail:
        """The evidence of one call, in as little memory as possible."""
        few = self._created < _MAX_HISTOGRAMS
        detail = examine(done.op, done.tensors, done.results, scalars, done.before, histograms=few)
        created = detail.born or detail.nan_from_inf
        self._created += bool(created and not detail.on_purpose)
        self._detailed += 1
        inputs = detail.inputs
        if self._detailed > _MAX_DETAILED and not created and not done.raised:
            inputs = (None,) * len(inputs)
        shared = self._stats.setdefault
        detail = replace(
            detail,
            inputs=tuple([shared(s, s) if s is not None else None for s in inputs]),
            outputs=tuple([shared(s, s) for s in detail.outputs]),
        )
        if detail.born and not detail.on_purpose:
            return replace(detail, in_float64=in_float64(done.func, done.op, done.args, done.kwargs, done.before))
        return detail

    def _in_step(self, writer: int | None) -> bool:
        return writer is not None and self.raws[writer].region == "step"

    def _assign_node(self, index: int, certain: bool) -> None:
        """Assigns the autograd node that was just made to this event.

        A node without an event belongs to an `autograd.Function` whose forward, which runs without gradients, begins.
        Under `torch.func` the operator itself sees no gradient, although nodes were made for it.
        """
        number = _sequence_number() - 1
        helper = self._helpers.get(threading.get_ident()) if self._helpers else None
        last = self._last_node if helper is None else helper.last_node
        if number > last:
            for other in range(max(last + 1, number - _MOST_LEVELS), number + (not certain)):
                self._levels.setdefault(other, index)
            if not certain:
                return
            if helper is None:
                self._last_node = number
            else:
                helper.last_node = number
            self._sequence[number] = index

    def _locate(
        self, raw: Raw, op: OpInfo, names: tuple[str, ...], forms: tuple[Any, ...], grad: bool, frame: Any, ask: bool
    ) -> None:
        """Notes the source line, the layer and the pass in which the operator runs."""
        task = _graph_task()
        in_engine = task >= 0 and frame.f_code.co_name == ENGINE
        if not in_engine or task != self._backward[0]:
            spots = self.ownership.spots(frame)
            if in_engine:  # The same for all that this backward call runs.
                self._backward = task, spots
        else:
            spots = self._backward[1]
        spot, inner, engine = spots
        raw.forward = None
        phase, python_backward, name = "forward", False, None
        node, running = self._node(ask) if task >= 0 else (None, False)
        module = None
        if running:
            recomputing = not engine and spot is not None and _in_checkpoint(frame)
            python_backward = not engine and spot is not None and not recomputing
            phase = "forward" if recomputing else "backward"
            if node is not None:
                name, sequence = node
                raw.forward = self._forward_of(name, sequence) if sequence < _NO_SEQUENCE else None
                if raw.forward is not None and not recomputing:
                    module = self.raws[raw.forward].call.module
        elif self.in_optimizer and not (self.in_closure and torch.is_grad_enabled()):
            phase = "optimizer"
        module = module or self.modules.current()
        step = self.step
        call = _new(OperatorCall, (op, spot, inner, phase, name, module, python_backward, step, grad, names, forms))
        if len(self.raws) < _SHARED_FROM:
            raw.call = call
            return
        at = (id(spot[0]), spot[1]) if spot is not None else None
        inside = (id(inner[0]), inner[1]) if inner is not None else None
        key = (id(op), at, inside, phase, name, *module[:2], id(module[2]), python_backward, step, grad, names, forms)
        raw.call = self._calls.setdefault(key, call)

    def _forward_of(self, name: str, sequence: int) -> int | None:
        """The event that made the autograd node of this name and number."""
        made = self._sequence.get(sequence)
        if made is None or self.raws[made].call.func.view:  # `vmap` moves dimensions before it calls the operator
            wanted = name.partition("Backward")[0].lower()
            start = self._levels.get(sequence) if made is None else made
            following = range(start, min(start + _MOST_LEVELS, len(self.raws))) if start is not None else ()
            found = (i for i in following if self.raws[i].call.func.name.replace("_", "") == wanted)
            return next(found, made)
        return made

    def _node(self, ask: bool) -> tuple[tuple[str, int] | None, bool]:
        """Name and number of the autograd node that runs, and whether one does.

        Python sees a node through an object that lives as long as the node. A chain of tens of thousands of such
        nodes overflows the stack when torch frees it, so not every node of a long step is asked for.
        """
        if not ask:
            return None, True
        node = torch._C._current_autograd_node()
        if node is None:
            return None, False
        name, sequence = node.name(), node._sequence_nr()
        if sequence != self._last_asked:
            self._last_asked = sequence
            self._nodes += 1
        # An in-place write to a view: this node was made right after the one of the operator that wrote.
        return (name, sequence - 1 if name.endswith("CopySlices") else sequence), True

    def reads_from_elsewhere(self, event: int) -> bool:
        """Whether an event has read what autograd has computed, but no recorded operator."""
        return not self.memory.from_elsewhere.isdisjoint(self.raws[event].storages)

    def trace(self, parts: Parts | None = None) -> Trace:
        """Everything recorded so far as plain values; module paths start at the models in `parts`."""
        return Trace(Events(self.raws, self.memory, parts or {}))


def _in_checkpoint(frame: Any) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("checkpoint.py") and f"torch{os.sep}utils" in name:
            return True
        if frame.f_code.co_name == ENGINE:
            return False
        frame = frame.f_back
    return False


def _ends(t: Tensor) -> tuple[float | None, float | None]:
    """Minimum and maximum, if there are any."""
    plain = readable(t)
    return (extremes(plain) or (None, None)) if plain is not None else (None, None)


class _Mode(TorchDispatchMode):
    """Passes each operator to the tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.tracer = tracer
        self.on = True
        self._suspended = self._popped = False
        self.thread = threading.get_ident()
        self.pauses, self.last_node = 0, -1
        """For a thread besides the first one: how often it is paused, and see `Tracer._last_node`."""
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
        if self._suspended or self.pauses or not self.on:
            return func(*args, **(kwargs or {}))
        return self.tracer.record(func, args, kwargs or {})


_running: weakref.WeakSet[_Mode] = weakref.WeakSet()


def _stop_in_child() -> None:
    """Stops recording in a forked DataLoader worker, which inherits the mode of its parent."""
    for mode in _running:
        mode.on = False


os.register_at_fork(after_in_child=_stop_in_child)
