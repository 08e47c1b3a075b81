"""What the tracer keeps of each operator while the program runs, and how it becomes a Trace afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from firstnan.observe.module_stack import Place, whole_path
from firstnan.observe.sites import Spot, resolve
from firstnan.records import Operand, OpEvent, TensorStat, Trace
from firstnan.tensors.names import Parts
from firstnan.tracing.examine import Detail
from firstnan.tracing.memory import Memory
from firstnan.tracing.operators import OpInfo


@dataclass(slots=True)
class Read:
    """One tensor that an operator read."""

    name: str
    writer: int | None
    """The event that wrote to it last; None: it came from outside."""
    key: int | None
    """Its memory."""
    bad_writers: tuple[int, ...] = ()
    """The events that left something non-finite there."""


class Raw:
    """One operator call as it is kept while the program runs: no strings are made, no source is read."""

    __slots__ = (
        "backward", "detail", "engine", "forward", "func", "grad", "inner", "mark", "module", "node", "outputs",
        "python_backward", "raised", "reads", "region", "scalars", "spot", "step", "uninitialized", "writes",
    )  # fmt: skip
    func: OpInfo
    spot: Spot | None
    inner: Spot | None
    engine: bool
    backward: str
    node: str | None
    forward: int | None
    module: Place
    reads: list[Read]
    outputs: list[tuple[Any, torch.dtype, float | None, float | None]]
    writes: list[int]
    detail: Detail | None
    mark: Any
    """What to compare with another run of the same step, where that is wanted."""
    scalars: tuple[tuple[str, Any], ...]
    step: int
    region: str
    raised: str | None
    uninitialized: bool
    python_backward: bool
    grad: bool


def finished(raws: list[Raw], memory: Memory, parts: Parts) -> Trace:
    """Everything recorded so far, as plain values; source is read only now, and paths begin at the models."""
    return Trace(tuple(_event(raws, memory, i, raw, whole_path(raw.module, parts)) for i, raw in enumerate(raws)))


def _event(raws: list[Raw], memory: Memory, index: int, raw: Raw, module: str) -> OpEvent:
    detail, roles = raw.detail, memory.roles
    role, label = next((roles[k] for k in raw.writes if k in roles), (None, ""))
    return OpEvent(
        index=index,
        op=_given_name(raw) if raw.func.name == "tensor" else raw.func.name,
        aten=raw.func.aten,
        phase=raw.backward,  # type: ignore[arg-type]
        step=raw.step,
        inputs=tuple(_operand(raws, memory, detail, i, read) for i, read in enumerate(raw.reads)),
        outputs=detail.outputs if detail else tuple(_range("result", *output) for output in raw.outputs),
        scalars=raw.scalars,
        site=resolve(raw.spot) if raw.spot else None,
        library_site=resolve(raw.inner) if raw.inner and (detail or raw.raised) else None,
        module=module,
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
        in_float64=detail.in_float64 if detail else None,
    )


def _operand(raws: list[Raw], memory: Memory, detail: Detail | None, position: int, read: Read) -> Operand:
    role, label = memory.roles.get(read.key, (None, "")) if read.key is not None else (None, "")
    if detail is None:
        seen = None
        if read.writer is not None and len(raws[read.writer].outputs) == 1:
            seen = _range(read.name, *raws[read.writer].outputs[0])
        return Operand(read.name, seen, read.writer, role, label)
    given, guilty = detail.inputs[position], detail.guilty[position]
    if not guilty:
        return Operand(read.name, given, read.writer, role, label)
    # What was last written is not always what was bad: views of one memory are written one by one.
    # Where nobody left something bad, it comes from outside.
    *also, writer = read.bad_writers or (None,)
    return Operand(read.name, given, writer, role, label, guilty, tuple(i for i in also if i is not None))


def _given_name(raw: Raw) -> str:
    """`torch.from_numpy` and the like reach the dispatcher as one operator: the source tells them apart."""
    code = resolve(raw.spot).code if raw.spot else ""
    return next((n for n in ("from_numpy", "as_tensor", "asarray", "frombuffer") if f"{n}(" in code), "tensor")


def _range(name: str, shape: Any, dtype: torch.dtype, low: float | None, high: float | None) -> TensorStat:
    return TensorStat(name, tuple(shape), str(dtype).removeprefix("torch."), low, high)
