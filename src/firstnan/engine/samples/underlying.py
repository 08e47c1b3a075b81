"""Which element of which dataset a sample is, behind subsets, splits, concatenations and wrappers."""

from __future__ import annotations

import bisect
from types import FrameType
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset

from firstnan.observe.line_watch import calls_seen
from firstnan.records import Element
from firstnan.tensors.state import RandomState

_DEEPEST = 16


def underlying(dataset: Any, index: Any) -> Element | None:
    """The element that the loader's dataset takes at this index from another one; None if it holds it itself."""
    at, where, part = dataset, index, ""
    try:
        for _ in range(_DEEPEST):
            inner = _inside(at, where)
            if inner is None:
                break
            at, where, more = inner
            part += more
    except Exception:  # a dataset of the program's that does not like to be looked at
        return None
    if at is dataset and where == index:
        return None
    return Element(type(at).__name__, where, part) if isinstance(where, int) else None


def _inside(dataset: Any, index: Any) -> tuple[Any, Any, str] | None:
    """The dataset that this one takes the element from, the index there, and which of several datasets that is."""
    if isinstance(dataset, Subset):
        return dataset.dataset, _plain(dataset.indices[index]), ""
    if isinstance(dataset, ConcatDataset):
        index = index if index >= 0 else len(dataset) + index
        which = bisect.bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[which - 1] if which else 0
        return dataset.datasets[which], index - before, f".datasets[{which}]"
    chosen = getattr(dataset, "_indices", None)  # rows that `datasets` has selected or shuffled
    if chosen is not None and hasattr(chosen, "column"):
        return type(type(dataset).__name__, (), {})(), _plain(chosen.column(0)[index].as_py()), ""
    members = list(vars(dataset).values()) if hasattr(dataset, "__dict__") else []
    if isinstance(dataset, Dataset) and any(isinstance(m, Dataset) for m in members):
        return _asked_for(dataset, index)
    return None


def _plain(index: Any) -> Any:
    return index.item() if hasattr(index, "item") else index


def _asked_for(dataset: Any, index: Any) -> tuple[Any, Any, str] | None:
    """What a dataset of the program's asks another one for; None unless that is exactly one element."""
    asked: list[tuple[Any, Any]] = []

    def called(frame: FrameType) -> None:
        code = frame.f_code
        if code.co_name == "__getitem__" and code.co_argcount == 2:
            one, at = (frame.f_locals.get(name) for name in code.co_varnames[:2])
            above = frame.f_back
            while above is not None and above.f_code.co_name != "__getitem__":
                above = above.f_back
            if isinstance(one, Dataset) and above is not None and above.f_locals.get(_first(above)) is dataset:
                asked.append((one, at))

    state = RandomState.now()
    try:
        with calls_seen(called):
            dataset[index]
    finally:
        state.restore()
    others = [(one, at) for one, at in asked if one is not dataset]
    return (*others[0], "") if len(others) == 1 else None


def _first(frame: FrameType) -> str:
    return frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
