"""Batches as a loader hands them out: copies, versions, sizes, and the state they were handed out in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.tensors.finite import tensors_in
from firstnan.tensors.names import Slot
from firstnan.tensors.randomness import RandomState


@dataclass(slots=True, eq=False)
class Handout:
    """One batch as it was handed to the program."""

    batch: Any
    index: int
    updates: int
    """How many optimizer steps were done by then."""
    random: RandomState
    buffers: list[tuple[Slot, Tensor, Tensor]]
    versions: list[int]
    """Of the batch's tensors, where the very tensors are kept that the program has."""
    indices: Any = None
    pristine: Any = None
    """A copy that no loop has seen, made before the first replay."""


class NamelessSource:
    """Stands for what hands out batches where that cannot be referred to weakly, or is a function."""


def put_back(buffers: list[tuple[Slot, Tensor, Tensor]]) -> None:
    """Brings copies of buffers back to where they were taken."""
    with torch.no_grad():
        for slot, old, value in buffers:
            slot.put(old, value)


def versions(batch: Any) -> list[int]:
    """How often each tensor of a batch was written."""
    if type(batch) is tuple or type(batch) is list:  # of tensors alone, the usual case, is four times as quick
        found = []
        for t in batch:
            if type(t) is not Tensor:
                break
            found.append(0 if t.is_inference() else t._version)
        else:
            return found
    return [_version(t) for _, t in tensors_in(batch)]


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def was_written(handout: Handout) -> bool:
    return bool(handout.versions) and versions(handout.batch) != handout.versions


def copied(batch: Any) -> Any:
    """The batch with every tensor cloned, containers kept."""
    if isinstance(batch, torch.nn.Parameter):  # no data: its gradient is wanted where it is
        return batch
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) in (list, tuple):
        return type(batch)(copied(b) for b in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(b) for b in batch))
    if isinstance(batch, dict):
        try:
            clone: Callable[..., Any] = type(batch)
            return clone({k: copied(v) for k, v in batch.items()})
        except TypeError:
            return batch
    return batch


def batch_size(batch: Any) -> int | None:
    """The common first dimension of the tensors in a batch."""
    sizes = [t.shape[0] for _, t in tensors_in(batch) if t.dim()]
    return max(set(sizes), key=sizes.count) if sizes else None


def samples_in(batch: Any, indices: Any) -> int | None:
    """How many samples a batch has: as many as the sampler chose, unless each of its rows is one all the same."""
    if not isinstance(indices, list | tuple) or not indices or None in indices:  # None is all that a stream tells
        return batch_size(batch)
    if isinstance(batch, list | tuple) and len(batch) == len(indices):
        return len(indices)  # never put together
    rows = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}
    return rows.pop() if len(rows) == 1 and rows_are_samples(min(rows), len(indices)) else len(indices)


def rows_are_samples(rows: int, chosen: int) -> bool:
    """Whether the rows of a batch may be its samples: several views of each that was chosen, or some were left out.

    Otherwise they are the nodes of graphs, the tokens of texts, as many as each sample happens to have.
    """
    return rows % chosen == 0 or rows < chosen
