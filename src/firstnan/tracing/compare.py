"""Compares two traces of one step and finds the first operator that differs."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from firstnan.observe.sites import resolve
from firstnan.records.operator_families import RANDOM
from firstnan.tensors.finite import readable
from firstnan.tracing.examine import numbers_in
from firstnan.tracing.operators import OpInfo
from firstnan.tracing.recording import Raw

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
    values = f"{_at(one)} gave {_range(one)}, then {_range(other)}"
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


def _range(raw: Raw) -> str:
    low, high = raw.outputs[0][2:] if raw.outputs else (None, None)
    if low is None or high is None:
        return "one result"
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"
