"""The steps of each optimizer, kept apart: their losses, norms and learning rates have nothing in common."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from firstnan.records import StepRecord, StepSpan
from firstnan.tensors.models import parameters_of

_LENGTH = 64
_TOGETHER = 8
"""Entries that become one when they are old: a span of 8 steps, of 64, of 512..."""

Numbers = tuple[Any, ...]
"""The fields of a StepRecord."""


class Track:
    """All steps of one optimizer within bounds: the last ones each, those before in spans, the older the longer.

    Each level keeps between 64 and 127 entries, so a run of n steps takes at most 128 (log8(n) - 1) of them.
    """

    __slots__ = ("_levels", "recent", "sample_at", "weights")

    def __init__(self) -> None:
        self.recent: list[Numbers] = []
        self._levels: list[list[Numbers]] = []
        """The fields of StepSpans; the records themselves would cost a small model more than all else here."""
        self.sample_at = 1
        """The step in which what is expensive is measured next."""
        self.weights: float | None = None
        """The norm of all parameters, when it was last known."""

    def add(self, numbers: Numbers) -> None:
        recent = self.recent
        recent.append(numbers)
        if len(recent) == 2 * _LENGTH:
            self._shorten()

    def _shorten(self) -> None:
        old, self.recent = self.recent[:_LENGTH], self.recent[_LENGTH:]
        new = [_span_of_steps(old[i : i + _TOGETHER]) for i in range(0, _LENGTH, _TOGETHER)]
        for level in self._levels:
            level += new
            if len(level) < 2 * _LENGTH:
                return
            spans, level[:] = level[:_LENGTH], level[_LENGTH:]
            new = [_joined(spans[i : i + _TOGETHER]) for i in range(0, _LENGTH, _TOGETHER)]
        self._levels.append(new)

    def last(self) -> list[StepRecord]:
        return [StepRecord(*numbers) for numbers in self.recent[-_LENGTH:]]

    def earlier(self) -> tuple[StepSpan, ...]:
        """What is before the last steps, oldest first."""
        old = self.recent[: max(len(self.recent) - _LENGTH, 0)]
        newest = [_span_of_steps(old[i : i + _TOGETHER]) for i in range(0, len(old), _TOGETHER)]
        kept = [span for level in reversed(self._levels) for span in level]
        return tuple(StepSpan(*span) for span in (*kept, *newest))

    def measured(self, step: int) -> None:
        """What is expensive was measured in this step: at first after twice as many steps, then after 64 more."""
        self.sample_at = step + max(1, min(step, _LENGTH))


def _span_of_steps(steps: list[Numbers]) -> Numbers:
    """The fields of a StepSpan."""
    columns = list(zip_longest(*zip_longest(*steps)))  # those that were not measured are left out at the end
    numbers = [[row[i] for row in columns if row[i] is not None] for i in range(1, len(columns[0]))]
    numbers += [[]] * (6 - len(numbers))
    loss, norm = numbers[:2]
    return (
        steps[0][0],
        len(steps),
        sum(loss) / len(loss) if loss else None,
        max(loss, default=None),
        sum(norm) / len(norm) if norm else None,
        max(norm, default=None),
        *(column[-1] if column else None for column in numbers[2:]),
    )


def _joined(spans: list[Numbers]) -> Numbers:
    def mean(i: int) -> float | None:
        known = [(s[i], s[1]) for s in spans if s[i] is not None]
        return sum(v * n for v, n in known) / sum(n for _, n in known) if known else None

    def largest(i: int) -> float | None:
        return max((s[i] for s in spans if s[i] is not None), default=None)

    def last(i: int) -> float | None:
        return next((s[i] for s in reversed(spans) if s[i] is not None), None)

    count = sum(s[1] for s in spans)
    return (spans[0][0], count, mean(2), largest(3), mean(4), largest(5), *map(last, (6, 7, 8, 9)))


class Histories:
    """The numbers of the steps, by optimizer; None stands for the updates that a program writes by hand."""

    def __init__(self) -> None:
        self._tracks: dict[int, Track] = {}
        """By the id of the optimizer."""
        self._by_parameter: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """By the first parameter: an optimizer that trains what another one did before goes on with its history."""

    def made(self, optimizer: Any) -> None:
        """A new optimizer; one that is gone may have had its id."""
        self._tracks.pop(id(optimizer), None)

    def add(self, optimizer: Any, numbers: Numbers) -> None:
        (self._tracks.get(id(optimizer)) or self.track(optimizer)).add(numbers)

    def take_back(self, optimizer: Any) -> None:
        """Drops the last step of this optimizer."""
        track = self.track(optimizer)
        if track.recent:
            track.recent.pop()

    def amend(self, **numbers: float | None) -> None:
        """Adds what has become known of the last update by hand."""
        recent = self.track(None).recent
        if recent:
            last = StepRecord(*recent[-1])
            fields = {name: getattr(last, name) for name in last.__slots__} | numbers
            recent[-1] = tuple(fields[name] for name in last.__slots__)

    def of(self, optimizer: Any) -> list[StepRecord]:
        return self.track(optimizer).last()

    def before(self, optimizer: Any) -> tuple[StepSpan, ...]:
        """The steps before the last ones, oldest first."""
        return self.track(optimizer).earlier()

    def by_id(self, key: int) -> list[StepRecord]:
        """The steps of the optimizer with this id, which may be gone."""
        track = self._tracks.get(key)
        return track.last() if track is not None else []

    def begin_with(self, optimizer: Any, steps: Iterable[StepRecord]) -> None:
        """Continues from the steps of another run."""
        track = self.track(optimizer)
        track.recent[:] = [tuple(getattr(s, name) for name in StepRecord.__slots__) for s in steps][-_LENGTH:]

    def track(self, optimizer: Any) -> Track:
        track = self._tracks.get(id(optimizer))
        if track is None:
            first: Tensor | None = next(iter(parameters_of(optimizer)), None) if optimizer is not None else None
            track = self._by_parameter.get(first) if first is not None else None
            if track is None:
                track = Track()
            self._tracks[id(optimizer)] = track
            if first is not None:
                self._by_parameter[first] = track
        return track
