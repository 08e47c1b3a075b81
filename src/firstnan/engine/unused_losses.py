"""Finds a bad loss that a loop has left without calling backward on it: it skips bad batches itself."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from torch import Tensor

from firstnan.tensors.finite import has_nan_or_positive_inf, is_finite
from firstnan.tensors.state import local_variables

_MOST_READ = 1 << 20
"""Elements up to which another tensor than a loss is read."""
_MOST_FRAMES = 4


class UnusedLosses:
    """Looks at the variables of the functions that have called the model, each tensor once."""

    def __init__(self, owns: Callable[[CodeType], bool]) -> None:
        self._owns = owns
        self._seen: deque[weakref.ref[Tensor]] = deque(maxlen=64)

    def find(self, *places: FrameType | None, only_losses: bool = False) -> tuple[str, Tensor] | None:
        """The name and the value of a bad loss in these functions and their callers, or of what one is made of."""
        found = {id(value): (name, value) for frame in self._functions(places) for name, value in _computed(frame)}
        losses = [(name, value) for name, value in found.values() if value.numel() == 1]
        others = [(name, value) for name, value in found.values() if 1 < value.numel() <= _MOST_READ]
        for name, value in losses if only_losses else (*losses, *others):
            if any(ref() is value for ref in self._seen) or (only_losses and not value.is_cpu):
                continue
            self._seen.append(weakref.ref(value))
            # Before a softmax, -inf is a mask.
            if not is_finite(value) if value.numel() == 1 else has_nan_or_positive_inf(value):
                self._seen.extend(weakref.ref(value) for _, value in losses)  # told once
                return name, value
        return None

    def _functions(self, places: tuple[FrameType | None, ...]) -> list[FrameType]:
        found: dict[int, FrameType] = {}
        for place in places:
            frame, left = place, _MOST_FRAMES
            while frame is not None and left:
                if self._owns(frame.f_code):
                    found[id(frame)], left = frame, left - 1
                frame = frame.f_back
        return list(found.values())


def _computed(frame: FrameType) -> Iterator[tuple[str, Tensor]]:
    for name, value in local_variables(frame).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            yield name, value
