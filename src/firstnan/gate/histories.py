"""The last steps of each optimizer, kept apart: their losses, norms and learning rates have nothing in common."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from firstnan.records import StepRecord
from firstnan.tensors.models import parameters_of

_LENGTH = 64

Numbers = tuple[Any, ...]
"""The fields of a StepRecord."""


class Histories:
    """The numbers of the last steps, by optimizer; None stands for the updates that a program writes by hand."""

    def __init__(self) -> None:
        self._tracks: dict[int, deque[Numbers]] = {}
        """By the id of the optimizer."""
        self._by_parameter: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By the first parameter: an optimizer that trains what another one did before goes on with its history."""

    def made(self, optimizer: Any) -> None:
        """A new optimizer; one that is gone may have had its id."""
        self._tracks.pop(id(optimizer), None)

    def add(self, optimizer: Any, numbers: Numbers) -> None:
        track = self._tracks.get(id(optimizer))
        (track if track is not None else self._track(optimizer)).append(numbers)

    def take_back(self, optimizer: Any) -> None:
        """Drops the last step of this optimizer."""
        track = self._track(optimizer)
        if track:
            track.pop()

    def amend(self, optimizer: Any, **numbers: float | None) -> None:
        """Adds what has become known of the last step."""
        track = self._track(optimizer)
        if track:
            last = StepRecord(*track[-1])
            fields = {name: getattr(last, name) for name in last.__slots__} | numbers
            track[-1] = tuple(fields[name] for name in last.__slots__)

    def of(self, optimizer: Any) -> list[StepRecord]:
        return [StepRecord(*numbers) for numbers in self._track(optimizer)]

    def by_id(self, key: int) -> list[StepRecord]:
        """The steps of the optimizer with this id, which may be gone."""
        return [StepRecord(*numbers) for numbers in self._tracks.get(key, ())]

    def begin_with(self, optimizer: Any, steps: Iterable[StepRecord]) -> None:
        """Continues from the steps of another run."""
        track = self._track(optimizer)
        track.clear()
        track.extend((s.step, s.loss, s.grad_norm, s.lr, s.param_norm) for s in steps)

    def _track(self, optimizer: Any) -> deque[Numbers]:
        track = self._tracks.get(id(optimizer))
        if track is None:
            first: Tensor | None = next(iter(parameters_of(optimizer)), None) if optimizer is not None else None
            track = self._by_parameter.get(first) if first is not None else None
            if track is None:
                track = deque(maxlen=_LENGTH)
            self._tracks[id(optimizer)] = track
            if first is not None:
                self._by_parameter[first] = track
        return track
