"""The dataset indices of the samples of a batch, if they can be determined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, default_convert

from firstnan.engine.samples.cut import Cut
from firstnan.tensors.finite import tensors_in
from firstnan.tensors.randomness import RandomState

_MOST_SAMPLES = 512
_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Maker:
    """The dataset and collate function of a loader."""

    dataset: Any
    collate: Any

    @classmethod
    def of(cls, iterator: Any) -> Maker:
        return cls(getattr(iterator, "_dataset", None), getattr(iterator, "_collate_fn", None))

    def in_dataset(self, bad: Sequence[int], pieces: Cut, chosen: Any) -> tuple[int, ...] | None:
        """The dataset indices of these samples: those chosen for their positions, if torch collated the batch.

        A collate function of the program may sort or drop samples. Then the chosen elements are fetched again and
        compared with the rows of the batch. None if a sample does not match exactly one element.
        """
        if not bad or not isinstance(chosen, list | tuple) or not all(isinstance(i, int) for i in chosen):
            return None
        if len(chosen) == pieces.size and (self.collate is default_collate or self.collate is default_convert):
            return tuple(chosen[i] for i in bad)
        if len(chosen) > _MOST_SAMPLES or not hasattr(self.dataset, "__getitem__"):
            return None
        state = RandomState.now()
        try:
            return self._fetched_again(bad, pieces, list(dict.fromkeys(chosen)))
        except Exception:  # Fetching again is not part of the program, so its errors must not reach the program.
            return None
        finally:
            state.restore()

    def _fetched_again(self, bad: Sequence[int], pieces: Cut, chosen: list[int]) -> tuple[int, ...] | None:
        end = monotonic() + _SECONDS
        rows = {i: [*(member[i] for _, member in pieces.members()), *_listed(pieces.batch, i, pieces)] for i in bad}
        fitting: dict[int, list[int]] = {i: [] for i in bad}
        for index in chosen:
            if monotonic() > end:
                return None
            parts = list(_telling(self.dataset[index]))
            for i in bad:
                if parts and all(any(_begins(row, part) for row in rows[i]) for part in parts):
                    fitting[i].append(index)
        return tuple(f[0] for f in fitting.values()) if all(len(f) == 1 for f in fitting.values()) else None


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
