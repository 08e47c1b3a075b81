"""Splits a batch into samples, and builds copies of the batch with some samples replaced."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstnan.records import Feature
from firstnan.tensors.batches import copy_batch, rows_are_samples
from firstnan.tensors.finite import tensors_in, unravel

_MOST_FEATURES = 3
_FEW = 4
_FAR = 1.0
_SINGLE = (str, bytes, int, float, complex, type(None))
_SHARED = (torch.nn.Parameter, torch.nn.Module, torch.optim.Optimizer, torch.device, torch.dtype)
"""Types that are not data, although a step may be called with them."""


class CutError(Exception):
    """The batch cannot be split because of one of its members; the message names it."""


class Cut:
    """A batch split into samples; the batch itself is never written to."""

    def __init__(self, batch: Any, size: int) -> None:
        self.batch, self.size = batch, size
        made = _Made(size, list(range(size)))
        made.of(batch, "batch")  # CutError where it cannot be
        if not made.parts:
            raise CutError("nothing in it has samples")

    def replaced(self, by: dict[int, int]) -> Any:
        """A copy of the batch in which sample `i` is a copy of sample `by[i]`."""
        return _Made(self.size, [by.get(i, i) for i in range(self.size)]).of(self.batch, "batch")

    def members(self) -> Iterator[tuple[str, Tensor]]:
        """Every numeric tensor with one row per sample, with samples as the first dimension."""
        for name, t in tensors_in(self.batch, "batch"):
            along = _dimension(t, self.size)
            if along is not None and t.numel() and not (t.is_complex() or t.is_quantized):
                yield name, t.detach().movedim(along, 0)

    def features(self, bad: Sequence[int]) -> tuple[Feature, ...]:
        """What is unusual about the bad samples compared with others: non-finite, out-of-range, constant values."""
        found = []
        healthy = [i for i in range(self.size) if i not in set(bad)]
        for name, rows in self.members():
            if healthy:
                wide = rows.to(torch.float64).reshape(self.size, -1)
                for sample in bad:
                    found += _unusual(name, sample, wide, healthy, tuple(rows.shape[1:]))
        order = {sample: at for at, sample in enumerate(bad)}
        return tuple(sorted(found, key=lambda f: (order[f.sample], math.isfinite(f.value))))


def cut(batch: Any, indices: Any = None) -> Cut:
    """The batch split into samples, as many as the sampler chose if that fits; CutError if it cannot be split."""
    if not isinstance(indices, list | tuple):
        return Cut(batch, _size(batch))
    try:
        return Cut(batch, len(indices))
    except CutError:
        firsts = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}
        if len(firsts) != 1 or not rows_are_samples(min(firsts), len(indices)):
            raise
        return Cut(batch, firsts.pop())


def _size(batch: Any) -> int:
    """The number of samples: a length that all tensors have, and most of them as the first dimension."""
    if isinstance(batch, list | tuple) and len(batch) > _FEW:
        kinds = {type(part) for part in batch}
        if len(kinds) == 1 and not issubclass(kinds.pop(), Tensor):
            return len(batch)  # not collated: one element per sample
    shapes = [tuple(t.shape) for _, t in tensors_in(batch) if t.dim()]
    firsts = Counter(shape[0] for shape in shapes)
    fitting = [n for n in firsts if all(n in shape[:2] for shape in shapes)]
    if not fitting and isinstance(batch, list):
        return len(batch)
    if not firsts:
        raise CutError("nothing in it has samples")
    return max(fitting or firsts, key=lambda n: firsts[n])


def _dimension(t: Tensor, size: int) -> int | None:
    """The dimension of the samples: the first, or the second if time comes first."""
    if t.layout is not torch.strided or t.is_nested:
        return None
    return next((d for d in range(min(t.dim(), 2)) if t.shape[d] == size), None)


class _Made:
    """Builds a copy of the batch with its samples in another order."""

    def __init__(self, size: int, order: list[int]) -> None:
        self.size, self.order = size, order
        self.parts = 0
        """The number of members that have samples."""

    def of(self, value: Any, name: str) -> Any:
        if isinstance(value, _SHARED + _SINGLE) or callable(value):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if type(value).__module__ == "numpy" and hasattr(value, "shape"):
            return self._array(value, name)
        if isinstance(value, list | tuple | deque):
            return self._sequence(value, name)
        if isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "keys") and hasattr(value, "data")):
            make: Callable[..., Any] = type(value)  # BatchEncoding and similar types are built from a dict
            return make({k: self.of(v, f"{name}[{k!r}]") for k, v in value.items()})
        if is_dataclass(value) and not isinstance(value, type):
            parts = {f.name: self.of(getattr(value, f.name), f"{name}.{f.name}") for f in fields(value) if f.init}
            return replace(value, **parts)
        if next(tensors_in(value), None) is None:
            return value
        raise CutError(f"{name} is a {type(value).__name__}, whose samples are not known")

    def _sequence(self, value: Any, name: str) -> Any:
        kind = type(value)
        if hasattr(value, "_fields"):
            return kind(*(self.of(v, f"{name}.{f}") for f, v in zip(value._fields, value, strict=True)))
        # One element per sample: names, boxes, sequences of different lengths. A short list may be parts of a batch.
        if len(value) == self.size and (self.size > _FEW or all(map(_is_single, value))):
            return self._elements(value)
        try:
            return kind(self.of(v, f"{name}[{i}]") for i, v in enumerate(value))
        except CutError:
            if len(value) != self.size:
                raise
            return self._elements(value)

    def _elements(self, value: Any) -> Any:
        self.parts += 1
        return type(value)(copy_batch(value[i]) for i in self.order)

    def _array(self, value: Any, name: str) -> Any:
        if not value.shape:
            return value
        if value.shape[0] != self.size:
            raise CutError(f"{name} has {value.shape[0]} rows for {self.size} samples")
        self.parts += 1
        return value[self.order]

    def _tensor(self, t: Tensor, name: str) -> Tensor:
        if t.dim() == 0:
            return t.detach().clone().requires_grad_(t.requires_grad)
        along = _dimension(t, self.size)
        if along is None:
            raise CutError(f"{name} is {list(t.shape)}, which does not fit {self.size} samples")
        self.parts += 1
        index = torch.tensor(self.order, device=t.device)
        return t.detach().index_select(along, index).requires_grad_(t.requires_grad)


def _is_single(value: Any) -> bool:
    return isinstance(value, _SINGLE) or (isinstance(value, Tensor) and value.dim() == 0)


def _unusual(name: str, sample: int, rows: Tensor, healthy: list[int], shape: tuple[int, ...]) -> list[Feature]:
    mine, theirs = rows[sample], rows[healthy]
    theirs = theirs[torch.isfinite(theirs).all(1)]
    if not len(theirs):
        return []
    if len(mine) > 1 and _alike(mine[None]).all() and not _alike(theirs).any():
        return [Feature(sample, name, None, mine[0].item(), theirs.min().item(), theirs.max().item())]
    low, high = theirs.amin(0), theirs.amax(0)
    # The distance from the range at this position, in units of the range: chance alone exceeds it slightly.
    score = torch.maximum(mine - high, low - mine) / (high - low).clamp_min(1e-12)
    score[(mine == 0) & ~(theirs == 0).any()] = _FAR
    score[~torch.isfinite(mine)] = math.inf
    order = score.argsort(descending=True, stable=True)[:_MOST_FEATURES].tolist()
    return [
        Feature(sample, name, unravel(at, shape), mine[at].item(), low[at].item(), high[at].item())
        for at in order
        if score[at] >= _FAR
    ]


def _alike(rows: Tensor) -> Tensor:
    """For each row, whether all its values are equal."""
    return (rows == rows[:, :1]).all(1)
