"""Watches the gradient norm and the loss, and says when they leave what is usual for this run: before the NaN comes.

Silence in healthy training is worth more than an early word. Heavy tails, warm-up, zero starts and changed data are
usual somewhere, so each test asks for a factor that they do not reach, and for this run's own spread on top of it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

_WINDOW = 64
_BLOCK = 16
"""What is usual is worked out again after so many steps; the first so many are what growth is measured against."""
_EARLY = 32
"""So many norms are too few to know their spread."""

_SPIKE = 100.0
"""Above the recent steps and the first ones, as for the loss below: new data can take a model back to its start."""
_SPREADS = 18
"""Times the way (in logs) from the median to the upper quartile: 12 standard deviations of a log-normal."""
_OUTLIER = 10.0
"""A spike is so much above the second largest of the window too: where large batches come now and then they are usual;
and above the norm two steps before: what rises more slowly leaves a saddle, or is growth."""
_AGAIN = 10.0

_GROWTH, _LOSS_GROWTH = 100.0, 2.0
"""Norm and loss, both: the norm alone rises without harm when a head that was zero wakes up."""
_TOGETHER_EARLY, _TOGETHER = 3e3, 1e6
"""The product of both. A run that diverges from its first step leaves no time for more."""
_GROWTH_ALONE = 1e6
_HUGE = 1e15
"""Of norm or loss: no training goes on from here, whatever is usual."""
_OVERFLOW = 1e19
"""A float32 norm is infinite from here on, though every gradient may be finite."""

_EXPLOSION, _RECOVERED = 1e4, 100.0
_STEPS_UP = 3

_SMALL_NORM, _SMALL_LOSS = 1.0, 0.1
"""Less counts as this much: what is near zero leaves it by large factors all the time."""

Kind = Literal["limit", "spike", "growth", "explosion"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One warning, with the numbers that prove it."""

    kind: Kind
    step: int
    norm: float | None
    usual: float | None
    """The recent median of the norm; of growth that of the first steps; of an explosion that of the loss before it."""
    factor: float | None
    """How many times its usual value the norm is (of an explosion: the loss)."""
    loss: float | None
    text: str


class Guard:
    """Takes in each step's gradient norm and loss; one guard for each optimizer, since two have norms of their own."""

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
        """Up to these nothing more is asked of a norm, of a loss."""
        self._warned = 0.0
        """The norm last warned of, until it has come down."""
        self._steps_up = 0
        self._explosion: Alarm | None = None

    @property
    def unrecovered(self) -> Alarm | None:
        """The explosion that the loss has not come back from."""
        return self._explosion

    def observe(self, step: int, norm: float | None, loss: float | None) -> Alarm | None:
        """Takes in one step, and returns an alarm where there is something new to warn of.

        Zeros and non-finite numbers say nothing about what is usual. An infinite norm beside a finite loss that has
        grown is one that overflowed.
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
            self._look_back()
        return alarm

    def _look_back(self) -> None:
        """Works out what is usual: after each of the first steps, then after each block."""
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
        """The norm is high: the word on it, unless it has been said."""
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
        text += f"; {'in the first steps' if kind == 'growth' else 'usually'} the norm was {usual:.3g}"
        return Alarm(kind, step, norm, usual, norm / usual, loss, f"Step {step}: {text}.")

    def _is_spike(self, norm: float) -> bool:
        return self._spike < norm < math.inf and norm > self._norms[-2] * _OUTLIER

    def _is_growth(self, norm: float, loss: float | None) -> bool:
        """Norm and loss have grown together since the first steps, or one of them beyond all measure."""
        size = abs(loss) if loss is not None and math.isfinite(loss) else 0.0
        if size > _HUGE or _HUGE < norm < math.inf:
            return True
        times = min(norm, _OVERFLOW) / max(self._first, _SMALL_NORM)
        loss_times = size / max(self._first_loss, _SMALL_LOSS) if self._first_loss else 0.0
        enough = _TOGETHER_EARLY if len(self._norms) < _EARLY else _TOGETHER
        together = times > _GROWTH and loss_times > _LOSS_GROWTH and times * loss_times > enough
        return together or (self._first > 0.0 and times > _GROWTH_ALONE and norm < math.inf)

    def _judge_loss(self, step: int, norm: float | None, loss: float) -> Alarm | None:
        """The loss is high, or was: an alarm once it has stayed so."""
        size = abs(loss)
        if self._explosion is not None:
            if 0.0 < size < self._loss_bar * _RECOVERED / _EXPLOSION:
                self._explosion, self._steps_up = None, 0
            return None
        self._steps_up += size < math.inf
        if self._steps_up < _STEPS_UP:
            return None
        usual = self._usual_loss
        text = f"Step {step}: the loss has exploded: {loss:.3g}, for {_STEPS_UP} steps now; usually it was {usual:.3g}."
        self._explosion = Alarm("explosion", step, norm, usual, size / usual, loss, text)
        return self._explosion
