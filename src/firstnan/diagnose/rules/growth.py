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
"""So many times the usual maximum still counts as healthy."""


@dataclass(frozen=True, slots=True)
class Growth:
    """A sustained rise that lasts to the end of the history."""

    what: str
    first_step: int
    first: float
    last_step: int
    last: float
    usual: float = math.inf
    """The most that the steps up to the first showed."""
    left_step: int | None = None
    """The step from which on it was never back in the healthy band."""
    rises: int = 0
    """How many of the steps on the way made it larger, and how many there were."""
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
        """The rise as evidence: from where to where, how fast, and when it left what was usual."""
        rise = f"{self.sentence()}, {self.per_step:.3g} times a step"
        if self.left_step is None:
            return (rise,)
        return (rise, f"step {self.left_step} left the healthy band for good (up to {BAND * self.usual:.4g})")

    def worse(self) -> str:
        """How steadily it grew: `every step made it worse`, where that is so."""
        return f"{'every step' if self.rises == self.moves else f'{self.rises} of {self.moves} steps'} made it worse"

    def sentence(self) -> str:
        return (
            f"the {self.what} rose from {self.first:.4g} (step {self.first_step}) to {self.last:.4g} "
            f"(step {self.last_step}), {self.factor:.3g} times"
        )


def growth(history: History, *, gradients: bool = True, failing: int | None = None) -> Growth | None:
    """The clearest sustained rise of loss or parameter norm (or, if `gradients`, gradient norm); None if none rose.

    What was flat until the `failing` step did not grow: no update lies between, so it is this batch that differs.
    """
    series = {
        "loss": [(s.step, s.loss) for s in history.steps],
        "gradient norm": [(s.step, s.grad_norm) for s in history.steps],
        "parameter norm": [(s.step, s.param_norm) for s in history.steps],
    }
    if not gradients:
        del series["gradient norm"]
    found = []
    for what, points in series.items():
        finite = [(step, abs(v)) for step, v in points if v is not None and math.isfinite(v)]
        rise = _rise(what, finite[-WINDOW:])
        if rise is not None and not (rise.last_step == failing and _flat([v for _, v in finite[-WINDOW:-1]])):
            found.append(rise)
    return max(found, key=lambda g: g.factor, default=None)


def _flat(values: list[float]) -> bool:
    """Long enough to know what is usual, with an end that is."""
    return len(values) >= 4 and values[-1] <= 3 * statistics.median(values)


def _rise(what: str, points: list[tuple[int, float]]) -> Growth | None:
    """The rise from the lowest point to the end: long and 10-fold, or abrupt in a run that has just begun."""
    if len(points) < 2:
        return None
    values = [v for _, v in points]
    low = min(range(len(points)), key=lambda i: (values[i], -i))
    tail = values[low:]
    rises = sum(b > a for a, b in itertools.pairwise(tail))
    # One outlier batch is no growth: the end must be near the top, and most steps on the way must go up.
    if len(tail) < 2 or values[-1] < 0.3 * max(values) or rises < 0.6 * (len(tail) - 1):
        return None
    usual = max(values[: low + 1])
    inside = [i for i, v in enumerate(values) if v <= BAND * usual]
    left = points[inside[-1] + 1][0] if inside and inside[-1] + 1 < len(points) else None
    rise = Growth(what, points[low][0], values[low], points[-1][0], values[-1], usual, left, rises, len(tail) - 1)
    long = len(tail) >= 4 and rise.factor >= 10
    steep = len(tail) >= 3 and values[-1] > 1e6 * max(statistics.median(values), TINY)
    abrupt = len(points) <= 4 and rise.factor >= 1e4
    return rise if long or steep or abrupt else None
