"""Loaders that choose and collate samples themselves, and use torch's only to fetch whole batches: fastai's."""

from __future__ import annotations

from typing import Any


def dataset_of(iterator: Any) -> Any:
    """The dataset that the batches of a loader's iterator come from; None if there is none."""
    dataset = getattr(iterator, "_dataset", None)
    inside = _inside(dataset)
    return dataset if inside is None else inside.dataset


def collate_of(iterator: Any) -> Any:
    """The function that puts samples together to a batch; None if there is none."""
    inside = _inside(getattr(iterator, "_dataset", None))
    return getattr(iterator, "_collate_fn", None) if inside is None else inside.create_batch


def samples_of(iterator: Any, number: int, otherwise: Any) -> Any:
    """The indices of the samples of a pass' batch with this number, where such a loader has chosen them.

    It may leave some out afterwards, and fill up with others, so that the indices have to be compared with the batch.
    """
    inside = _inside(getattr(iterator, "_dataset", None))
    chosen = getattr(inside, "_DataLoader__idxs", None)
    if not isinstance(chosen, list) or not isinstance(inside.bs, int):
        return otherwise
    return chosen[number * inside.bs : (number + 1) * inside.bs] or otherwise


def _inside(dataset: Any) -> Any:
    """fastai's loader, which gives torch's a stream of batches that has the loader as `d`."""
    return dataset.d if type(dataset).__module__ == "fastai.data.load" else None
