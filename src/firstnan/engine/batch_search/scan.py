"""A scan without updates: the first bad batch of a loader, by testing groups of batches, then one by one.

Most bad batches are bad because of a sample, so a batch made of several fails if one of them does. Groups grow from
test to test, and a group that fails is halved: the first bad batch of n takes about 2 log2(n) calls of the step. Some
batches fail only alone (a batch without a single valid label), so if no group fails all of them are tried alone, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.batch_search.order import BatchOrder, Fetched
from firstnan.engine.batch_search.result import BadBatch, BatchSearch
from firstnan.engine.batch_search.training import Everything
from firstnan.engine.step_check import StepCheck
from firstnan.tensors.finite import tensors_in

_ALONE = 8
"""The first batches are tried alone, and groups begin with as many."""
_MOST_MEMORY = 1 << 30
"""Bytes: what a group's batches, and the values that backward needs of them, may take."""
_UNJUDGED = "step(batch) returned no loss and did not call backward, so only the batches and buffers were checked."
_IN_GROUPS = "The batches before it were tested in groups, not one by one."


class Scan:
    """Tries the batches of a loader from the same state: up to the first bad one, or all of them (`every`)."""

    def __init__(
        self, step: StepCheck, order: BatchOrder, everything: Everything, every: bool, advance: Callable[..., None]
    ) -> None:
        self._step, self._order, self._everything, self._every, self._advance = step, order, everything, every, advance
        self._found: list[BadBatch] = []
        self._groups = 0
        """How many calls of the step had several batches."""
        self._grouping = order.repeats and (order.length is None or order.length > 2 * _ALONE)
        """Whether the step takes groups; a generator's batches cannot be had again, to be tried alone as well."""
        self._passed = False
        """Whether a group was finite, so its batches were not tried one by one."""
        self._tested: set[int] = set()
        """The batches that were tried alone."""
        self._judged = False
        """Whether any call of the step had a loss or gradients."""
        self._memory = 1
        """The bytes that a batch takes, with the values that backward needs of it."""

    def run(self) -> BatchSearch:
        batches = self._order.once()
        self._test_alone(islice(batches, _ALONE) if self._grouping else batches)
        size = _ALONE
        while not self._done and (group := list(islice(batches, size))):
            self._search(group)
            size = min(2 * size, max(_MOST_MEMORY // self._memory, 1)) if self._grouping else 1
        notes = (_IN_GROUPS,) if self._found and self._passed else ()
        if self._passed and not self._found:
            self._everything.restore_random()
            self._test_alone(f for f in self._order.once() if f.index not in self._tested)
        if self._tested and not self._judged and not self._found:
            notes = (_UNJUDGED,)
        return BatchSearch(
            "scan",
            tuple(self._found),
            replays=self._step.calls,
            groups=self._groups,
            of=self._order.length,
            notes=notes,
        )

    @property
    def _done(self) -> bool:
        return bool(self._found) and not self._every

    def _test_alone(self, batches: Iterable[Fetched]) -> None:
        for fetched in batches:
            self._test(fetched)
            if self._done:
                return

    def _test(self, fetched: Fetched) -> None:
        self._everything.restore()
        try:
            with _Saved() as saved:
                outcome = self._step(fetched.batch, updates=False)
        except Exception as error:
            error.add_note(f"firstnan: raised by step(batch) with batch {fetched.index} of the loader")
            raise
        seen, self._judged = outcome.seen, self._judged or outcome.judged
        self._tested.add(fetched.index)
        self._memory = max(self._memory, saved.bytes + _bytes(fetched.batch))
        if seen:
            self._found.append(BadBatch(fetched.index, seen, fetched.size, fetched.indices))
        self._advance(f"{len(self._found)} bad" if self._found else "")

    # Groups.

    def _search(self, group: list[Fetched]) -> None:
        """Adds the bad batches of a group: the first, or all of them."""
        before = len(self._found)
        if self._passes(group):
            return
        self._halve(group)
        if len(self._found) == before and self._grouping:  # bad only together, as a sum that overflows
            self._test_alone(group)

    def _halve(self, group: list[Fetched]) -> None:
        """The same for a group that is known to be bad."""
        if len(group) == 1 or not self._grouping:
            self._test_alone(group)
            return
        middle = len(group) // 2
        left, right = group[:middle], group[middle:]
        before = len(self._found)
        if not self._passes(left):
            self._halve(left)
        # If the left half is good, the right one is bad; if not, it may be.
        if not self._done and (len(self._found) == before or not self._passes(right)):
            self._halve(right)

    def _passes(self, group: list[Fetched]) -> bool:
        """Whether a batch made of all of these is known to be good."""
        whole = joined([fetched.batch for fetched in group]) if self._grouping and len(group) > 1 else None
        if whole is None:
            self._grouping = self._grouping and len(group) == 1
            return False
        self._everything.restore()
        self._groups += 1
        try:
            good = not self._step(whole, updates=False).seen
        except Exception:  # a step for batches of one size, for example
            self._grouping = good = False
        if good:
            self._passed = True
            for _ in group:
                self._advance(f"{len(self._found)} bad" if self._found else "")
        return good


class _Saved:
    """Counts the bytes that autograd keeps for backward."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        with contextlib.suppress(Exception):  # a tensor without a storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> _Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _bytes(batch: Any) -> int:
    return sum(t.numel() * t.element_size() for _, t in tensors_in(batch))


def joined(batches: Sequence[Any]) -> Any:
    """One batch with the samples of all of these; None if they do not fit together."""
    sizes = [{t.shape[0] for _, t in tensors_in(batch) if t.dim()} for batch in batches]
    if any(len(rows) != 1 for rows in sizes):  # which dimension the samples are in is not known
        return None
    try:
        return _joined(batches, [rows.pop() for rows in sizes])
    except _DoNotFitError:
        return None


class _DoNotFitError(Exception):
    """The parts of two batches do not fit together."""


def _joined(parts: Sequence[Any], sizes: list[int]) -> Any:
    first = parts[0]
    kind: Any = type(first)
    if any(type(part) is not kind for part in parts):
        raise _DoNotFitError
    if isinstance(first, Tensor):
        return _joined_tensors(parts, sizes)
    if isinstance(first, dict):
        if any(part.keys() != first.keys() for part in parts):
            raise _DoNotFitError
        return kind({key: _joined([part[key] for part in parts], sizes) for key in first})
    if isinstance(first, list | tuple):
        if [len(part) for part in parts] == sizes and all(isinstance(x, str | int | float) for p in parts for x in p):
            return kind(x for part in parts for x in part)  # one element per sample
        if any(len(part) != len(first) for part in parts):
            raise _DoNotFitError
        members = [_joined([part[i] for part in parts], sizes) for i in range(len(first))]
        return kind(*members) if hasattr(first, "_fields") else kind(members)
    if not isinstance(first, str | int | float | None) or any(part != first for part in parts):
        raise _DoNotFitError
    return first


def _joined_tensors(parts: Sequence[Tensor], sizes: list[int]) -> Tensor:
    first = parts[0]
    if type(first) is not Tensor or first.layout is not torch.strided or first.requires_grad:
        raise _DoNotFitError
    if not first.dim():
        if any(not torch.equal(part, first) for part in parts):
            raise _DoNotFitError
        return first
    alike = all((p.shape[1:], p.dtype, p.device) == (first.shape[1:], first.dtype, first.device) for p in parts)
    if not alike or [len(p) for p in parts] != sizes:
        raise _DoNotFitError
    return torch.cat(list(parts))
