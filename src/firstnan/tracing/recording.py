"""What is kept of each operator, how it becomes a trace, and the first difference between two of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from firstnan.observe.module_stack import Place, whole_path
from firstnan.observe.sites import Spot, resolve
from firstnan.records import Operand, OpEvent, TensorStat, Trace
from firstnan.records.operator_families import RANDOM
from firstnan.tensors.finite import readable
from firstnan.tensors.models import Parts
from firstnan.tracing.examine import Detail, numbers_in
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


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """What an operator was given from outside the trace and what it returned, as numbers to compare."""

    scalars: tuple[tuple[str, Any], ...]
    outside: tuple[int | None, ...]
    results: tuple[int | None, ...]


class Difference(NamedTuple):
    """Who differed: the program (it ran or read something else) or the machine (same inputs, other results)."""

    whose: Literal["program", "machine"]
    text: str


def fingerprint(op: OpInfo, args: Any, kwargs: Any, outside: list[Tensor], results: list[Tensor]) -> Fingerprint:
    returned = () if op.empty or op.view else tuple(map(digest, results))
    return Fingerprint(numbers_in(op, args, kwargs), tuple(map(digest, outside)), returned)


def digest(t: Tensor) -> int | None:
    """A number that changes when the values do."""
    if not t.is_floating_point() and not t.is_complex():
        plain = t.detach() if t.layout is torch.strided and not t.is_meta and type(t) is Tensor else None
    else:
        plain = readable(t)
    if plain is None or not plain.numel():
        return None
    # A sum of 8-byte words is the fastest way to read a large tensor.
    flat, per_word = plain.reshape(-1), 8 // plain.element_size()
    if flat.stride(0) != 1 or flat.storage_offset() % per_word:
        flat = flat.clone(memory_format=torch.contiguous_format)
    words = flat.numel() // per_word * per_word
    return int(flat[:words].view(torch.int64).sum()) + int(flat[words:].view(_BITS[flat.element_size()]).sum())


def first_difference(before: list[Raw], after: list[Raw]) -> Difference | None:
    """The first difference between two traces of a step; None if all operators in both agree."""
    # Only one of them may include how the batch was made.
    steps = [[raw for raw in raws if raw.region == "step"] for raws in (before, after)]
    for one, other in zip(*steps, strict=False):
        if one.func is not other.func or one.spot != other.spot:
            return Difference("program", f"{_at(one)} ran the first time, {_at(other)} the second time")
        a, b = one.fingerprint, other.fingerprint
        if a is None or b is None:
            continue
        if repr(a.scalars) != repr(b.scalars):  # repr, because NaN != NaN
            return Difference("program", f"{_at(one)} was called with {_numbers(a)}, then with {_numbers(b)}")
        if a.outside != b.outside:
            return Difference("program", f"{_at(one)} read different values, which were made before the step")
        if a.results != b.results:
            return _different_results(one, other, after)
    return None


def _different_results(one: Raw, other: Raw, raws: list[Raw]) -> Difference:
    values = f"{_at(one)} gave {_range_of(one)}, then {_range_of(other)}"
    if one.func.name == "tensor":
        return Difference("program", f"{values}, from Python numbers of the program")
    if one.func.name in RANDOM:
        return Difference("program", f"{values}: it draws from a random generator of the program's own")
    if any(read.writer is not None and raws[read.writer].uninitialized for read in other.reads):
        return Difference("machine", f"{values}: it read memory that was never written")
    return Difference("machine", f"{values}, from the same numbers")


def _at(raw: Raw) -> str:
    site = resolve(raw.spot) if raw.spot else None
    prefix = "backward of " if raw.backward == "backward" else ""
    return prefix + raw.func.name + (f" in line {site.line}" if site else "")


def _numbers(given: Fingerprint) -> str:
    return ", ".join(f"{name} = {value}" for name, value in given.scalars) or "no numbers"


def _range_of(raw: Raw) -> str:
    low, high = raw.outputs[0][2:] if raw.outputs else (None, None)
    if low is None or high is None:
        return "one result"
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
