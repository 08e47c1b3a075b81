"""When something that grows will reach the largest number of its type, from the slope of its logarithm.

A warning that comes to nothing costs more than one that does not come. So a forecast is made only of a rise that is
long, steady and does not slow down, and it is withdrawn when the rise ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from firstnan.records import Forecast

LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38, "float64": 1.7e308}
"""The largest number of each type."""

_MOST_POINTS = 24
"""Slopes are compared between this many points."""
_ENOUGH = 8
"""The least points of the later part of a rise."""
_STEADY = 0.7
"""A rise slows down if the second half of it is flatter than this many times the first."""
_TURNED, _IN_A_ROW = 4.0, 3
"""A rise has turned if it is this many times below its peak for three values in a row: series are noisy."""
_STEEPER, _DOUBLINGS = 1.5, 3.0
"""A rise gets steeper if the second half of its logarithms is this many times as steep as the first, and doubles so
often: less of it may be a hard batch."""
_CERTAIN = 6.0
"""The latest step that a forecast names is at most this many times as far away as the earliest."""
_HORIZON = 3.0
"""A forecast reaches at most this many times as far as the rise has lasted."""

Point = tuple[int, float]
"""A step, and a value in it."""


@dataclass(frozen=True, slots=True)
class TimeToLimit:
    """In how many steps a rise reaches its limit."""

    steps: float
    low: float
    high: float
    span: int
    """How long the part of the rise was that shows it."""


def reach(
    points: Sequence[Point], limit: float, horizon: float = math.inf, *, steepens: bool = False
) -> TimeToLimit | None:
    """When these positive numbers, oldest first, reach the limit; None if they do not rise steadily.

    A rise that is a straight line of the logarithms goes on as such. One that slows down there, but not by itself
    (weights that grow by the same amount in each step), goes on as a straight line. One that gets steeper even there
    (each layer multiplies the error of the one before), if it `steepens`, is a straight line of the logarithms of how
    often it doubled. What began differently long ago is judged by its later part. Nothing is continued further than
    `horizon` times its own length, or said if it is vague.
    """
    if points[-1][1] >= limit:
        return None
    for part in (points, points[len(points) // 2 :], points[len(points) * 3 // 4 :]):
        if len(part) < (4 if part is points else _ENOUGH):
            return None
        some = thinned(part)
        base = min(value for _, value in some) / 2
        scales = (lambda value, base=base: math.log2(math.log2(value / base))), math.log2, float
        for scale in scales[0 if steepens and _gets_steeper([(t, math.log2(value)) for t, value in some]) else 1 :]:
            found = _line([(step, scale(value)) for step, value in some], scale(limit))
            vague = found is None or found.high > _CERTAIN * max(found.low, 1.0)
            if found is not None and not vague and found.steps <= horizon * found.span:
                return found
    return None


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most 24 of them, evenly, with the last."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    step = (len(points) - 1) / (_MOST_POINTS - 1)
    return [points[round(i * step)] for i in range(_MOST_POINTS)]


def _gets_steeper(points: Sequence[Point]) -> bool:
    """Whether these logarithms rise ever faster: a few points, or scattered ones, do so by chance."""
    if len(points) < _ENOUGH:
        return False
    half = len(points) // 2
    later = points[half:]
    first, second = slope(points[: half + 1]), slope(later)
    rise = second * (later[-1][0] - later[0][0])
    return second >= _STEEPER * first and rise >= max(_DOUBLINGS, 4 * _scatter(later, second))


def _scatter(points: Sequence[Point], slope: float) -> float:
    """How far the points are from the line: how much of its rise is chance."""
    rest = [value - slope * step for step, value in points]
    middle = median(rest)
    return 1.5 * median(abs(r - middle) for r in rest)


def _line(points: Sequence[Point], limit: float) -> TimeToLimit | None:
    half = len(points) // 2
    first, second = slope(points[: half + 1]), slope(points[half:])
    if second <= 0 or second < _STEADY * first:
        return None
    whole = slope(points)
    scatter = _scatter(points, whole)
    span = round(points[-1][0] - points[0][0])
    if whole * span < 4 * scatter:
        return None
    spread = scatter / span
    left = limit - points[-1][1]
    steep, flat = max(whole, second) + spread, min(whole, second) - spread
    if left <= 0 or flat <= 0:
        return None
    last = max(second, slope(points[-4:]))  # a rise that gets steeper gets there sooner
    steps = left / (last if last > 1.5 * whole else second)
    return TimeToLimit(steps, min(left / max(steep, last), steps), max(left / flat, steps), span)


def slope(points: Sequence[Point]) -> float:
    """The median of all slopes between two points, which a few outliers do not change."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for i, earlier in enumerate(points)
        for later in points[i + 1 :]
        if later[0] > earlier[0]
    ]
    return median(slopes) if slopes else 0.0


class Outlook:
    """The forecast of one series: made once, withdrawn if the series turns, and then perhaps made again."""

    __slots__ = ("_below", "_made", "_peak", "_quiet_until", "forecast")

    def __init__(self) -> None:
        self.forecast: Forecast | None = None
        """The one that holds."""
        self._made = self._below = 0
        self._peak = 0.0
        self._quiet_until = -1

    def make(
        self,
        what: Literal["loss", "gradient", "layer", "operator", "variance", "attention"],
        name: Callable[[], str],
        kind: str,
        limit: float,
        points: Sequence[Point],
        horizon: float | None = None,
        is_real: Callable[[], bool] = lambda: True,
    ) -> Forecast | None:
        """The forecast of this rise, if there is one to be made and none holds.

        `name` is asked only then: finding the expression in the source takes longer than a sample. So is `is_real`.
        `horizon`: how many times as far as the rise has lasted it may reach.
        """
        step, now = points[-1]
        if self.forecast is not None or step < self._quiet_until:
            return None
        found = reach(points, limit, horizon or _HORIZON, steepens=what == "loss")
        if found is None or not is_real():
            return None
        low, high = max(math.floor(found.low), 0), max(math.ceil(found.high), 1)
        self.forecast = Forecast(what, name(), kind, limit, now, max(round(found.steps), 1), low, high, step)
        self._peak = now
        self._made += 1
        return self.forecast

    def turned(self, step: int, value: float) -> Forecast | None:
        """The forecast that this value makes void: it is far below the peak, or the time is long over."""
        forecast = self.forecast
        if forecast is None:
            return None
        self._peak = max(self._peak, value)
        late = step > forecast.since_step + 4 * (forecast.high or 0) + 16
        self._below = self._below + 1 if value < self._peak / _TURNED else 0
        if self._below < _IN_A_ROW and not late:
            return None
        self.forecast, self._below = None, 0
        # One that was wrong is not made again soon.
        self._quiet_until = step + 64 * 4**self._made
        return replace(forecast, withdrawn=step)


_RISEN = {"loss": 7.0, "gradient": 10.0}
"""Doublings above the first values from which on a rise counts: less may be a hard batch or a new part of training."""
_MOST_KEPT = 128
_WIDE, _NEAR_HALF = 1e30, 64.0
"""A float16 loss is followed within this factor of its end, which is near anyway; in wider types everywhere."""


class Rise:
    """A loss or gradient norm above its first values, followed as long as it stays there."""

    __slots__ = ("_inside", "_outlook", "_what", "points")

    def __init__(self, what: Literal["loss", "gradient"]) -> None:
        self._what: Literal["loss", "gradient"] = what
        self.points: list[Point] = []
        """The rise so far; empty while there is none."""
        self._inside = 0
        """How many of the last values were not above the first ones."""
        self._outlook = Outlook()

    def add(
        self, step: int, value: float, first: float, kind: str, limit: float, is_real: Callable[[], bool] = lambda: True
    ) -> list[Forecast]:
        """One more value, where the first ones were `first`: a new forecast, or one that is withdrawn.

        `is_real()`, asked only if there may be a forecast: whether something else has grown as well.
        """
        if not 0 < value < math.inf:
            return []
        void = self._outlook.turned(step, value)
        news = [void] if void is not None else []
        self._inside = self._inside + 1 if value <= first else 0
        if self._inside >= _IN_A_ROW:
            self.points = []
        if value <= first:
            return news
        self.points.append((step, value))
        if len(self.points) > _MOST_KEPT:
            self.points = self.points[::2]
        is_near = limit > _WIDE or value > limit / _NEAR_HALF
        if is_near and math.log2(value / first) >= _RISEN[self._what] and value >= max(v for _, v in self.points[-4:]):
            made = self._outlook.make(self._what, str, kind, limit, self.points, is_real=is_real)
            news += [made] if made is not None else []
        return news


_FEWEST = 5
"""Samples of which a forecast is made."""
_STILL_RISING = 0.25
"""The last samples rise at least this many times as fast as all of them: many rises are steepest in the first steps."""
_MOST_SAMPLES, _LAST_SAMPLES = 64, 4
_MUCH_NEARER = 64.0
"""Times larger than in the sample before: worth another look soon, far from the limit too."""
_SAMPLED_HORIZON = 1.0
"""Few samples are continued at most this many times as far as the rise has lasted."""


class Course:
    """A number that rises towards a limit, known of a few sampled steps."""

    __slots__ = ("_outlook", "nearer", "points")

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._outlook = Outlook()
        self.nearer = False
        """Whether the last sample was near the limit and nearer than the one before, or came much nearer."""

    def add(
        self,
        what: Literal["operator", "variance", "attention"],
        kind: str,
        name: Callable[[], str],
        step: int,
        value: float,
        limit: float,
        *,
        near: float,
        risen: float = 8.0,
        doubles: bool = True,
        fewest: int = _FEWEST,
        steady: float = _STILL_RISING,
        horizon: float = _SAMPLED_HORIZON,
    ) -> Forecast | None:
        """One more sample: a new forecast, or one that is withdrawn.

        A forecast is made only of a value above `near` that is `risen` times the least of `fewest` or more, and whose
        last samples rise at least `steady` times as fast as all of them: their logarithms, if it `doubles`.
        """
        self.nearer = False
        if not 0 < value < limit:
            return None
        void = self._outlook.turned(step, value)
        if void is not None:
            return void
        points = self.points
        before = points[-1][1] if points else math.inf
        is_near = value > near
        self.nearer = value > before if is_near else doubles and value > _MUCH_NEARER * before
        points.append((step, value))
        if len(points) > _MOST_SAMPLES:
            del points[1::2]
        if not (is_near and self.nearer) or self._outlook.forecast is not None:
            return None
        rise = points[min(range(len(points)), key=lambda i: points[i][1]) :]
        if len(rise) < fewest or value < risen * rise[0][1]:
            return None
        line = [(t, math.log2(v)) for t, v in rise] if doubles else rise
        if slope(line[-max(_LAST_SAMPLES, len(line) // 3) :]) < steady * slope(thinned(line)):
            return None
        made = self._outlook.make(what, name, kind, limit, rise, horizon)
        if made is None and doubles:  # what came before does not show how fast
            made = self._outlook.make(what, name, kind, limit, rise[-_FEWEST:], _SAMPLED_HORIZON)
        return made


_FALLEN, _FALLING, _UNBRAKED, _SOON = 0.5, 8, 0.95, 0.25
"""What may pass zero is followed when it has lost this share of the most it was, over so many samples, and does not
slow down: what is never negative does by then. It is continued at most this many times as far as the fall has lasted,
since a scale that is learned falls in a line too, and stops where it fits."""


class Fall:
    """A number that falls towards zero and may pass it, known of a few sampled steps."""

    __slots__ = ("_course", "_most")

    def __init__(self) -> None:
        self._most = 0.0
        self._course = Course()

    @property
    def nearer(self) -> bool:
        return self._course.nearer

    def add(self, name: Callable[[], str], step: int, value: float, tiny: float) -> Forecast | None:
        """One more sample: a new forecast, or one that is withdrawn, in the numbers of a `Course` of 1 / value."""
        if value >= self._most:
            self._most, self._course = value, Course()
            return None
        most = self._most
        news = self._course.add(
            "operator", "min", name, step, most - value, most,
            near=_FALLEN * most, risen=2.0, doubles=False, fewest=_FALLING, steady=_UNBRAKED, horizon=_SOON,
        )  # fmt: skip
        return news and replace(news, now=1 / max(news.limit - news.now, tiny), limit=1 / tiny)


_LOW_SCALE = 32.0
_HALVINGS = 6


class SinkingScale:
    """The scale of a gradient scaler: it is halved when an update is skipped, and below 1 nothing can be trained."""

    __slots__ = ("_forecast", "_skips")

    def __init__(self) -> None:
        self._skips: list[Point] = []
        """The last skipped updates, as long as the scale has only sunk."""
        self._forecast: Forecast | None = None

    def skipped(self, step: int, scale: float) -> Forecast | None:
        """An update was skipped at this scale: the forecast, if there is one to be made."""
        if self._skips and scale >= self._skips[-1][1]:
            self._skips = []
        self._skips = [*self._skips[-_HALVINGS + 1 :], (step, scale)]
        if self._forecast is not None or scale > _LOW_SCALE or scale < 1 or len(self._skips) < _HALVINGS:
            return None
        apart = [later[0] - earlier[0] for earlier, later in pairwise(self._skips)]
        left = math.floor(math.log2(scale)) + 1
        low, high = left * min(apart), left * max(apart)
        self._forecast = Forecast("scale", "", "scale", 1.0, scale, round(left * median(apart)), low, high, step)
        return self._forecast

    def turned(self, step: int) -> Forecast | None:
        """An update was made in this step: the forecast that is void, as the scale has held for long enough."""
        forecast = self._forecast
        if forecast is None or step <= self._skips[-1][0] + 4 * (forecast.high or 0) + 16:
            return None
        self._forecast, self._skips = None, []
        return replace(forecast, withdrawn=step)


_GROWN = 10.0
"""Healthy training makes the weights at most a few times larger than they were."""
MOVED = 0.6
"""The last large updates together, as a share of the weights."""
_AT_ONCE = 4.0
"""An update that makes the weights this many times larger."""
_LASTS = 512
"""Steps after which a warning is withdrawn if there was no further reason for it."""


class GrowingWeights:
    """The norm of all weights, where it grows far beyond its first value and the loss does not profit from it.

    Weights that grow without need make every later gradient larger, until one of them overflows. When that
    happens cannot be known, so the forecast has no date.
    """

    __slots__ = ("_again", "_first", "_reason", "bar", "before", "forecast")

    def __init__(self) -> None:
        self.before = self._first = 0.0
        """The norm when it was last measured, and the first time."""
        self.bar = 0.0
        """A norm up to this is no reason for a warning."""
        self.forecast: Forecast | None = None
        """The one that holds."""
        self._reason = 0
        """The last step with a reason for it."""
        self._again = _GROWN
        """How many times the first norm is worth a warning."""

    def add(
        self, step: int, size: float, large_gradient: bool, learns: bool, growth: Callable[[], float | None]
    ) -> Forecast | None:
        """The norm of the weights before this step: a new forecast, or one that is withdrawn.

        `large_gradient`: whether one of the last gradients was unusual; `learns`: whether the loss is below its first
        values; `growth()` is the exact growth of the weights, asked only if there may be a reason.
        """
        self._first = self._first or size
        self.bar = self._again * self._first
        at_once = large_gradient and size > _AT_ONCE * self.before
        if size > self.bar and (at_once or not learns):
            self._reason = step
            exact = growth() if self.forecast is None else None
            if exact is not None and exact >= self._again:
                self._again = _AT_ONCE * exact
                kind = "jump" if at_once else "growth"
                self.forecast = Forecast("weights", "", kind, _GROWN, exact, None, None, None, step)
                return self.forecast
        return self._withdrawn(step)

    def moved(self, step: int, share: float) -> Forecast | None:
        """The last updates together are this share of the weights: a new forecast, if none holds."""
        self._reason = step
        if self.forecast is not None:
            return None
        self.forecast = Forecast("weights", "", "updates", MOVED, share, None, None, None, step)
        return self.forecast

    def _withdrawn(self, step: int) -> Forecast | None:
        forecast = self.forecast
        if forecast is None or step <= self._reason + _LASTS:
            return None
        self.forecast = None
        return replace(forecast, withdrawn=step)


_LAST_STEPS, _MORE_STEPS = 8, 32
"""A loss is the median of so many steps."""
LOOK_EVERY = 4
_LOOK_ON = 64
"""Steps after a rate was raised in which the loss may still follow it."""
_RAISED, _LOSS_RISEN, _NORM_RISEN = 1.3, 3.0, 1.5
"""Times the rate, loss and gradient norm at the lowest loss. In healthy training a high rate makes a low loss larger by
such factors too, so it must also be large for this run: this share of the first loss; or, over more steps, more than
half of the way back to it, in logarithms, by this factor."""
_SHARE_OF_FIRST, _BEYOND_HALF = 0.2, 2.0
_SCATTERED = 4.0
"""A loss that differs by more than this factor from step to step says nothing."""


class RisingRate:
    """A learning rate that is raised again and again, and a loss that rises with it.

    A rate just beyond what a network bears shows itself in this way for some dozens of steps. When it then explodes, it
    does so within five, so there is nothing to be continued, and the forecast has no date.
    """

    __slots__ = ("_first", "_least", "_low", "forecast", "peak", "until")

    def __init__(self) -> None:
        self.peak = 0.0
        """The highest rate."""
        self.until = 0
        """There is nothing to be looked at after this step, unless the rate is raised."""
        self._first = 0.0
        """The first loss."""
        self._least = dict.fromkeys((_LAST_STEPS, _MORE_STEPS), (math.inf, math.inf, math.inf))
        """The lowest loss, and the gradient norm and the highest rate then, by how many steps a loss is of."""
        self._low = 0
        """How often the loss was low again since the forecast."""
        self.forecast: Forecast | None = None
        """The one that holds."""

    def add(self, step: int, rate: float, steps: Sequence[tuple[Any, ...]]) -> list[Forecast]:
        """The rate in use, and the fields of the last StepRecords: a new forecast, or one that is withdrawn."""
        if rate > self.peak:
            self.peak, self.until = rate, step + _LOOK_ON
        holds = self.forecast is not None
        news: list[Forecast] = []
        for count in self._least:
            last = steps[-count:]
            losses = sorted(numbers[1] for numbers in last if numbers[1] is not None and 0.0 < numbers[1] < math.inf)
            norms = [numbers[2] for numbers in last if numbers[2] is not None]
            if len(losses) == count and norms and not news:
                news = self._withdrawn(step, losses) if holds else self._judged(step, rate, losses, median(norms))
        return news

    def _judged(self, step: int, rate: float, losses: list[float], norm: float) -> list[Forecast]:
        count, loss = len(losses), median(losses)
        self._first = self._first or loss
        if loss < self._least[count][0]:
            self._least[count] = loss, norm, self.peak
        least, least_norm, least_rate = self._least[count]
        is_short = count == _LAST_STEPS
        large = _SHARE_OF_FIRST * self._first if is_short else _BEYOND_HALF * math.sqrt(least * self._first)
        rises = loss > max(_LOSS_RISEN * least, large) and norm > _NORM_RISEN * least_norm
        if (
            not rises
            or rate < self.peak
            or rate < _RAISED * least_rate
            or losses[count // 8] < max(least, loss / _SCATTERED)
        ):
            return []
        self._low = 0
        self.forecast = Forecast("loss", "", "rate", least, loss, None, None, None, step)
        return [self.forecast]

    def _withdrawn(self, step: int, losses: list[float]) -> list[Forecast]:
        """The forecast, if the loss is low again or nothing came of it for long."""
        forecast = self.forecast
        if forecast is None or len(losses) != _LAST_STEPS:
            return []
        self._low = self._low + 1 if median(losses) < forecast.now / 2 else 0
        if self._low < _IN_A_ROW and step <= forecast.since_step + _LASTS:
            return []
        self.forecast = None
        self._least = dict.fromkeys(self._least, (forecast.now, math.inf, self.peak))
        return [replace(forecast, withdrawn=step)]
