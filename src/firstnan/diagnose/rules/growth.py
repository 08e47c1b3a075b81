"""Did the loss, the gradients or the weights grow over the steps before the failure?"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass

from firstnan.records import History

WINDOW = 40
TINY = 1e-12
BAND = 3.0
"""Up to this multiple of its earlier maximum a series still counts as ordinary."""

Points = list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Growth:
    """A sustained rise that lasts to the end of the history."""

    what: str
    first_step: int
    first: float
    last_step: int
    last: float
    usual: float = math.inf
    """The maximum of the steps up to the first."""
    left_step: int | None = None
    """The step from which on it stayed above `BAND` times `usual`."""
    rises: int = 0
    """How many of the `moves` from one step to the next went up."""
    moves: int = 0

    @property
    def factor(self) -> float:
        return self.last / max(self.first, TINY)

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step

    @property
    def per_step(self) -> float:
        return float(self.factor ** (1 / max(self.steps, 1)))

    def lines(self) -> tuple[str, ...]:
        """How fast it rose, and when it left its ordinary range, as evidence."""
        pace = f"on average the {self.what} grew by a factor of {self.per_step:.3g} per step"
        if self.left_step is None:
            return (pace,)
        usual = f"{BAND:g} times its maximum up to step {self.first_step}"
        return pace, f"from step {self.left_step} on the {self.what} stayed above {BAND * self.usual:.4g}, {usual}"

    def sentences(self) -> str:
        how_often = "every step" if self.rises == self.moves else f"{self.rises} of {self.moves} steps"
        return (
            f"The {self.what} rose from {self.first:.4g} in step {self.first_step} to {self.last:.4g} in step "
            f"{self.last_step}, a factor of {self.factor:.3g}. It rose in {how_often}."
        )


def growth(history: History, *, gradients: bool = True, failing: int | None = None) -> Growth | None:
    """The clearest sustained rise of loss or parameter norm (or, if `gradients`, gradient norm); None if none rose.

    A series that was flat until the `failing` step did not grow: no update lies between, so this batch differs.
    """
    found = []
    for what, points in _series(history).items():
        if what == "gradient norm" and not gradients:
            continue
        rise = _rise(what, points[-WINDOW:])
        if rise is not None and not (rise.last_step == failing and _flat([v for _, v in points[-WINDOW:-1]])):
            found.append(rise)
    return max(found, key=lambda g: g.factor, default=None)


def not_growing(history: History) -> str:
    """A sentence with a space before it that says which recorded numbers did not grow; "" if any of them did."""
    recorded = {what: [v for _, v in points] for what, points in _series(history).items() if len(points) > 1}
    layers = [list(track.max_abs) for track in history.layers]
    if not recorded or any(_greatest_rise(values) > BAND for values in (*recorded.values(), *layers)):
        return ""
    *others, last = recorded
    return f" The {', '.join(others) + ' and ' if others else ''}{last} did not grow over the recorded steps."


def _series(history: History) -> dict[str, Points]:
    """The finite magnitudes of each recorded number, by step."""
    numbers = {
        "loss": [(s.step, s.loss) for s in history.steps],
        "gradient norm": [(s.step, s.grad_norm) for s in history.steps],
        "parameter norm": [(s.step, s.param_norm) for s in history.steps],
    }
    return {
        what: [(step, abs(v)) for step, v in points if v is not None and math.isfinite(v)]
        for what, points in numbers.items()
    }


def _greatest_rise(values: list[float]) -> float:
    """The largest factor between a value and an earlier one."""
    lowest, rise = math.inf, 0.0
    for value in values:
        lowest = min(lowest, value)
        rise = max(rise, value / max(lowest, TINY))
    return rise


def _flat(values: list[float]) -> bool:
    """Long enough to know what is usual, and usual at its end."""
    return len(values) >= 4 and values[-1] <= 3 * statistics.median(values)


def _rise(what: str, points: Points) -> Growth | None:
    """The rise from the lowest point to the end: long and 10-fold, steep, or abrupt in a run that has just begun."""
    if len(points) < 2:
        return None
    values = [v for _, v in points]
    low = min(range(len(points)), key=lambda i: (values[i], -i))
    tail = values[low:]
    if len(tail) < 2 or values[-1] < 0.3 * max(values):
        return None
    rises = sum(b > a for a, b in itertools.pairwise(tail))
    usual = max(values[: low + 1])
    inside = [i for i, v in enumerate(values) if v <= BAND * usual]
    left = points[inside[-1] + 1][0] if inside[-1] + 1 < len(points) else None
    rise = Growth(what, points[low][0], values[low], points[-1][0], values[-1], usual, left, rises, len(tail) - 1)
    # One outlier is not growth: it takes several steps, most of them up, or two in a row that are far away.
    mostly_up = rises >= 0.6 * rise.moves
    far = 1e6 * max(statistics.median(values), TINY)
    long = mostly_up and len(tail) >= 4 and rise.factor >= 10
    steep = len(tail) >= 3 and (mostly_up or values[-2] > far) and values[-1] > far
    abrupt = mostly_up and len(points) <= 4 and rise.factor >= 1e4
    return rise if long or steep or abrupt else None
