"""Batches as a loader hands them out: copies, tensor versions, sizes, and the state at that moment."""

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
    """One batch as it was handed to the program, with the state needed to repeat it."""

    batch: Any
    index: int
    updates: int
    """The number of optimizer steps made before it was handed out."""
    random: RandomState
    buffers: list[tuple[Slot, Tensor, Tensor]]
    versions: list[int]
    """Versions of the batch's tensors; empty if a copy is kept instead of the program's own tensors."""
    indices: Any = None
    pristine: Any = None
    """A copy that no loop body has touched, made before the first replay."""


class NamelessSource:
    """A stand-in for a source of batches that is a function or does not support weak references."""


def restore_buffers(buffers: list[tuple[Slot, Tensor, Tensor]]) -> None:
    """Restores buffers from copies, in the modules they were copied from."""
    with torch.no_grad():
        for slot, old, value in buffers:
            slot.restore(old, value)


def tensor_versions(batch: Any) -> list[int]:
    """The version of each tensor in a batch: how often it was written in place."""
    if type(batch) is tuple or type(batch) is list:  # only tensors: the usual case, and four times as fast
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
    return bool(handout.versions) and tensor_versions(handout.batch) != handout.versions


def copy_batch(batch: Any) -> Any:
    """The batch in containers of the same types, with every tensor cloned."""
    if isinstance(batch, torch.nn.Parameter):  # not data: its gradient must arrive at the original
        return batch
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) in (list, tuple):
        return type(batch)(copy_batch(b) for b in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copy_batch(b) for b in batch))
    if isinstance(batch, dict):
        try:
            clone: Callable[..., Any] = type(batch)
            return clone({k: copy_batch(v) for k, v in batch.items()})
        except TypeError:
            return batch
    return batch


def batch_size(batch: Any) -> int | None:
    """The most frequent first dimension of the tensors in a batch."""
    sizes = [t.shape[0] for _, t in tensors_in(batch) if t.dim()]
    return max(set(sizes), key=sizes.count) if sizes else None


def sample_count(batch: Any, indices: Any) -> int | None:
    """The number of samples in a batch: as many as the sampler chose, unless each row is a sample of its own."""
    if not isinstance(indices, list | tuple) or not indices or None in indices:  # an iterable dataset gives None
        return batch_size(batch)
    if isinstance(batch, list | tuple) and len(batch) == len(indices):
        return len(indices)  # not collated
    rows = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}
    return rows.pop() if len(rows) == 1 and rows_are_samples(min(rows), len(indices)) else len(indices)


def rows_are_samples(rows: int, chosen: int) -> bool:
    """Whether the rows of a batch can be its samples: several views of each chosen one, or fewer rows than chosen.

    Otherwise rows are something else, such as graph nodes or tokens, and their number varies from sample to sample.
    """
    return rows % chosen == 0 or rows < chosen
