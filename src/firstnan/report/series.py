"""The numbers of a history as series to draw: found by their form, so a new one needs no change here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from firstnan.records import History, LayerTrack, Report
from firstnan.records.codec import encode

MOST_POINTS = 800
MOST_LAYERS, MOST_COLUMNS = 600, 160
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_STEPS = ("step", "steps")
_ASIDE = ("layers", "forecast", "others", "settings")
"""What has its own chart, or belongs to another optimizer."""
_FIRST = ("loss", "grad_norm", "param_norm", "lr")
_FORECASTS = {"loss": "loss", "gradient": "grad_norm", "scale": "scale"}
_WAY = ("since_step", "now", "limit", "in_steps")
_BEYOND, _POINTS = 0.3, 64
"""How far a forecast is drawn past the last step, as a share of all steps; and in how many points."""
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class Series:
    """One number over the steps; `forecast` continues it."""

    name: str
    steps: tuple[float, ...]
    values: tuple[float, ...]
    forecast: tuple[tuple[float, float], ...] = ()

    @property
    def title(self) -> str:
        return {"lr": "learning rate", "grad_norm": "gradient norm", "param_norm": "parameter norm"}.get(
            self.name, self.name.replace("_", " ")
        )


def series_of(report: Report) -> list[Series]:
    """Every series in the history, the well-known ones first, each with at most `MOST_POINTS` points."""
    history = report.history
    found = _found({f.name: encode(getattr(history, f.name)) for f in fields(history) if f.name not in _ASIDE})
    ahead = _expected(report)
    found = {name: points for name, points in found.items() if name.removesuffix("_max") not in found.keys() - {name}}
    shown = []
    for name in sorted(found, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        points = sorted(found[name].items())
        finite = [v for _, v in points if math.isfinite(v)]
        if len(points) < 2 or not finite:
            continue
        steps, values = zip(*reduced(points), strict=True)
        until = points[-1][0] + _BEYOND * (points[-1][0] - points[0][0])
        coming = [p for p in sorted(ahead.get(name, {}).items()) if p[0] <= until]
        shown.append(Series(name, steps, values, tuple(reduced(coming))))
    return shown


def _expected(report: Report) -> dict[str, dict[float, float]]:
    """What the forecasts of a report say of each series: its way to the largest number of its type."""
    data = extra(report, "forecast")
    ahead = _found(data)
    for one in data if isinstance(data, list) else ():
        name = _FORECASTS.get(str(one.get("what"))) if isinstance(one, dict) else None
        since, now, limit, steps = (_number(one.get(key)) for key in _WAY) if name else (None,) * 4
        if (
            name is None
            or since is None
            or now is None
            or limit is None
            or not steps
            or one.get("withdrawn") is not None
        ):
            continue
        if not 0 < now < limit < math.inf:
            continue
        rate = (math.log(limit) - math.log(now)) / steps
        shares = [i / _POINTS for i in range(_POINTS + 1)]
        ahead[name] = {since + steps * i: min(math.exp(math.log(now) + rate * steps * i), limit) for i in shares}
    return ahead


def extra(report: Report, name: str) -> Any:
    """A part of a report, or of its history, that not every version records, as JSON; None if there is none."""
    return encode(getattr(report, name, None) or getattr(report.history, name, None))


def reduced(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` of the points: of each stretch its least and its largest value, and every last one."""
    if len(points) <= most:
        return list(points)
    width, kept = math.ceil(len(points) / (most // 3)), list[tuple[float, float]]()
    for start in range(0, len(points), width):
        part = points[start : start + width]
        marked = [p for p in part if not math.isfinite(p[1])][:1]
        finite = [p for p in part if math.isfinite(p[1])]
        if finite:
            marked += [min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])]
        kept += sorted(set(marked))
    return [*kept, points[-1]] if kept[-1] != points[-1] else kept


def _found(data: Any) -> dict[str, dict[float, float]]:
    """Name -> step -> value of every series in this JSON."""
    series: dict[str, dict[float, float]] = {}
    for name, step, value in _numbers(data, "", _DEEPEST):
        series.setdefault(name, {})[step] = value
    return series


def _numbers(data: Any, name: str, depth: int) -> Iterator[tuple[str, float, float]]:
    """(name, step, value), from rows with a step (`{"step": 3, "loss": 1.5}`) and from columns beside steps."""
    if depth == 0:
        return
    if isinstance(data, dict):
        steps = next((s for key in _STEPS if isinstance(s := data.get(key), list) and _is_column(s)), None)
        at = _number(data.get("step"))
        own = data.get("name")
        name = own if isinstance(own, str) and own and steps is not None else name
        for key, value in data.items():
            if key in _STEPS and not (isinstance(value, list) and not _is_column(value)):
                continue
            if at is not None and (number := _number(value)) is not None:
                yield key, at, number
            elif isinstance(value, list) and steps is not None and len(steps) == len(value) and _is_column(value):
                called = name if key in ("values", "value", "y") and name else key
                for step, one in zip(map(_number, steps), map(_number, value), strict=True):
                    if step is not None and one is not None:
                        yield called, step, one
            else:
                yield from _numbers(value, key if key != "series" else name, depth - 1)
    elif isinstance(data, list):
        for item in data:
            if isinstance(item, dict):
                yield from _numbers(item, name, depth - 1)
            elif isinstance(item, list) and len(item) == 2 and name:
                step, one = map(_number, item)
                if step is not None and one is not None:
                    yield name, step, one


def _is_column(values: list[Any]) -> bool:
    return bool(values) and not isinstance(values[0], dict | list)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    return _NUMBERS.get(value) if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class HeatMap:
    """The largest magnitude of each layer in each stretch of steps; None where nothing was recorded."""

    phase: str
    layers: tuple[str, ...]
    steps: tuple[int, ...]
    """The first step of each column."""
    values: tuple[tuple[float | None, ...], ...]
    left_out: int = 0
    """How many layers are not shown."""


def heat_maps(history: History) -> list[HeatMap]:
    """Layers by steps, one map for outputs and one for gradients; none where no layer was watched."""
    maps = []
    for phase in ("forward", "backward"):
        tracks = [track for track in history.layers if track.phase == phase and track.steps]
        if tracks:
            maps.append(_heat_map(phase, tracks))
    return maps


def _magnitudes(track: LayerTrack) -> Iterator[tuple[int, int, float]]:
    """First and last step and magnitude, those of long ago first: of several steps as one, where these are recorded."""
    for span in getattr(track, "earlier", ()):
        yield span.step, span.step + max(span.steps, 1) - 1, span.max_abs
    for step, value in zip(track.steps, track.max_abs, strict=True):
        yield step, step, value


def _widest_gap(steps: list[int]) -> int:
    """The most steps between two in the later half of these: in narrower columns there would be nothing."""
    later = steps[(len(steps) - 1) // 2 :]
    return max((after - before for before, after in pairwise(later)), default=1)


def _heat_map(phase: str, tracks: list[LayerTrack]) -> HeatMap:
    first = min(begin for track in tracks for begin, _, _ in _magnitudes(track))
    last = max(end for track in tracks for _, end, _ in _magnitudes(track))
    # Columns of as many steps each: the first steps are all measured, and would take half of the map otherwise.
    gap = _widest_gap(sorted({step for track in tracks for step in track.steps}))
    width = max(math.ceil((last - first + 1) / MOST_COLUMNS), gap)
    rows = []
    for track in tracks[:MOST_LAYERS]:
        row: list[float | None] = [None] * ((last - first) // width + 1)
        for begin, end, value in _magnitudes(track):
            for column in range((begin - first) // width, (end - first) // width + 1):
                known = row[column]
                # A NaN is larger than everything here: it must not vanish between finite numbers.
                if known is None or not value <= known:
                    row[column] = known if known is not None and math.isnan(known) else value
        rows.append(tuple(row))
    return HeatMap(
        phase,
        tuple(track.layer for track in tracks[:MOST_LAYERS]),
        tuple(range(first, last + 1, width)),
        tuple(rows),
        max(len(tracks) - MOST_LAYERS, 0),
    )
