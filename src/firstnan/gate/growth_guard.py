"""Watches the gradient norm and the loss, and warns when they leave their usual range, often before the first NaN.

Not disturbing healthy training matters more than warning early. Heavy tails, warm-up, starts at zero and new data are
normal in some runs, so every threshold is a factor that they do not reach, plus the spread of this run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from firstnan.gate.forecast import LARGEST, LOOK_EVERY, MOVED, GrowingWeights, Rise, RisingRate
from firstnan.records import Forecast

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

_EXPLOSION = 1e4
_STEPS_UP = 3
_OUTSIDE, _FAR_OUTSIDE = 3.0, 100.0
"""Times the first losses: where the healthy band ends, and where a few steps are enough to suspect divergence."""
_LONG_OUTSIDE = 16
"""As many steps in a row above the band are suspicious too."""
_LATEST = 8
"""The last losses, by which the end of a run is judged."""
_WEIGHTS = 10.0
"""Healthy training makes the weights no more than a few times larger; a loss that is only scaled does not at all."""
_STALLED, _STALLED_WEIGHTS = 0.01, 2.0
"""If the weights have at least doubled and their matrices get less than this share of the gradient, almost every unit
is dead: only the biases still move."""
_LEARNED = 0.25
"""A model has learned something if its usual loss was once below this share of the first losses."""
_BEYOND_DOUBT = 1e8
"""A loss that stays this many times above the first ones has diverged, whatever the weights are."""

_ALONG = 4.0
"""Times the first gradient norm or weights, which a loss that is about to overflow has made larger as well."""
_LARGE_UPDATE = 0.2
"""An update is large if it is this share of the weights; usual ones are a hundredth or less."""
_FADES, _WORSE = 0.875, 3.0
"""Of large updates the last eight count, about; and they count if the loss is so many times its lowest."""

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
    text: str
    since: int | None = None
    """For an explosion: the step from which on the loss stayed outside its healthy band."""
    before: float | None = None
    """For an explosion: the largest of the first losses."""
    weights: Weights | None = None
    """For an explosion: what has become of the weights."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What has become of the weights, for which a loss that only grows is no reason."""

    growth: float
    """How many times larger they are than before the first step."""
    matrices: float
    """The norm of the gradients of all matrices, as a share of that of all gradients."""

    @property
    def dead(self) -> bool:
        """Whether every matrix among them has a gradient of exactly 0, or almost."""
        return not self.matrices or (self.matrices < _STALLED and self.growth > _STALLED_WEIGHTS)

    @property
    def are_lost(self) -> bool:
        return self.dead or not self.growth <= _WEIGHTS

    def __str__(self) -> str:
        told = f"the weights are {self.growth:.3g} times larger than before the first step"
        if not self.dead:
            return told
        if not self.matrices:
            return f"{told}, and no weight matrix has a gradient other than 0"
        return f"{told}, and the weight matrices get {self.matrices:.2g} of the gradient: most units are dead"


class Limits(NamedTuple):
    """What is known of an optimizer and what it trains."""

    kind: str
    """The type of the weights."""
    loss: float
    """Where the loss overflows, and where a gradient does."""
    gradient: float
    momentum: float | None = None
    """Of plain SGD, whose updates can be told from its gradients."""
    least: float = 0.0
    """The weights count as at least this much."""


Forecasts = Sequence[Forecast]
Steps = Sequence[tuple[Any, ...]]


class GrowthGuard:
    """Judges the gradient norm and loss of each step. Every optimizer has its own guard, since norms differ."""

    def __init__(self, limit: float | None = None) -> None:
        self._limit = math.inf if limit is None else limit
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._until_look = 1
        self._usual = self._first = 0.0
        self._usual_loss = self._first_loss = 0.0
        self._least_loss = math.inf
        """The lowest of the usual losses."""
        self._spike = math.inf
        self._bar = min(self._limit, _HUGE)
        self._loss_bar = math.inf
        """A norm or loss up to these needs no closer test."""
        self._warned = 0.0
        """The norm of the last warning; 0 once it has come down."""
        self._steps_up = 0
        self._explosion: Alarm | None = None
        self._start = 0.0
        """The largest of the first losses, as far as they are of one size."""
        self._band = self._far = math.inf
        self.left: int | None = None
        """The step from which on the loss has been above its healthy band."""
        self._outside = self._steps_outside = self._steps_far = 0
        """About the losses since then: how many more were above it than not, how many were, and how many far above."""
        self._asked = 0.0
        """The loss at which the weights were looked at last."""
        self.last = (0, 0.0)
        """The last step of an explosion that lasts, and its loss."""
        self._latest: deque[float] = deque(maxlen=_LATEST)
        """The last losses, while an explosion lasts."""
        self._weights: Callable[[], Weights | None] = lambda: None
        self._loss_rise, self._norm_rise = Rise("loss"), Rise("gradient")
        self._growing = GrowingWeights()
        self._rising = RisingRate()
        self._moved = self._together = 0.0
        """The square of the gradients that the next update adds up, and the last updates as shares of the weights."""

    def ask_for_weights(self, weights: Callable[[], Weights | None]) -> None:
        """`weights` is called when the loss is suspicious."""
        self._weights = weights

    @property
    def has_exploded(self) -> bool:
        return self._explosion is not None

    @property
    def unrecovered(self) -> Alarm | None:
        """The explosion that the loss has not recovered from."""
        if self._explosion is None:
            return None
        return self._explosion if median(map(abs, self._latest)) > self._far else self.diverged

    @property
    def diverged(self) -> Alarm | None:
        """The explosion after which training is lost: the loss is still above its first values, and so are the weights.

        A loss that falls without bound, or one that only grows because its target, its scale or an opponent does, is
        not divergence: there the weights stay as they are.
        """
        alarm = self._explosion
        if alarm is None or alarm.since is None or not median(self._latest) > self._healthy:
            return None
        lost = alarm.weights is not None and alarm.weights.are_lost
        return alarm if lost or median(self._latest) > _BEYOND_DOUBT * self._start else None

    @property
    def _healthy(self) -> float:
        """The loss below which an explosion is over: that of a model that learns, if its weights were dead."""
        alarm = self._explosion
        return 0.5 * self._start if alarm and alarm.weights and alarm.weights.dead else self._band

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
            if loss > self._band:
                alarm = self._judge_level(step, norm, loss) or alarm
            elif self.left is not None and size > 0.0:
                self._goes_back()
            if size > self._loss_bar or self._explosion is not None:
                alarm = self._judge_loss(step, norm, loss) or alarm
            elif 0.0 < size < math.inf:
                self._steps_up = 0
                self._losses.append(size)
        self._until_look -= 1
        if not self._until_look:
            self._update_usual()
        return alarm

    def foresee(
        self,
        step: int,
        norm: float | None,
        loss: float | None,
        limits: Limits,
        weights: float | None,
        steps: Steps,
    ) -> Forecasts:
        """Forecasts that this step allows, and those that it makes void: call it after `observe`.

        `weights`: the norm of all parameters, if it is known. `steps`: the fields of the last StepRecords.
        """
        news: list[Forecast] = []
        kind, largest, largest_gradient, momentum, least = limits
        if loss is not None and self._start and (abs(loss) > self._start or self._loss_rise.points):
            is_half = largest == LARGEST["float16"]
            start, of_loss = max(self._start, _SMALL_NORM), "float16" if is_half else kind
            rise = self._loss_rise
            news += rise.add(step, abs(loss), start, of_loss, largest, lambda: is_half or self._grows(norm))
        first = max(self._first, _SMALL_NORM)
        if norm is not None and self._first and (norm > first or self._norm_rise.points):
            news += self._norm_rise.add(step, norm, first, kind, largest_gradient)
        growing, rising = self._growing, self._rising
        rate = steps[-1][3] if steps else None
        if rate is not None:
            is_due = rate > rising.peak or step <= rising.until or rising.forecast is not None
            if is_due and not step % LOOK_EVERY:
                news += rising.add(step, rate, steps)
            if weights and momentum is not None and norm is not None and norm < _OVERFLOW:
                self._moved = momentum * momentum * self._moved + norm * norm
                share = rate * math.sqrt(self._moved) / max(weights, least)
                self._together *= _FADES
                if share > _LARGE_UPDATE:
                    self._together += share
                    news += self._judge_updates(step, steps)
        if weights is not None and weights != growing.before and 0.0 < weights < math.inf:
            if weights > growing.bar or growing.forecast is not None:
                news += self._judge_weights(step, weights, steps)
            growing.before = weights
        return news

    def _grows(self, norm: float | None) -> bool:
        """Whether gradients or weights have grown too: a loss alone does with its scale, its target or its data."""
        if norm is not None and norm > _ALONG * max(self._first, _SMALL_NORM):
            return True
        return (self._growth() or 0.0) > _ALONG

    def _judge_updates(self, step: int, steps: Steps) -> Forecasts:
        """Updates as large as the weights: fine in the first steps, and where the loss profits from them."""
        if self._together < MOVED or len(self._norms) < _LATEST:
            return []
        last = [numbers[1] for numbers in steps[-_LATEST:] if numbers[1] is not None]
        worse = bool(last) and median(last) > _WORSE * min(self._least_loss, self._first_loss)
        made = self._growing.moved(step, self._together) if worse or self._has_outlier else None
        return [made] if made is not None else []

    @property
    def _has_outlier(self) -> bool:
        """Whether one of the last gradients was unusual."""
        return max(list(self._norms)[-_LATEST - 1 :], default=0.0) > _OUTLIER * max(self._usual, _SMALL_NORM)

    def _judge_weights(self, step: int, weights: float, steps: Steps) -> Forecasts:
        large = self._has_outlier
        # With their signs: a loss that falls below zero is better for it. One that was far lower before has profited
        # from larger weights, even if it is high for a while.
        last = [numbers[1] for numbers in steps[-_BLOCK:] if numbers[1] is not None]
        learns = len(last) < _BLOCK or median(last) < self._first_loss or self._least_loss < _LEARNED * self._first_loss
        growing = self._growing.add(step, weights, large, learns, self._growth)
        return [growing] if growing is not None else []

    def _growth(self) -> float | None:
        """How many times larger the weights are than before the first step."""
        weights = self._weights()
        return weights.growth if weights is not None else None

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
            if len(self._losses) <= _BLOCK and self._losses[-1] <= _OUTSIDE * max(self._losses[0], _SMALL_LOSS):
                self._start = max(self._start, self._losses[-1], _SMALL_LOSS)
                self._band, self._far = _OUTSIDE * self._start, _FAR_OUTSIDE * self._start
            self._usual_loss = sorted(self._losses)[len(self._losses) // 2]
            if len(self._losses) <= _BLOCK or not self._first_loss:
                self._first_loss = self._usual_loss
            else:
                self._least_loss = min(self._least_loss, self._usual_loss)
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
            return Alarm(kind, step, norm, None, f"step {step}: {text}.")
        if kind != "growth":
            text += f"; it is usually {usual:.3g}"
        else:
            early = len(self._norms) <= _BLOCK  # the usual norm is still changing
            text += f"; it was {self._norms[0]:.3g} at first" if early else f"; it was {usual:.3g} in the first steps"
        return Alarm(kind, step, norm, usual, f"step {step}: {text}.")

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

    def _judge_level(self, step: int, norm: float | None, loss: float) -> Alarm | None:
        """The alarm for a loss that stays above its first values, its weights lost, however slowly it rises."""
        if self.left is None:
            self.left, self._outside, self._steps_outside, self._steps_far, self._asked = step, 0, 0, 0, 0.0
        self._outside = min(self._outside + 1, _LONG_OUTSIDE)
        self._steps_outside += 1
        far = self._far < loss < math.inf
        self._steps_far += far
        # Asked again from time to time while the loss still rises: the weights may follow later. If it has fallen
        # since, it was other data or another scale that made it jump, and training gets over it.
        count = self._steps_far if far else self._steps_outside if self._outside >= _LONG_OUTSIDE else 0
        if count < _STEPS_UP or (count > _STEPS_UP and count.bit_count() > 1) or loss < self._asked:
            return None
        if self._explosion is not None and (known := self._explosion.weights) is not None and known.are_lost:
            return None
        weights, self._asked = self._weights(), loss
        if weights is None or not weights.are_lost:
            return None
        text = f"step {step}: the loss has exploded to {loss:.3g} and has been above {self._band:.3g} "
        text += f"since step {self.left}; it was at most {self._start:.3g} in the first steps, and {weights}."
        return self._exploded(step, norm, loss, self._start, text, weights)

    def _goes_back(self) -> None:
        """A loss inside the band: as many of them as there were outside end an explosion, at most 16."""
        self._outside -= 1
        if not self._outside:
            self.left = None
            if self._healthy == self._band:
                self._explosion, self._steps_up = None, 0

    def _judge_loss(self, step: int, norm: float | None, loss: float) -> Alarm | None:
        """The alarm for a loss that stays too high; also notes when it recovers."""
        size = abs(loss)
        if self._explosion is not None:
            if size < math.inf:
                self._latest.append(loss)
                self.last = step, loss
            if self.left is None and 0.0 < size <= self._healthy and median(map(abs, self._latest)) <= self._healthy:
                self._explosion, self._steps_up = None, 0
            return None
        self._steps_up += size < math.inf
        if self._steps_up < _STEPS_UP:
            return None
        usual = self._usual_loss
        text = f"step {step}: the loss has exploded to {loss:.3g} and stayed there for {_STEPS_UP} steps; "
        text += f"it is usually {usual:.3g}."
        return self._exploded(step, norm, loss, usual, text, self._weights())

    def _exploded(
        self, step: int, norm: float | None, loss: float, usual: float, text: str, weights: Weights | None
    ) -> Alarm:
        self._latest.clear()
        self._latest.append(loss)
        self.last = step, loss
        self._explosion = Alarm("explosion", step, norm, usual, text, self.left, self._start, weights)
        return self._explosion
