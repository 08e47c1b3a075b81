"""The samples of a batch: cutting it, replacing some of them, and finding them in the dataset."""

from __future__ import annotations

import base64
import itertools
import math
import operator
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, default_convert

from firstnan.engine.samples.underlying import underlying
from firstnan.observe.loaders import collate_of, dataset_of
from firstnan.records import Batch, Element, Feature, Preview, SampleValues
from firstnan.tensors.finite import tensors_in, unravel
from firstnan.tensors.state import RandomState, copy_batch, rows_are_samples
from firstnan.tensors.step_function import is_step_call

_MOST_FEATURES = 3
_MOST_SHOWN, _MOST_VALUES, _MOST_PIXELS = 4, 16, 64
"""Of how many bad samples values are kept, how many numbers of each tensor, and the side of a preview."""
_FEW = 4
_FAR, _VERY_FAR = 1.0, 10.0
_EXTREME = 1000.0
"""Times the median of the other samples: no range of healthy numbers includes that."""
_ENOUGH = 8
"""Healthy samples from which on their range says something."""
_SINGLE = (str, bytes, int, float, complex, type(None))
_SHARED = (torch.nn.Parameter, torch.nn.Module, torch.optim.Optimizer, torch.device, torch.dtype)
"""Types that are not data, although a step may be called with them."""


class CutError(Exception):
    """The batch cannot be split because of one of its members; the message names it."""


class OnePerSample(list[Any]):
    """A list whose elements are the samples, however many there are."""


class Cut:
    """A batch split into samples; the batch itself is never written to."""

    def __init__(self, batch: Any, size: int, *, numbered: bool = False) -> None:
        """`numbered`: rows may be those of the sample whose number a tensor of the batch gives them."""
        self.batch, self.size, self.numbered = batch, size, numbered
        self._lengths = list(_lengths(batch, size))
        sizes = {length for _, t in tensors_in(batch) for length in t.shape}
        self._falling = next((n for n in self._lengths if _is_falling(n) and (n[0] in sizes or sum(n) in sizes)), None)
        """The lengths by which the batch is sorted, if it is padded to the longest, or the samples are joined."""
        self._owners = list(_owners(batch, size)) if numbered else []
        made = _Made(size, list(range(size)), self._lengths, self._owners)
        made.of(batch, "batch")  # CutError where it cannot be
        if not made.parts:
            raise CutError("nothing in it has samples")
        self.parts = made.parts
        self.others: Cut | None = None
        """The samples of another batch, which may replace those of this one."""

    def replaced(self, by: dict[int, int]) -> Any:
        """A copy of the batch in which sample `i` is a copy of sample `by[i]`; numbers from `size` on are `others`."""
        order = [by.get(i, i) for i in range(self.size)]
        foreign = {i: one - self.size for i, one in enumerate(order) if one >= self.size}
        order = [i if one >= self.size else one for i, one in enumerate(order)]
        if self._falling is not None:
            order.sort(key=self._falling.__getitem__, reverse=True)  # packing padded sequences asks for it
        made = _Made(self.size, order, self._lengths, self._owners).of(self.batch, "batch")
        if foreign and self.others is not None:
            for (_, t), (_, other) in zip(tensors_in(made), tensors_in(self.others.batch), strict=True):
                along = _dimension(t, self.size)
                if along is not None:
                    to, rows = (torch.tensor(list(numbers), device=t.device) for numbers in (foreign, foreign.values()))
                    t.detach().index_copy_(along, to, other.detach().index_select(along, rows))
        return made

    def join(self, batch: Any) -> int:
        """Takes the samples of another batch of the same form as replacements too; returns how many there are."""
        firsts, mine = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}, list(tensors_in(self.batch))
        if len(firsts) != 1 or self._falling is not None or self._lengths_matter():
            return 0
        try:
            other = Cut(batch, firsts.pop())
        except CutError:
            return 0
        theirs = list(tensors_in(batch))
        alike = len(mine) == len(theirs) and all(
            t.dtype is o.dtype and t.dim() > 0 and t.shape[0] == self.size and t.shape[1:] == o.shape[1:]
            for (_, t), (_, o) in zip(mine, theirs, strict=False)
        )
        # Names and other members that are not tensors would stay those of the replaced sample.
        if not alike or other.parts != len(theirs) or self.parts != len(mine):
            return 0
        self.others = other
        return other.size

    def _lengths_matter(self) -> bool:
        return any(_dimension(t, self.size) is None for _, t in tensors_in(self.batch))

    def members(self) -> Iterator[tuple[str, Tensor]]:
        """Every numeric tensor with one row per sample, with samples as the first dimension."""
        for name, t in tensors_in(self.batch, "batch"):
            along = _dimension(t, self.size)
            if along is not None and t.numel() and not (t.is_complex() or t.is_quantized):
                yield name, t.detach().movedim(along, 0)

    def joined(self, sample: int) -> Iterator[Tensor]:
        """The part of a sample in every tensor that has the samples one after the other."""
        for _, t in tensors_in(self.batch, "batch"):
            lengths = _fitting(t, self._lengths) if _dimension(t, self.size) is None else None
            if lengths is not None:
                yield t.detach().split(lengths)[sample]

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

    def values(self, bad: Sequence[int]) -> tuple[SampleValues, ...]:
        """What the first of the bad samples hold, in a few numbers."""
        members = list(itertools.islice(self.members(), _MOST_SHOWN))
        return tuple(_shown(sample, name, rows) for sample in bad[:_MOST_SHOWN] for name, rows in members)


class Collated(Cut):
    """A batch that only its collate function can put together again, such as graphs packed into one."""

    def __init__(self, batch: Any, elements: list[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.batch, self.size = batch, len(elements)
        self._elements, self._collate = elements, collate
        self._lengths, self._falling, self.others, self.parts = [], None, None, 1

    def replaced(self, by: dict[int, int]) -> Any:
        return self._collate([copy_batch(self._elements[by.get(i, i)]) for i in range(self.size)])

    def join(self, batch: Any) -> int:
        return 0

    def members(self) -> Iterator[tuple[str, Tensor]]:
        # Columns are not samples, even if there are as many of them.
        rows = {name for name, t in tensors_in(self.batch, "batch") if t.shape[:1] == (self.size,)}
        return ((name, t) for name, t in super().members() if name in rows)

    @property
    def is_same(self) -> bool:
        """Whether the elements make the same batch again: they may be random, or used up."""
        both = list(itertools.zip_longest(tensors_in(self.batch), tensors_in(self.replaced({}))))
        return bool(both) and all(a and b and _are_equal(a[1], b[1]) for a, b in both)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype is not b.dtype or a.layout is not b.layout:
        return False
    return torch.equal(a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else torch.equal(a, b)


_RED = (220, 38, 38)


def _shown(sample: int, name: str, rows: Tensor) -> SampleValues:
    t = rows[sample]
    numbers = t.flatten()[:_MOST_VALUES].to("cpu", torch.float64).tolist()
    return SampleValues(sample, name, tuple(t.shape), tuple(numbers), _preview(t, rows))


def _preview(t: Tensor, rows: Tensor) -> Preview | None:
    """A small picture of a sample that is an image: channels, height, width; or without channels.

    Its shades are those of the whole batch, so a sample without contrast is seen as one. What is not finite is red.
    """
    if t.dim() == 2 and min(t.shape) >= 8:
        t = t[None]
    if t.dim() != 3 or t.shape[0] not in (1, 3, 4) or min(t.shape[1:]) < 4 or t.dtype is torch.bool:
        return None
    down, along = (
        torch.linspace(0, n - 1, min(n, _MOST_PIXELS)).round().to(t.device, torch.int64) for n in t.shape[1:]
    )
    small = t[:, down][:, :, along].to("cpu", torch.float64)
    finite = rows[torch.isfinite(rows)]
    if not finite.numel():
        return None
    low, high = (float(end) for end in torch.aminmax(finite))
    shades = (small - low) / ((high - low) or 1.0) * 255
    pixels = shades.nan_to_num(0.0, 255.0, 0.0).clamp(0, 255).round().to(torch.uint8).movedim(0, -1)
    bad = ~torch.isfinite(small).all(0)
    if bool(bad.any()):
        pixels = pixels[..., :3].expand(-1, -1, 3).clone()
        pixels[bad] = torch.tensor(_RED, dtype=torch.uint8)
    return Preview(
        len(along), len(down), pixels.shape[-1], base64.b64encode(bytes(pixels.flatten().tolist())).decode("ascii")
    )


def cut_by_numbers(batch: Any, indices: Any) -> Cut:
    """The batch split into samples by the numbers that its rows have; CutError if there are none."""
    return Cut(batch, len(indices) if isinstance(indices, list | tuple) else _size(batch), numbered=True)


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


def _lengths(batch: Any, size: int) -> Iterator[list[int]]:
    """How long each sample is, if a member of the batch says so: `size` whole numbers that are not negative."""
    for _, t in tensors_in(batch):
        if t.shape == (size,) and not (t.is_floating_point() or t.is_complex()) and t.dtype is not torch.bool:
            numbers = t.tolist()
            if min(numbers, default=-1) >= 0:
                yield numbers


def _fitting(t: Tensor, lengths: list[list[int]]) -> list[int] | None:
    """The lengths of the samples that are joined in this tensor, as the targets of a CTC loss are."""
    return next((n for n in lengths if t.dim() and t.layout is torch.strided and sum(n) == t.shape[0]), None)


def _is_falling(numbers: list[int]) -> bool:
    return numbers[0] > numbers[-1] and all(a >= b for a, b in itertools.pairwise(numbers))


class _Made:
    """Builds a copy of the batch with its samples in another order; `lengths` are those of joined samples."""

    def __init__(self, size: int, order: list[int], lengths: list[list[int]], owners: list[Tensor]) -> None:
        self.size, self.order, self.lengths, self.owners = size, order, lengths, owners
        self.parts = 0
        """The number of members that have samples."""

    def of(self, value: Any, name: str) -> Any:
        if isinstance(value, _SHARED + _SINGLE) or callable(value):
            return value
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if type(value).__module__ == "numpy" and hasattr(value, "shape"):
            return self._array(value, name)
        if is_step_call(value):
            function, args, kwargs = value
            made = [self.of(one, its_name) for its_name, one in function.named(args, kwargs, name)]
            return [function, tuple(made[: len(args)]), dict(zip(kwargs, made[len(args) :], strict=True))]
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
        certain = self.size > _FEW or isinstance(value, OnePerSample) or all(map(_is_single, value))
        if len(value) == self.size and certain:
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
        lengths = _fitting(t, self.lengths) if along is None else None
        if lengths is not None:
            self.parts += 1
            parts = t.detach().split(lengths)
            return torch.cat([parts[i] for i in self.order]).requires_grad_(t.requires_grad)
        owner = next((o for o in self.owners if len(o) == len(t)), None) if along is None else None
        if owner is not None:
            self.parts += 1
            return self._rows(t.detach(), owner).requires_grad_(t.requires_grad)
        if along is None:
            raise CutError(f"{name} is {list(t.shape)}, which does not fit {self.size} samples")
        self.parts += 1
        index = torch.tensor(self.order, device=t.device)
        return t.detach().index_select(along, index).requires_grad_(t.requires_grad)

    def _rows(self, t: Tensor, owner: Tensor) -> Tensor:
        """The rows of the samples in their new order, with the numbers that say whose they are."""
        rows = [(owner == i).nonzero().flatten() for i in self.order]
        made = t.index_select(0, torch.cat(rows))
        numbers = torch.cat([torch.full_like(r, i) for i, r in enumerate(rows)]).to(t.dtype)
        if t.dim() == 1 and torch.equal(t.to(owner), owner):
            return numbers
        if t.dim() == 2 and torch.equal(t[:, 0].to(owner), owner):
            made[:, 0] = numbers
        return made


def _owners(batch: Any, size: int) -> Iterator[Tensor]:
    """Whose each row is, if a tensor of the batch says so: boxes have the number of their image in the first column."""
    for _, t in tensors_in(batch):
        if t.dim() not in (1, 2) or not t.numel() or t.is_complex() or _dimension(t, size) is not None:
            continue
        told = t.detach() if t.dim() == 1 else t.detach()[:, 0]
        numbers = told.nan_to_num(-1.0).long()
        is_rising = torch.equal(numbers.to(told), told) and bool((numbers.diff() >= 0).all())
        if is_rising and numbers[0] >= 0 and size // 2 <= numbers[-1] < size and len(numbers.unique()) > 1:
            yield numbers


def _is_single(value: Any) -> bool:
    return isinstance(value, _SINGLE) or (isinstance(value, Tensor) and value.dim() == 0)


def _unusual(name: str, sample: int, rows: Tensor, healthy: list[int], shape: tuple[int, ...]) -> list[Feature]:
    mine, theirs = rows[sample], rows[healthy]
    theirs = theirs[torch.isfinite(theirs).all(1)]
    if not len(theirs):
        return []
    aside = _extreme_rows(theirs)
    theirs, apart = theirs[~aside], int(aside.sum())
    if len(mine) > 1 and _alike(mine[None]).all() and not _alike(theirs).any():
        return [Feature(sample, name, None, mine[0].item(), theirs.min().item(), theirs.max().item(), apart)]
    low, high = theirs.amin(0), theirs.amax(0)
    # The distance from the range at this position, in units of the range: chance alone exceeds it slightly.
    score = torch.maximum(mine - high, low - mine) / (high - low).clamp_min(1e-12)
    usual, lone = _by_chance(theirs)
    score[(score < usual) & (high > low)] = 0.0
    score[(high == low) & lone] = 0.0
    whole_numbers = bool((theirs == theirs.round()).all())
    score[(mine == 0) & ~(theirs == 0).any() & (not whole_numbers)] = _VERY_FAR
    score[(mine < 0) & ~(theirs < 0).any()] = _VERY_FAR
    score[~torch.isfinite(mine)] = math.inf
    order = score.argsort(descending=True, stable=True)[:_MOST_FEATURES].tolist()
    return [
        Feature(sample, name, unravel(at, shape), mine[at].item(), low[at].item(), high[at].item(), apart)
        for at in order
        if score[at] >= (_FAR if len(theirs) >= _ENOUGH else _VERY_FAR)
    ]


def _extreme_rows(rows: Tensor) -> Tensor:
    """The few rows with a number far beyond those of the others: they say nothing about what is usual.

    A step may fail because of one such sample and survive another, by the sign of the number or by chance.
    """
    usual = rows.abs().median(0).values
    extreme = ((rows.abs() > _EXTREME * usual) & (usual > 0)).any(1)
    return extreme if extreme.sum() * 8 <= len(rows) else torch.zeros_like(extreme)


def _by_chance(rows: Tensor) -> tuple[float, bool]:
    """How far the healthy samples are from the range of each other, and whether one differs where all others agree.

    What happens to healthy samples too is not unusual.
    """
    if len(rows) < 3:
        return 0.0, False
    ends = rows.sort(0).values
    above = (ends[-1] - ends[-2]) / (ends[-2] - ends[0]).clamp_min(1e-12)
    below = (ends[1] - ends[0]) / (ends[-1] - ends[1]).clamp_min(1e-12)
    above_all, below_all = (ends[-2] == ends[0]) & (ends[-1] > ends[0]), (ends[1] == ends[-1]) & (ends[0] < ends[1])
    scores = torch.cat([above[ends[-2] > ends[0]], below[ends[-1] > ends[1]]])
    return 1.5 * scores.max().item() if len(scores) else 0.0, bool((above_all | below_all).any())


def _alike(rows: Tensor) -> Tensor:
    """For each row, whether all its values are equal."""
    return (rows == rows[:, :1]).all(1)


_MOST_SAMPLES = 512
_MOST_ELEMENTS = 64
_SECONDS = 5.0


def _numbered(chosen: Any) -> list[int] | None:
    """What a sampler has chosen, if these are numbers: a sampler over an array yields numpy's."""
    if not isinstance(chosen, list | tuple):
        return None
    try:
        return [operator.index(i) for i in chosen]
    except TypeError:  # keys of another kind
        return None


@dataclass(frozen=True, slots=True)
class Maker:
    """The dataset and collate function of a loader."""

    dataset: Any
    collate: Any
    workers: int = 0

    @classmethod
    def of(cls, iterator: Any) -> Maker:
        workers = getattr(iterator, "_num_workers", 0)
        return cls(dataset_of(iterator), collate_of(iterator), workers)

    def in_dataset(self, bad: Sequence[int], pieces: Cut, chosen: Any) -> tuple[int, ...] | None:
        """The dataset indices of these samples: those chosen for their positions, if torch collated the batch.

        A collate function of the program may sort or drop samples. Then the chosen elements are fetched again and
        compared with the rows of the batch. None if a sample does not match exactly one element. Elements that are
        different each time, as with random noise, are put together again, to see where each of them goes.
        """
        chosen = _numbered(chosen)
        if not bad or chosen is None:
            return None
        if isinstance(pieces, Collated) or self._keeps_order(pieces.size, chosen):
            return tuple(chosen[i] for i in bad)
        if len(chosen) > _MOST_SAMPLES or not hasattr(self.dataset, "__getitem__"):
            return None
        state, began = RandomState.now(), monotonic()
        try:
            found = self._fetched_again(bad, pieces, list(dict.fromkeys(chosen)))
            if found is not None or monotonic() - began > _SECONDS / 2:
                return found
            return self._in_its_place(bad, pieces, chosen) or self._put_together_again(bad, pieces, list(chosen))
        except Exception:  # Fetching again is not part of the program, so its errors must not reach the program.
            return None
        finally:
            state.restore()

    def collated(self, batch: Any, chosen: Any) -> Collated | None:
        """The batch as the elements that were chosen for it, if they are fetched again and make the same batch."""
        numbers = _numbered(chosen) or []
        if not 1 < len(numbers) <= _MOST_SAMPLES or self.collate is None or not hasattr(self.dataset, "__getitem__"):
            return None
        state, end = RandomState.now(), monotonic() + _SECONDS
        try:
            elements = list(itertools.takewhile(lambda _: monotonic() < end, (self.dataset[i] for i in numbers)))
            pieces = Collated(batch, elements, self.collate)
            return pieces if len(elements) == len(numbers) and pieces.is_same else None
        except Exception:  # Fetching again is not part of the program, so its errors must not reach the program.
            return None
        finally:
            state.restore()

    def fetched(self, chosen: Any) -> Any:
        """A batch of these elements, as the dataset and the collate function make it now."""
        return self.collate([self.dataset[i] for i in _numbered(chosen) or ()])

    def _keeps_order(self, size: int, chosen: list[int]) -> bool:
        """Whether torch has put the batch together, so that its rows are the chosen elements."""
        return len(chosen) == size and (self.collate is default_collate or self.collate is default_convert)

    def located(self, batch: Batch, chosen: Any) -> Batch:
        """The batch with the dataset indices of its bad samples, where no sample has to be fetched for that."""
        bad = batch.bad_samples or ()
        if bad and isinstance(self.dataset, IterableDataset):
            return self._in_stream(batch, chosen)
        chosen = _numbered(chosen)
        if not bad or chosen is None or not self._keeps_order(batch.size or 0, chosen):
            return batch
        return self.with_elements(replace(batch, dataset_indices=tuple(chosen[i] for i in bad)))

    def _in_stream(self, batch: Batch, chosen: Any) -> Batch:
        """The bad samples as elements of a stream, which each worker reads by itself."""
        if batch.index is None or not isinstance(chosen, list | tuple) or len(chosen) < (batch.size or 0):
            return batch
        number, worker = divmod(batch.index, self.workers) if self.workers else (batch.index, 0)
        part = f"worker {worker}" if self.workers else ""
        first = number * len(chosen)
        return replace(
            batch,
            elements=tuple(Element(type(self.dataset).__name__, first + i, part) for i in batch.bad_samples or ()),
        )

    def with_elements(self, batch: Batch, chosen: Any = None) -> Batch:
        """The batch with the places of its bad samples in the datasets behind that of the loader."""
        if isinstance(self.dataset, IterableDataset) and batch.bad_samples:
            return self._in_stream(batch, chosen)
        found = [underlying(self.dataset, i) for i in (batch.dataset_indices or ())[:_MOST_ELEMENTS]]
        elements = tuple(e for e in found if e is not None)
        return replace(batch, elements=elements) if len(elements) == len(found) else batch

    def _fetched_again(self, bad: Sequence[int], pieces: Cut, chosen: list[int]) -> tuple[int, ...] | None:
        end = monotonic() + _SECONDS
        rows = {i: _rows(pieces, i) for i in bad}
        fitting: dict[int, list[int]] = {i: [] for i in bad}
        alike: dict[int, list[int]] = {i: [] for i in bad}
        each = pieces.size // len(chosen) if pieces.size % len(chosen) == 0 else 1
        for index in chosen:
            if monotonic() > end:
                return None
            element = self.dataset[index]
            parts, alone = list(_telling(element)), self._alone(element, each)
            for i in bad:
                if parts and all(any(_begins(row, part) for row in rows[i]) for part in parts):
                    fitting[i].append(index)
                if any(all(any(_begins(row, part) for row in rows[i]) for part in one) for one in alone):
                    alike[i].append(index)
        for found in (fitting, alike):
            if all(len(f) == 1 for f in found.values()):
                return tuple(f[0] for f in found.values())
        return None

    def _in_its_place(self, bad: Sequence[int], pieces: Cut, chosen: list[int]) -> tuple[int, ...] | None:
        """The elements at these positions, if another one in the place of each changes its row and no other."""
        whole, healthy = self.collated(pieces.batch, chosen), set(range(pieces.size)).difference(bad)
        if whole is None or whole.size != pieces.size or not healthy or len(bad) > _MOST_ELEMENTS:
            return None
        for at in bad:
            again = Cut(whole.replaced({at: min(healthy)}), pieces.size)
            pairs = zip(pieces.members(), again.members(), strict=True)
            if _changed((a, b) for (_, a), (_, b) in pairs) != {at}:
                return None
        return tuple(chosen[at] for at in bad)

    def _put_together_again(self, bad: Sequence[int], pieces: Cut, chosen: list[int]) -> tuple[int, ...] | None:
        """The elements that come to these positions when the batch is made again.

        That counts if the function keeps the order, or if whole numbers that no other sample has are there again."""
        if self.collate is None or len(chosen) != pieces.size or len(set(chosen)) != len(chosen):
            return None
        elements = [self.dataset[i] for i in chosen]
        again = Cut(self.collate(elements), pieces.size, numbered=pieces.numbered)
        both = list(zip(tensors_in(pieces.batch), tensors_in(again.batch), strict=True))
        if not all(a.shape == b.shape and a.dtype is b.dtype for (_, a), (_, b) in both):
            return None
        order = range(pieces.size)
        at = _positions(elements, again)
        turned = Cut(self.collate(elements[::-1]), pieces.size, numbered=pieces.numbered)
        if at == list(order) and _positions(elements[::-1], turned) == at:
            return tuple(chosen[i] for i in bad)
        whole = [_whole_numbers(made) for made in (pieces, again)]
        marked = all(whole[0][i] and whole[0].count(whole[0][i]) == 1 and whole[0][i] == whole[1][i] for i in bad)
        return tuple(chosen[at.index(i)] for i in bad) if marked and sorted(at) == list(order) else None

    def _alone(self, element: Any, each: int) -> list[list[Tensor]]:
        """What the program computes for this element when it puts a batch together, if each one becomes so many rows,
        as the two texts of a preference pair do: those of a batch of this element only."""
        try:
            members = [m for _, m in Cut(self.collate([element]), each).members() if each > 1 or m.is_floating_point()]
        except Exception:  # a collate function that needs more than one element
            return []
        return [[member[i] for member in members] for i in range(each)] if members else []


def _changed(pairs: Iterator[tuple[Tensor, Tensor]]) -> set[int]:
    """The rows in which tensors differ; those of other shapes are left out: they are padded to another length."""
    same = [(a, b) for a, b in pairs if a.shape == b.shape]
    return {i for a, b in same for i in range(len(a)) if not _are_equal(a[i], b[i])}


def _rows(pieces: Cut, sample: int) -> list[Tensor]:
    """Everything that a batch holds of a sample."""
    members = [member[sample] for _, member in pieces.members()]
    return [*members, *_listed(pieces.batch, sample, pieces), *pieces.joined(sample)]


def _whole_numbers(pieces: Cut) -> list[list[Any]]:
    """The whole numbers of each sample."""
    rows = [_rows(pieces, i) for i in range(pieces.size)]
    return [[t.tolist() for t in row if not t.is_floating_point()] for row in rows]


def _positions(elements: list[Any], pieces: Cut) -> list[int]:
    """Where each element is in a batch; -1 if it is in none or several places."""
    rows, found = [_rows(pieces, i) for i in range(pieces.size)], []
    for element in elements:
        places = [{i for i, row in enumerate(rows) if any(_begins(r, p) for r in row)} for p in _telling(element)]
        kept = [place for place in places if place]  # the function may leave a part of the element out
        at = set.intersection(*kept) if kept else set()
        found.append(at.pop() if len(at) == 1 else -1)
    return found


def _listed(value: Any, sample: int, pieces: Cut) -> Iterator[Tensor]:
    """The elements of a sample in those lists of the batch that have one element per sample."""
    if isinstance(value, list | tuple):
        if len(value) == pieces.size:
            yield from _telling(value[sample])
        for part in value:
            yield from _listed(part, sample, pieces)
    elif isinstance(value, dict):
        yield from _listed(list(value.values()), sample, pieces)


def _telling(element: Any) -> Iterator[Tensor]:
    """The numbers of an element that must appear in its row: all except single integers, which many elements share."""
    if isinstance(element, float) or (isinstance(element, list) and len(element) > 1 and all(map(_is_number, element))):
        yield torch.tensor(element, dtype=torch.float64)
    elif isinstance(element, list | tuple):
        for part in element:
            yield from _telling(part)
    elif isinstance(element, dict):
        yield from _telling(list(element.values()))
    elif type(element).__module__ == "numpy" and hasattr(element, "shape"):
        yield from _telling(torch.as_tensor(element))
    else:
        yield from (t for _, t in tensors_in(element) if t.numel() > 1 or (t.numel() and t.is_floating_point()))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _begins(row: Tensor, part: Tensor) -> bool:
    """Whether both are equal up to the shorter length: samples are padded or truncated to a common length."""
    if row.dim() != part.dim():
        return False
    both = tuple(slice(min(sizes)) for sizes in zip(row.shape, part.shape, strict=True))
    beginning, part = row.detach()[both].to(torch.float64), part.detach()[both]
    if row.is_floating_point():
        part = part.to(row)  # it may be rounded
    return bool(torch.isclose(beginning, part.to(beginning), rtol=0.0, atol=0.0, equal_nan=True).all())
