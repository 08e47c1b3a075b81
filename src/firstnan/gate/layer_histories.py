"""How large the output of each layer was, over a run of any length, and which grows towards the end of its type.

Numbers are kept in arrays: 500 layers over 100,000 steps take about 3 MB.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable
from functools import partial

from firstnan.gate.forecast import LARGEST, Outlook, Point
from firstnan.records import Forecast, LayerSpan

_LENGTH = 32
_TOGETHER = 8
NEAR = 64.0
"""A forecast is made of what is nearer to its limit than this factor."""
_WIDE = 2.0**40
"""For types with the range of float32: of what is larger than this."""
_RISEN = 8.0
"""And of what has grown by this factor in the steps that are kept."""
_MOST_SHARES = 64
_FORGOTTEN = 256
"""Steps after which a layer that was not called in its type any more is followed in another one."""


class LayerSeries:
    """One layer: its last measured steps, those before in spans, the older the longer."""

    __slots__ = ("_levels", "dtype", "outlook", "recent", "shares")

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.recent = array("d")
        """Three numbers a step: the step, the norm, the largest magnitude."""
        self._levels: list[array[float]] = []
        """Three numbers a span: its first step, how many it has, the largest magnitude."""
        self.shares = array("d")
        """Step, share of zeros, share of subnormal numbers."""
        self.outlook = Outlook()

    def add(self, step: int, norm: float, size: float, shares: tuple[float, ...]) -> bool:
        """Adds one call; those of one step are one. Returns whether the step is a new one."""
        recent = self.recent
        if shares and (not self.shares or self.shares[-3] != step):
            self.shares.extend((step, *shares))
            if len(self.shares) > 3 * _MOST_SHARES:  # every second one
                rows = [self.shares[i : i + 3] for i in range(0, len(self.shares), 6)]
                self.shares = array("d", (v for row in rows for v in row))
        if recent and recent[-3] == step:
            recent[-2] = math.hypot(recent[-2], norm)
            recent[-1] = size if size > recent[-1] or size != size else recent[-1]
            return False
        recent.extend((step, norm, size))
        if len(recent) >= 6 * _LENGTH:
            self._shorten()
        return True

    def is_replaced_by(self, step: int, dtype: str) -> bool:
        """Whether the calls in another type are the ones to follow: they overflow earlier, or have long been the only.

        A layer may run in two types within a step, or in another one while a model is evaluated.
        """
        narrower = LARGEST.get(dtype, math.inf) < LARGEST.get(self.dtype, math.inf)
        return narrower or not self.recent or step > self.recent[-3] + _FORGOTTEN

    def _shorten(self) -> None:
        old, self.recent = self.recent[: 3 * _LENGTH], self.recent[3 * _LENGTH :]
        spans = _joined([(old[i], 1.0, old[i + 2]) for i in range(0, len(old), 3)], self.recent[0])
        for level in self._levels:
            level.extend(spans)
            if len(level) < 6 * _LENGTH:
                return
            oldest, level[:] = level[: 3 * _LENGTH], level[3 * _LENGTH :]
            rows = [(oldest[i], oldest[i + 1], oldest[i + 2]) for i in range(0, len(oldest), 3)]
            spans = _joined(rows, level[0])
        self._levels.append(spans)

    def points(self) -> list[Point]:
        r = self.recent
        return [(int(r[i]), r[i + 2]) for i in range(0, len(r), 3)]

    def norms(self) -> tuple[float, ...]:
        return tuple(self.recent[1::3])

    def earlier(self) -> tuple[LayerSpan, ...]:
        return tuple(
            LayerSpan(int(level[i]), int(level[i + 1]), level[i + 2])
            for level in reversed(self._levels)
            for i in range(0, len(level), 3)
        )


def _joined(rows: list[tuple[float, float, float]], end: float) -> array[float]:
    """Eight spans as one each; the last ends before the step `end`."""
    out = array("d")
    for i in range(0, len(rows), _TOGETHER):
        part = rows[i : i + _TOGETHER]
        after = rows[i + _TOGETHER][0] if i + _TOGETHER < len(rows) else end
        out.extend((part[0][0], after - part[0][0], max(row[2] for row in part)))
    return out


class LayerHistories:
    """The outputs of all layers; `tell` gets the forecasts, of one layer at a time."""

    def __init__(self, tell: Callable[[Forecast], None]) -> None:
        self._tell = tell
        self.series: dict[str, LayerSeries] = {}
        """By layer, in the order in which they first ran."""
        self._warned: str | None = None
        """The layer whose forecast holds: those behind it grow with it."""
        self._lock = threading.Lock()

    def add(self, step: int, layer: str, dtype: str, norm: float, size: float, shares: tuple[float, ...]) -> None:
        with self._lock:
            series = self.series.get(layer)
            if series is None or (series.dtype != dtype and series.is_replaced_by(step, dtype)):
                series = self.series[layer] = LayerSeries(dtype)
            elif series.dtype != dtype:
                return
            news = self._foresee(layer, series, step, size, is_new=series.add(step, norm, size, shares))
        if news is not None:
            self._tell(news)

    def _foresee(self, layer: str, series: LayerSeries, step: int, size: float, *, is_new: bool) -> Forecast | None:
        """Judges one call: a layer may run several times in a step, and the largest output is that of the step."""
        limit = LARGEST.get(series.dtype)
        if limit is None or not size < math.inf:
            return None
        if self._warned is not None:
            if self._warned != layer or not is_new or len(series.recent) < 6:
                return None
            void = series.outlook.turned(step, series.recent[-4])  # all calls of the step before
            self._warned = None if void is not None else self._warned
            return void
        if size < series.recent[-1]:
            return None
        if size < (limit / NEAR if limit < _WIDE else _WIDE):
            return None
        points = [p for p in series.points() if 0 < p[1] < math.inf]
        lowest = min(range(len(points)), key=lambda i: points[i][1])
        points = points[lowest:]
        if not points or size < _RISEN * points[0][1]:
            return None
        made = series.outlook.make(
            "layer", partial(str, layer), series.dtype, limit, points, 1.0 if limit < _WIDE else None
        )
        self._warned = layer if made is not None else None
        return made

    @property
    def worst(self) -> tuple[str, float] | None:
        """The layer nearest to the end of its type, and how many times it could still grow."""
        found = [
            (LARGEST[s.dtype] / max(s.recent[-1], 1e-30), name)
            for name, s in list(self.series.items())
            if s.dtype in LARGEST and s.recent
        ]
        room, name = min(found, default=(0.0, ""))
        return (name, room) if found else None
