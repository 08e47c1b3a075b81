"""What is kept of each operator, how it becomes a trace, and the first difference between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from firstnan.observe.module_stack import Place, whole_path
from firstnan.observe.sites import Spot, resolve
from firstnan.records import Operand, OpEvent, Site, TensorStat
from firstnan.records.operator_families import RANDOM
from firstnan.tensors.finite import extremes, readable
from firstnan.tensors.models import Parts
from firstnan.tracing.examine import Detail, numbers_in
from firstnan.tracing.memory import Memory
from firstnan.tracing.operators import OpInfo


class OperatorCall(NamedTuple):
    """What the same call has in common each time it runs: many records share one."""

    func: OpInfo
    spot: Spot | None
    inner: Spot | None
    phase: str
    node: str | None
    module: Place
    python_backward: bool
    step: int
    grad: bool
    names: tuple[str, ...]
    """Of the tensors that it read."""
    forms: tuple[tuple[torch.Size, torch.dtype], ...]
    """Of its results."""


class NonFiniteCall(NamedTuple):
    """What is known besides of a call that wrote non-finite values or raised an exception."""

    detail: Detail
    scalars: tuple[tuple[str, Any], ...]
    bad_writers: tuple[tuple[int, ...], ...]
    """For each tensor it read, the events that left non-finite values in it."""
    raised: str | None


class Raw:
    """One operator call while the program runs: no text is formatted and no source is read yet.

    A step may have a million of them, so a record holds numbers, never a tensor, and few objects of its own.
    """

    __slots__ = ("call", "finding", "fingerprint", "forward", "numbers", "ranges", "region")
    call: OperatorCall
    forward: int | None
    numbers: tuple[int | None, ...]
    """For each tensor it read the event that wrote to it last (None if it is from before the trace) and its storage;
    then the storages that it wrote to."""
    ranges: tuple[float | None, ...]
    """Minimum and maximum of each result; empty if none was read."""
    finding: NonFiniteCall | None
    fingerprint: Fingerprint | None
    """What to compare with a replay of the same step, if that was asked for."""
    region: str

    @property
    def spot(self) -> Spot | None:
        return self.call.spot

    @property
    def phase(self) -> str:
        return self.call.phase

    @property
    def raised(self) -> str | None:
        return self.finding.raised if self.finding is not None else None

    @property
    def uninitialized(self) -> bool:
        return self.call.func.empty

    @property
    def writers(self) -> tuple[int | None, ...]:
        return self.numbers[: 2 * len(self.call.names) : 2]

    @property
    def storages(self) -> tuple[int | None, ...]:
        """All storages it read or wrote."""
        return self.numbers[1 : 2 * len(self.call.names) : 2] + self.writes

    @property
    def writes(self) -> tuple[int | None, ...]:
        return self.numbers[2 * len(self.call.names) :]

    def range(self, output: int) -> tuple[float | None, float | None]:
        return (self.ranges[2 * output], self.ranges[2 * output + 1]) if self.ranges else (None, None)

    def depends_on(self) -> set[int]:
        """The events that its non-finite values came from."""
        found = {w for writers in self.finding.bad_writers for w in writers} if self.finding is not None else set()
        return found if self.forward is None else {*found, self.forward}

    def renumber(self, new: dict[int, int]) -> None:
        """Gives events new numbers; those without one were dropped."""
        n = 2 * len(self.call.names)
        numbers = [w if i >= n or i % 2 or w is None else new.get(w) for i, w in enumerate(self.numbers)]
        self.numbers = tuple(numbers)
        self.forward = None if self.forward is None else new.get(self.forward)
        if self.finding is not None:
            bad = tuple(tuple(new[w] for w in writers if w in new) for writers in self.finding.bad_writers)
            self.finding = self.finding._replace(bad_writers=bad)


_MAX_BUILT = 1 << 17  # Events; about 1,000 bytes each.


class Events(Sequence[OpEvent]):
    """The records as plain values. Of a long trace, only so many are kept; the others are made again when needed."""

    def __init__(self, raws: list[Raw], memory: Memory, parts: Parts) -> None:
        self._raws, self._roles, self._parts = raws, memory.roles, parts
        self._parameters = memory.parameters
        self._at = range(len(raws))
        self._built: dict[int, OpEvent] = {}
        self._places: dict[int, tuple[Site | None, str]] = {}
        """By the id of a call: its line and the module's path."""

    def __len__(self) -> int:
        return len(self._at)

    @overload
    def __getitem__(self, index: int) -> OpEvent: ...
    @overload
    def __getitem__(self, index: slice) -> Events: ...
    def __getitem__(self, index: int | slice) -> OpEvent | Events:
        if isinstance(index, slice):
            part = copy(self)
            part._at = self._at[index]
            return part
        at = self._at[index]
        event = self._built.get(at)
        if event is None:
            event = self._event(at, self._raws[at])
            if len(self._built) < _MAX_BUILT:
                self._built[at] = event
        return event

    def _event(self, index: int, raw: Raw) -> OpEvent:
        call, finding, roles = raw.call, raw.finding, self._roles
        detail = finding.detail if finding else None
        role, label = next((roles[k] for k in raw.writes if k in roles), (None, ""))
        forms = enumerate(call.forms)
        site, module = self._places.get(id(call)) or self._place(call)
        by_chance = _multiplies_by_chance(finding, call, site)
        return OpEvent(
            index=index,
            op=_constructor_name(raw) if call.func.name == "tensor" else call.func.name,
            aten=call.func.aten,
            phase=call.phase,  # type: ignore[arg-type]
            step=call.step,
            inputs=tuple(self._operand(raw, i, name) for i, name in enumerate(call.names)),
            outputs=detail.outputs if detail else tuple(_range("result", *form, *raw.range(i)) for i, form in forms),
            scalars=finding.scalars if finding else (),
            site=site,
            library_site=resolve(call.inner) if call.inner and finding else None,
            module=module,
            module_type=call.module[1],
            node=call.node,
            forward=raw.forward,
            born=(detail.born or by_chance * sum(o.bad for o in detail.outputs)) if detail else 0,
            nan_from_inf=detail.nan_from_inf if detail else 0,
            on_purpose=detail is not None and detail.on_purpose and not by_chance,
            uninitialized=raw.uninitialized,
            witness=detail.witness if detail else (),
            witness_index=detail.witness_index if detail else None,
            bad_rows=detail.bad_rows if detail else (),
            raised=raw.raised,
            in_python_backward=call.python_backward,
            region=raw.region,  # type: ignore[arg-type]
            role=role,
            label=label,
            grad=call.grad,
            in_float64=detail.in_float64 if detail else None,
        )

    def _place(self, call: OperatorCall) -> tuple[Site | None, str]:
        site = resolve(call.spot) if call.spot else None
        place = self._places[id(call)] = site, whole_path(call.module, self._parts)
        return place

    def _operand(self, raw: Raw, position: int, name: str) -> Operand:
        writer, key = raw.numbers[2 * position : 2 * position + 2]
        role, label = self._roles.get(key, (None, "")) if key is not None else (None, "")
        finding = raw.finding
        if finding is None:
            made = self._raws[writer] if writer is not None else None
            seen = _range(name, *made.call.forms[0], *made.range(0)) if made and len(made.call.forms) == 1 else None
            if writer is None and role == "parameter":
                seen = self._weights(name, key)
            return Operand(name, seen, writer, role, label)
        given, guilty = finding.detail.inputs[position], finding.detail.guilty[position]
        if not guilty:
            return Operand(name, given, writer, role, label)
        # The last writer need not be the bad one: views of one storage are written one by one.
        # If no event left a bad value, it is from before the trace.
        *also, last = finding.bad_writers[position] or (None,)
        return Operand(name, given, last, role, label, guilty, tuple(i for i in also if i is not None))

    def _weights(self, name: str, key: int | None) -> TensorStat | None:
        """The range of weights that the step has not changed, so they are as the operator read them."""
        weights = self._parameters.get(key) if key is not None else None
        values = readable(weights) if weights is not None else None
        found = extremes(values) if values is not None else None
        if values is None or found is None or not all(map(math.isfinite, found)):
            return None
        return _range(name, values.shape, values.dtype, *found)


def _multiplies_by_chance(finding: NonFiniteCall | None, call: OperatorCall, site: Site | None) -> bool:
    """Whether it multiplies with an infinite number that the source does not ask for."""
    if finding is None or call.func.name not in ("mul", "div") or site is None or "inf" in site.code.lower():
        return False
    return any(isinstance(v, float) and math.isinf(v) for _, v in finding.scalars)


def _constructor_name(raw: Raw) -> str:
    """`torch.from_numpy` and the like are one operator to the dispatcher; the source tells them apart."""
    code = resolve(raw.spot).code if raw.spot else ""
    return next((n for n in ("from_numpy", "as_tensor", "asarray", "frombuffer") if f"{n}(" in code), "tensor")


def _range(name: str, shape: Any, dtype: torch.dtype, low: float | None, high: float | None) -> TensorStat:
    return TensorStat(name, tuple(shape), str(dtype).removeprefix("torch."), low, high)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint(NamedTuple):
    """What an operator was given from outside the trace and what it returned, as numbers to compare."""

    scalars: str
    outside: int
    results: int


INCOMPLETE = Fingerprint("", 0, 0)
"""Stands in the first record of a trace whose oldest records were dropped: it cannot be compared."""


class Difference(NamedTuple):
    """Who differed: the program (it ran or read something else) or the machine (same inputs, other results)."""

    whose: Literal["program", "machine"]
    text: str


def fingerprint(op: OpInfo, args: Any, kwargs: Any, outside: list[Tensor], results: list[Tensor]) -> Fingerprint:
    returned = () if op.empty or op.view else tuple(map(digest, results))
    scalars = ", ".join([f"{name} = {value}" for name, value in numbers_in(op, args, kwargs)])
    return Fingerprint(scalars, hash(tuple(map(digest, outside))), hash(returned))


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
    if any(raws and raws[0].fingerprint is INCOMPLETE for raws in (before, after)):
        return None
    # Only one of them may include how the batch was made.
    steps = [[raw for raw in raws if raw.region == "step"] for raws in (before, after)]
    for one, other in zip(*steps, strict=False):
        if one.call.func is not other.call.func or one.spot != other.spot:
            return Difference("program", f"{_at(one)} ran the first time, {_at(other)} the second time")
        a, b = one.fingerprint, other.fingerprint
        if a is None or b is None:
            continue
        if a.scalars != b.scalars:
            given = f"{a.scalars or 'no numbers'}, then with {b.scalars or 'no numbers'}"
            return Difference("program", f"{_at(one)} was called with {given}")
        if a.outside != b.outside:
            return Difference("program", f"{_at(one)} read different values, which were made before the step")
        if a.results != b.results:
            return _different_results(one, other, after)
    return None


def _different_results(one: Raw, other: Raw, raws: list[Raw]) -> Difference:
    values = f"{_at(one)} gave {_range_of(one)}, then {_range_of(other)}"
    if one.call.func.name == "tensor":
        return Difference("program", f"{values}, from Python numbers of the program")
    if one.call.func.name in RANDOM:
        return Difference("program", f"{values}: it draws from a random generator of the program's own")
    if any(writer is not None and raws[writer].uninitialized for writer in other.writers):
        return Difference("machine", f"{values}: it read memory that was never written")
    return Difference("machine", f"{values}, from the same numbers")


def _at(raw: Raw) -> str:
    site = resolve(raw.spot) if raw.spot else None
    prefix = "backward of " if raw.phase == "backward" else ""
    return prefix + raw.call.func.name + (f" in line {site.line}" if site else "")


def _range_of(raw: Raw) -> str:
    low, high = raw.range(0)
    if low is None or high is None:
        return "one result"
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
