"""The dispatch mode that records a Trace: every operator of a block, forward and backward, with module paths."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from firstnan.examine import Detail, examine, numbers_in
from firstnan.finite import SMALL, dtype_name, extremes, readable, stat
from firstnan.modules import ModuleStack
from firstnan.ops import OpInfo, info
from firstnan.records import Operand, OpEvent, Role, TensorStat, Trace
from firstnan.site import Ownership, Spot, resolve

_NO_SEQUENCE = 1 << 62  # AccumulateGrad and the like carry no usable sequence number.


class Raw:
    """One operator call as it is kept while the program runs: no strings are made, no source is read."""

    __slots__ = (
        "backward", "detail", "engine", "forward", "func", "grad", "inner", "module", "node", "outputs",
        "python_backward", "raised", "reads", "region", "scalars", "spot", "step", "uninitialized", "writes",
    )  # fmt: skip
    func: OpInfo
    spot: Spot | None
    inner: Spot | None
    engine: bool
    backward: str
    node: str | None
    forward: int | None
    module: tuple[str, str]
    reads: list[tuple[str, int | None, int]]
    """Name, index of the writer (None: from outside), storage key."""
    outputs: list[tuple[tuple[int, ...], str, float | None, float | None]]
    writes: list[int]
    detail: Detail | None
    scalars: tuple[tuple[str, Any], ...]
    step: int
    region: str
    raised: str | None
    uninitialized: bool
    python_backward: bool
    grad: bool


class Tracer:
    """Records the operators of the thread that starts it; `trace()` gives the finished record."""

    def __init__(self, ownership: Ownership | None = None) -> None:
        self.ownership = ownership or Ownership()
        self.step = 0
        self.region = "setup"
        self.in_optimizer = False
        self.in_closure = False
        """The optimizer calls the program back for its loss (LBFGS): what runs with gradients on is forward."""
        self.raws: list[Raw] = []
        self.writer: dict[int, int] = {}
        self.bad_writers: dict[int, list[int]] = {}
        self.empty: dict[int, int] = {}
        """Memory that was allocated and not yet wholly written, and the event that allocated it."""
        self.outside: dict[int, TensorStat | None] = {}
        self.roles: dict[int, tuple[Role, str]] = {}
        self.modules = ModuleStack()
        self.trouble: str | None = None
        self._alive: dict[int, StorageWeakRef] = {}
        self._sequence: dict[int, int] = {}
        self._mode: _Mode | None = None
        self._order: dict[int, int] = {}

    @property
    def running(self) -> bool:
        return self._mode is not None

    def start(self) -> None:
        if self._mode is None:
            self.modules.attach()
            self._mode = _Mode(self)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def stop(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.on = False
            self.modules.detach()
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own

    def __enter__(self) -> Tracer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def give_role(self, tensor: Tensor, role: Role, label: str) -> None:
        """Says what a tensor is to the program: later records name it so."""
        key = self.key(tensor)
        if key is not None:
            self.roles[key] = (role, label)

    def key(self, tensor: Tensor) -> int | None:
        """What identifies the memory of a tensor as long as this tracer lives."""
        if type(tensor) is not Tensor:
            local = getattr(tensor, "_local_tensor", None)
            if isinstance(local, Tensor):
                return self.key(local)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor.detach()._values()
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key: int = storage._cdata
        if key not in self._alive:
            # A weak reference keeps the address from being given to another storage.
            self._alive[key] = StorageWeakRef(storage)
        return key

    def last_bad(self, tensor: Tensor) -> int | None:
        """The event that last wrote something non-finite into the memory of this tensor."""
        key = self.key(tensor)
        bad = self.bad_writers.get(key) if key is not None else None
        return bad[-1] if bad else None

    def forget_healthy(self) -> None:
        """Drops what is not needed to explain a later failure; keeps memory bounded when tracing many steps."""
        bad = [i for i, r in enumerate(self.raws) if r.detail is not None or r.uninitialized or r.raised]
        bad = bad[-20_000:]
        new = {old: i for i, old in enumerate(bad)}
        self.raws = [self.raws[i] for i in bad]
        for r in self.raws:
            r.reads = [(n, None if w is None else new.get(w), k) for n, w, k in r.reads]
            r.forward = None if r.forward is None else new.get(r.forward)
        self._alive = {k: ref for k, ref in self._alive.items() if not ref.expired()}
        self.writer = {k: new[w] for k, w in self.writer.items() if w in new and k in self._alive}
        self.bad_writers = {
            k: kept
            for k, ws in self.bad_writers.items()
            if k in self._alive and (kept := [new[w] for w in ws if w in new])
        }
        self.empty = {k: new[w] for k, w in self.empty.items() if w in new and k in self._alive}
        self.outside = {k: v for k, v in self.outside.items() if k in self._alive}
        self.roles = {k: v for k, v in self.roles.items() if k in self._alive}
        self._sequence.clear()

    # The hot path: one call an operator.

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = info(func)
        if op.inert:
            return func(*args, **kwargs)
        tensors = _tensors(op, args, kwargs)
        before = None
        if op.mutated and not op.empty:
            before = {
                id(t): t.detach().clone()
                for n, t in tensors
                if n in op.mutated and t.numel() <= SMALL and t.layout is torch.strided
            }
        try:
            out = func(*args, **kwargs)
        except Exception as error:
            self._note_safely(op, args, kwargs, tensors, [], before, f"{type(error).__name__}: {error}")
            raise
        if func._schema.returns and isinstance(out, list | tuple):
            results = [o for o in out if isinstance(o, Tensor)]
        else:
            results = [out] if isinstance(out, Tensor) else []
        if op.mutated:
            results += [t for n, t in tensors if n in op.mutated and all(t is not r for r in results)]
        self._note_safely(op, args, kwargs, tensors, results, before, None)
        return out

    def _note_safely(self, *call: Any) -> None:
        """An error of ours is remembered and never reaches the program."""
        try:
            self._note(*call)
        except Exception as error:
            self.trouble = self.trouble or f"{call[0].aten}: {type(error).__name__}: {error}"

    def _note(
        self, op: OpInfo, args: Any, kwargs: Any, tensors: Any, results: Any, before: Any, raised: str | None
    ) -> None:
        raw = Raw()
        raw.func, raw.raised, raw.detail, raw.scalars = op, raised, None, ()
        raw.step, raw.region = self.step, self.region
        raw.reads = []
        for name, t in tensors:
            key = self.key(t)
            if key is None:
                continue
            writer = self.writer.get(key)
            if writer is None and key not in self.outside:
                self.outside[key] = self._first_sight(name, t)
            raw.reads.append((name, writer, key))
        self._place(raw)
        index = len(self.raws)
        raw.outputs, raw.writes, raw.uninitialized = [], [], op.empty
        self.raws.append(raw)
        self._map_sequence(raw, index)
        bad = False
        if op.name == "set":
            # Memory that comes from elsewhere, a worker process for one: not written here.
            for t in results:
                self._arrived(t)
        elif not op.empty and not op.view:
            for t in results:
                bad |= self._wrote(raw, t, index)
        else:
            for t in results:
                raw.outputs.append((tuple(t.shape), dtype_name(t), None, None))
                if op.empty and (key := self.key(t)) is not None:
                    self.writer[key] = index
                    raw.writes.append(key)
                    self.empty[key] = index
                    self.bad_writers.pop(key, None)
                    self.outside.pop(key, None)
        raw.grad = any(t.requires_grad for _, t in tensors) and torch.is_grad_enabled()
        if bad or raised:
            raw.scalars = numbers_in(op, args, kwargs)
            raw.detail = examine(op, tensors, results, raw.scalars, before)

    def _wrote(self, raw: Raw, t: Tensor, index: int) -> bool:
        plain = readable(t)
        key = self.key(t)
        ends = None
        if plain is not None:
            ends = extremes(plain)
        low, high = ends if ends else (None, None)
        raw.outputs.append((tuple(t.shape), dtype_name(t), low, high))
        bad = low is not None and high is not None and not (math.isfinite(low) and math.isfinite(high))
        if key is not None:
            self.writer[key] = index
            raw.writes.append(key)
            if key in self.empty or key in self.bad_writers:
                self._overwrote(key, t)
            if bad:
                self.bad_writers.setdefault(key, []).append(index)
        return bad

    def _overwrote(self, key: int, t: Tensor) -> None:
        if t.layout is torch.strided and t.numel() * t.element_size() >= t.untyped_storage().nbytes():
            self.empty.pop(key, None)
            self.bad_writers.pop(key, None)

    def _arrived(self, t: Tensor) -> None:
        key = self.key(t)
        if key is not None:
            self.writer.pop(key, None)
            self.bad_writers.pop(key, None)
            self.outside[key] = self._first_sight("data", t)

    def _first_sight(self, name: str, t: Tensor) -> TensorStat | None:
        plain = readable(t)
        ends = extremes(plain) if plain is not None else None
        if ends is None or (math.isfinite(ends[0]) and math.isfinite(ends[1])):
            return None
        return stat(name, t)

    def _place(self, raw: Raw) -> None:
        """Where in the source, in which layer and in which pass the operator runs."""
        frame = sys._getframe(4)
        raw.spot, raw.inner, raw.engine = self.ownership.spots(frame)
        node = torch._C._current_autograd_node()
        raw.node = raw.forward = None
        raw.python_backward = False
        if node is None:
            updating = self.in_optimizer and not (self.in_closure and torch.is_grad_enabled())
            raw.backward = "optimizer" if updating else "forward"
            raw.module = self.modules.here()
            return
        recomputing = not raw.engine and raw.spot is not None and _in_checkpoint(frame)
        raw.python_backward = not raw.engine and raw.spot is not None and not recomputing
        raw.backward = "forward" if recomputing else "backward"
        raw.node = node.name()
        sequence = node._sequence_nr()
        raw.forward = self._sequence.get(sequence) if sequence < _NO_SEQUENCE else None
        raw.module = self.modules.here() if recomputing or raw.forward is None else self.raws[raw.forward].module

    def _map_sequence(self, raw: Raw, index: int) -> None:
        if torch.is_grad_enabled():
            self._sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, index)

    # The finished record.

    def trace(self) -> Trace:
        """Everything recorded so far, as plain values."""
        return Trace(tuple(self._event(i, r) for i, r in enumerate(self.raws)))

    def _event(self, index: int, raw: Raw) -> OpEvent:
        detail = raw.detail
        role, label = next((self.roles[k] for k in raw.writes if k in self.roles), (None, ""))
        return OpEvent(
            index=index,
            op=_given_name(raw) if raw.func.name == "tensor" else raw.func.name,
            aten=raw.func.aten,
            phase=raw.backward,  # type: ignore[arg-type]
            step=raw.step,
            inputs=tuple(self._operand(raw, i, *read) for i, read in enumerate(raw.reads)),
            outputs=detail.outputs
            if detail
            else tuple(TensorStat("result", shape, dtype, low, high) for shape, dtype, low, high in raw.outputs),
            scalars=raw.scalars,
            site=resolve(raw.spot) if raw.spot else None,
            library_site=resolve(raw.inner) if raw.inner and (detail or raw.raised) else None,
            module=raw.module[0],
            module_type=raw.module[1],
            node=raw.node,
            forward=raw.forward,
            born=detail.born if detail else 0,
            nan_from_inf=detail.nan_from_inf if detail else 0,
            on_purpose=detail.on_purpose if detail else False,
            uninitialized=raw.uninitialized,
            witness=detail.witness if detail else (),
            bad_rows=detail.bad_rows if detail else (),
            raised=raw.raised,
            in_python_backward=raw.python_backward,
            region=raw.region,  # type: ignore[arg-type]
            role=role,
            label=label,
            grad=raw.grad,
        )

    def _operand(self, raw: Raw, position: int, name: str, writer: int | None, key: int) -> Operand:
        role, label = self.roles.get(key, (None, ""))
        if raw.detail is None:
            seen = None
            if writer is not None and len(self.raws[writer].outputs) == 1:
                shape, dtype, low, high = self.raws[writer].outputs[0]
                seen = TensorStat(name, shape, dtype, low, high)
            return Operand(name, seen, writer, role, label)
        given = raw.detail.inputs[position] if position < len(raw.detail.inputs) else None
        guilty = raw.detail.guilty[position] if position < len(raw.detail.guilty) else False
        if guilty:
            # What was last written is not always what was bad: views of one memory are written one by one.
            index = self._index_of(raw)
            bad = [w for w in self.bad_writers.get(key, ()) if w < index]
            if bad:
                writer = bad[-1]
            elif self.empty.get(key, index) < index:
                writer = self.empty[key]
        return Operand(name, given, writer, role, label, guilty)

    def _index_of(self, raw: Raw) -> int:
        if len(self._order) != len(self.raws):
            self._order = {id(r): i for i, r in enumerate(self.raws)}
        return self._order[id(raw)]


def _given_name(raw: Raw) -> str:
    """`torch.from_numpy` and the like reach the dispatcher as one operator: the source tells them apart."""
    code = resolve(raw.spot).code if raw.spot else ""
    return next((n for n in ("from_numpy", "as_tensor", "asarray", "frombuffer") if f"{n}(" in code), "tensor")


def _tensors(op: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensor arguments with the names that the schema gives them."""
    found: list[tuple[str, Tensor]] = []
    names = op.arguments
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            found.append((names[i], a))
        elif isinstance(a, list | tuple):
            found += [(names[i], t) for t in a if isinstance(t, Tensor)]
    for name, a in kwargs.items():
        if isinstance(a, Tensor):
            found.append((name, a))
        elif isinstance(a, list | tuple):
            found += [(name, t) for t in a if isinstance(t, Tensor)]
    return found


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
    """The private half of the tracer: hands each operator over and never lets an error of ours out."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.tracer = tracer
        self.on = True
        self.process = os.getpid()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while a trace runs, and the wrapper that this would add costs as much as a small operator.
        return False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.on or os.getpid() != self.process:
            return func(*args, **kwargs)
        return self.tracer.record(func, args, kwargs)
