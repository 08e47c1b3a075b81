"""What the tracer keeps about each operator while the program runs, and how that becomes a Trace."""

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
    """The event that wrote to it last; None if it is from before the trace."""
    key: int | None
    """Its storage."""
    bad_writers: tuple[int, ...] = ()
    """The events that left non-finite values in it."""


class Raw:
    """One operator call while the program runs: no text is formatted and no source is read yet."""

    __slots__ = (
        "backward", "detail", "engine", "fingerprint", "forward", "func", "grad", "inner", "module", "node", "outputs",
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
    fingerprint: Any
    """What to compare with a replay of the same step, if that was asked for."""
    scalars: tuple[tuple[str, Any], ...]
    step: int
    region: str
    raised: str | None
    uninitialized: bool
    python_backward: bool
    grad: bool


def to_trace(raws: list[Raw], memory: Memory, parts: Parts) -> Trace:
    """Everything recorded so far as plain values. Source is read now; module paths start at the models."""
    return Trace(tuple(_event(raws, memory, i, raw, whole_path(raw.module, parts)) for i, raw in enumerate(raws)))


def _event(raws: list[Raw], memory: Memory, index: int, raw: Raw, module: str) -> OpEvent:
    detail, roles = raw.detail, memory.roles
    role, label = next((roles[k] for k in raw.writes if k in roles), (None, ""))
    return OpEvent(
        index=index,
        op=_constructor_name(raw) if raw.func.name == "tensor" else raw.func.name,
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
        outputs = raws[read.writer].outputs if read.writer is not None else ()
        seen = _range(read.name, *outputs[0]) if len(outputs) == 1 else None
        return Operand(read.name, seen, read.writer, role, label)
    given, guilty = detail.inputs[position], detail.guilty[position]
    if not guilty:
        return Operand(read.name, given, read.writer, role, label)
    # The last writer need not be the bad one: views of one storage are written one by one.
    # If no event left a bad value, it is from before the trace.
    *also, writer = read.bad_writers or (None,)
    return Operand(read.name, given, writer, role, label, guilty, tuple(i for i in also if i is not None))


def _constructor_name(raw: Raw) -> str:
    """`torch.from_numpy` and the like are one operator to the dispatcher; the source tells them apart."""
    code = resolve(raw.spot).code if raw.spot else ""
    return next((n for n in ("from_numpy", "as_tensor", "asarray", "frombuffer") if f"{n}(" in code), "tensor")


def _range(name: str, shape: Any, dtype: torch.dtype, low: float | None, high: float | None) -> TensorStat:
    return TensorStat(name, tuple(shape), str(dtype).removeprefix("torch."), low, high)
