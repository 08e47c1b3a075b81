"""Watches the gradient norm and the loss, and warns when they leave their usual range, often before the first NaN.

Not disturbing healthy training matters more than warning early. Heavy tails, warm-up, starts at zero and new data are
normal in some runs, so every threshold is a factor that they do not reach, plus the spread of this run.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

_WINDOW = 64
_BLOCK = 16
"""The usual values are recomputed every 16 steps; growth is measured against the first 16."""
_EARLY = 32
"""With fewer norms than this their spread is unknown."""

_SPIKE = 100.0
"""A spike is this many times the recent norms and the first ones: new data can take a model back to its start."""
_SPREADS = 18
"""Times the distance (in logs) from the median to the upper quartile: 12 standard deviations of a log-normal."""
_OUTLIER = 10.0
"""A spike is also this many times the second largest norm of the window, since occasional large batches are normal,
and this many times the norm two steps before: a slower rise is growth, or leaves a saddle point."""
_AGAIN = 10.0

_GROWTH, _LOSS_GROWTH = 100.0, 2.0
"""Both norm and loss must grow: the norm alone rises harmlessly when a head that starts at zero begins to learn."""
_TOGETHER_EARLY, _TOGETHER = 3e3, 1e6
"""The least product of both factors; lower early on, since a run that diverges from the start fails in a few steps."""
_GROWTH_ALONE = 1e6
_HUGE = 1e15
"""No training recovers from a norm or loss above this, whatever its usual value."""
_OVERFLOW = 1e19
"""Above this a float32 norm is infinite, although every gradient may be finite."""

_EXPLOSION, _RECOVERED = 1e4, 100.0
_STEPS_UP = 3

_SMALL_NORM, _SMALL_LOSS = 1.0, 0.1
"""Smaller values count as this much: values near zero change by large factors all the time."""

Kind = Literal["limit", "spike", "growth", "explosion"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One warning, with the numbers behind it."""

    kind: Kind
    step: int
    norm: float | None
    usual: float | None
    """The recent median of the norm; for growth, that of the first steps; for an explosion, that of the loss."""
    factor: float | None
    """The norm (for an explosion, the loss) divided by its usual value."""
    loss: float | None
    text: str


class Guard:
    """Judges the gradient norm and loss of each step. Every optimizer has its own guard, since norms differ."""

    def __init__(self, limit: float | None = None) -> None:
        self._limit = math.inf if limit is None else limit
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._until_look = 1
        self._usual = self._first = 0.0
        self._usual_loss = self._first_loss = 0.0
        self._spike = math.inf
        self._bar = min(self._limit, _HUGE)
        self._loss_bar = math.inf
        """A norm or loss up to these needs no closer test."""
        self._warned = 0.0
        """The norm of the last warning; 0 once it has come down."""
        self._steps_up = 0
        self._explosion: Alarm | None = None

    @property
    def unrecovered(self) -> Alarm | None:
        """The explosion that the loss has not recovered from."""
        return self._explosion

    def observe(self, step: int, norm: float | None, loss: float | None) -> Alarm | None:
        """Judges one step and returns an alarm if there is something new to warn about.

        Zeros and non-finite numbers do not count towards the usual values. An infinite norm together with a finite,
        grown loss means that the norm overflowed.
        """
        alarm = None
        if norm is not None:
            if norm > self._bar:
                alarm = self._judge(step, norm, loss)
            elif norm < self._bar / _AGAIN:
                self._warned = 0.0
            if 0.0 < norm < math.inf:
                self._norms.append(norm)
        if loss is not None:
            size = abs(loss)
            if size > self._loss_bar or self._explosion is not None:
                alarm = self._judge_loss(step, norm, loss) or alarm
            elif 0.0 < size < math.inf:
                self._steps_up = 0
                self._losses.append(size)
        self._until_look -= 1
        if not self._until_look:
            self._update_usual()
        return alarm

    def _update_usual(self) -> None:
        """Recomputes the usual values: after each of the first steps, then after each block."""
        count = len(self._norms)
        self._until_look = 1 if max(count, len(self._losses)) < _BLOCK else _BLOCK
        if count:
            ordered = sorted(self._norms)
            self._usual = ordered[count // 2]
            if count <= _BLOCK or not self._first:
                self._first = self._usual
            if count >= _EARLY:
                spread = min(ordered[count * 3 // 4] / self._usual, 1e16) ** _SPREADS
                usual = max(self._usual * max(_SPIKE, spread), ordered[-2] * _OUTLIER)
                self._spike = max(usual, self._first * _SPIKE, _SMALL_NORM)
            self._bar = min(self._limit, self._spike, max(self._first, _SMALL_NORM) * _GROWTH, _HUGE)
        if self._losses:
            self._usual_loss = sorted(self._losses)[len(self._losses) // 2]
            if len(self._losses) <= _BLOCK or not self._first_loss:
                self._first_loss = self._usual_loss
            self._loss_bar = max(self._usual_loss, self._first_loss, _SMALL_LOSS) * _EXPLOSION

    def _judge(self, step: int, norm: float, loss: float | None) -> Alarm | None:
        """The alarm for a high norm, if there is reason for one and it has not been raised yet."""
        if norm <= self._warned * _AGAIN:
            return None
        kind: Kind
        usual = self._usual
        if self._limit < norm < math.inf:
            kind, text = "limit", f"the gradient norm is {norm:.3g}, above the limit of {self._limit:.3g}"
        elif self._is_spike(norm):
            kind, text = "spike", f"the gradient norm jumped to {norm:.3g}"
        elif self._is_growth(norm, loss):
            kind, usual = "growth", self._first
            text = f"the gradient norm has grown to {norm:.3g}"
            text += "" if loss is None else f" with a loss of {loss:.3g}"
        else:
            return None
        self._warned = norm
        if not usual:
            return Alarm(kind, step, norm, None, None, loss, f"Step {step}: {text}.")
        text += f"; it was {usual:.3g} in the first steps" if kind == "growth" else f"; it is usually {usual:.3g}"
        return Alarm(kind, step, norm, usual, norm / usual, loss, f"Step {step}: {text}.")

    def _is_spike(self, norm: float) -> bool:
        return self._spike < norm < math.inf and norm > self._norms[-2] * _OUTLIER

    def _is_growth(self, norm: float, loss: float | None) -> bool:
        """Whether norm and loss have grown together since the first steps, or one of them enormously."""
        size = abs(loss) if loss is not None and math.isfinite(loss) else 0.0
        if size > _HUGE or _HUGE < norm < math.inf:
            return True
        times = min(norm, _OVERFLOW) / max(self._first, _SMALL_NORM)
        loss_times = size / max(self._first_loss, _SMALL_LOSS) if self._first_loss else 0.0
        enough = _TOGETHER_EARLY if len(self._norms) < _EARLY else _TOGETHER
        together = times > _GROWTH and loss_times > _LOSS_GROWTH and times * loss_times > enough
        return together or (self._first > 0.0 and times > _GROWTH_ALONE and norm < math.inf)

    def _judge_loss(self, step: int, norm: float | None, loss: float) -> Alarm | None:
        """The alarm for a loss that stays too high; also notes when it recovers."""
        size = abs(loss)
        if self._explosion is not None:
            if 0.0 < size < self._loss_bar * _RECOVERED / _EXPLOSION:
                self._explosion, self._steps_up = None, 0
            return None
        self._steps_up += size < math.inf
        if self._steps_up < _STEPS_UP:
            return None
        usual = self._usual_loss
        text = f"Step {step}: the loss has exploded to {loss:.3g} and stayed there for {_STEPS_UP} steps; "
        text += f"it is usually {usual:.3g}."
        self._explosion = Alarm("explosion", step, norm, usual, size / usual, loss, text)
        return self._explosion
