"""Drawings of a report as SVG and PNG, without a library: they need no script, and colors come from the page."""

from __future__ import annotations

import base64
import binascii
import itertools
import math
import struct
import zlib
from collections.abc import Sequence

from jinja2 import Template
from markupsafe import Markup

from firstnan.records import Histogram, Preview
from firstnan.records.words import number
from firstnan.report.series import HeatMap, Series

WIDTH, HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 26

Points = Sequence[tuple[float, float]]


class _Axis:
    """From numbers to a coordinate; logarithmic if asked."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self.log, self._start, self._end = log, start, end
        self.low, self.high = low, high
        low, high = self._plain(low), self._plain(high)
        # Halved: the distance between two huge numbers may be infinite.
        self._low, self._span = low / 2, (high / 2 - low / 2) or 0.5

    def _plain(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def __call__(self, value: float) -> float:
        share = (self._plain(value) / 2 - self._low) / self._span
        return round(self._start + min(max(share, -0.2), 1.2) * (self._end - self._start), 1)

    def ticks(self, most: int = 4) -> list[float]:
        """Round numbers inside the range."""
        if self.low == self.high:
            return [self.low]
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, math.ceil((last - first) / most))
            marks = [10.0**e for e in range(first, last + 1, every) if -307 <= e <= 308]
            inside = [m for m in marks if self.low <= m <= self.high]
            return inside if len(inside) > 1 else [self.low, self.high]
        rough = (self.high / 2 - self.low / 2) / most * 2
        if not math.isfinite(rough) or rough <= 0:
            return [self.low, self.high]
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next((unit * m for m in (1, 2, 5, 10) if unit * m >= rough), rough) if unit else rough
        first = math.ceil(self.low / step)
        marks = [(first + i) * step for i in range(most + 2)]
        return [m for m in marks if m <= self.high * (1 + 1e-9) or m <= self.high] or [self.low]


def tick(value: float) -> str:
    """A number on an axis, in few characters."""
    if value and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.1e}".replace(".0e", "e").replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


_CURVES = Template(
    """<svg class="chart" viewBox="0 0 {{ w }} {{ h }}" role="img" aria-label="{{ label }}">
{%- for y, text in rows %}<line class="grid" x1="{{ left }}" x2="{{ right }}" y1="{{ y }}" y2="{{ y }}"/>
<text class="tick" x="{{ left - 6 }}" y="{{ y + 3.5 }}" text-anchor="end">{{ text }}</text>{% endfor %}
{%- for x, text in columns %}<text class="tick" x="{{ x }}" y="{{ h - 8 }}" text-anchor="middle">{{ text }}</text>
{%- endfor %}
{%- if trip %}<line class="trip" x1="{{ trip }}" x2="{{ trip }}" y1="{{ top }}" y2="{{ bottom }}"/>
{% set before = trip > w / 2 -%}
<text class="trip-label" x="{{ trip + (-4 if before else 4) }}" y="{{ top + 8 }}"
 text-anchor="{{ 'end' if before else 'start' }}">{{ trip_label }}</text>{% endif %}
{%- for name, path in ahead %}<path class="forecast {{ name }}" d="{{ path }}"/>{% endfor %}
{%- for name, path in areas %}<path class="area {{ name }}" d="{{ path }}"/>{% endfor %}
{%- for name, path in lines %}<path class="line {{ name }}" d="{{ path }}"/>{% endfor %}
{%- for name, x, y in dots %}<circle class="dot {{ name }}" cx="{{ x }}" cy="{{ y }}" r="3"/>{% endfor %}
{%- for x in crosses %}<path class="cross" d="M{{ x - 4 }} {{ top + 12 }}l8 8m0 -8l-8 8"/>{% endfor -%}
</svg>""",
    autoescape=True,
)


def curves(
    groups: Sequence[tuple[str, Points]], label: str, *, trip: float | None = None, ahead: Points = ()
) -> Markup:
    """Lines over the steps, each with the class it is drawn in; a cross where a value is not finite."""
    everything = [p for _, points in groups for p in points] + list(ahead)
    finite = [p for p in everything if math.isfinite(p[1])]
    if not finite:
        return Markup("")
    low, high = min(v for _, v in finite), max(v for _, v in finite)
    log = low > 0 and high / low > 50
    if not log:
        low, high = _widened(low, high)
    first, last = min(x for x, _ in everything), max(x for x, _ in everything)
    x = _Axis(first, last, _LEFT, WIDTH - _RIGHT)
    y = _Axis(low, high, HEIGHT - _BOTTOM, _TOP + 8, log=log)
    steps = sorted({round(m) for m in x.ticks(5)})
    lines, areas, dots, crosses = [], [], [], []
    for name, points in groups:
        path, bad, shown = "", False, [(x(step), y(v)) for step, v in points if math.isfinite(v)]
        for step, v in points:
            if math.isfinite(v):
                path += f"{'L' if path and not bad else 'M'}{x(step)} {y(v)}"
            else:
                crosses.append(x(step))
            bad = not math.isfinite(v)
        lines.append((name, path))
        if shown and len(groups) == 1 and "M" not in path[1:]:
            areas.append((name, f"{path}L{shown[-1][0]} {HEIGHT - _BOTTOM}L{shown[0][0]} {HEIGHT - _BOTTOM}Z"))
        if shown:
            dots.append((name, *shown[-1]))
    forecast = "".join(f"{'L' if i else 'M'}{x(s)} {y(v)}" for i, (s, v) in enumerate(ahead) if math.isfinite(v))
    return Markup(
        _CURVES.render(
            w=WIDTH, h=HEIGHT, left=_LEFT, right=WIDTH - _RIGHT, top=_TOP, bottom=HEIGHT - _BOTTOM, label=label,
            rows=[(y(m), tick(m)) for m in y.ticks()], columns=[(x(m), tick(m)) for m in steps],
            trip=x(trip) if trip is not None and first <= trip <= last else None,
            trip_label=f"step {trip:g}" if trip is not None else "",
            lines=lines, areas=areas, dots=dots, crosses=sorted(set(crosses))[:50],
            ahead=[("ahead", forecast)] if forecast else [],
        )
    )  # fmt: skip


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range in which a number that hardly changes is drawn as a flat line."""
    least = max(abs(low), abs(high)) * 0.02 or 1.0
    missing = least - (high - low)
    return (low - missing / 2, high + missing / 2) if missing > 0 else (low, high)


def curve(series: Series, trip: float | None) -> Markup:
    """One series, its forecast, and the failing step."""
    points = list(zip(series.steps, series.values, strict=True))
    ahead = list(series.forecast)
    if ahead and ahead[0][0] > points[-1][0]:
        ahead.insert(0, points[-1])
    return curves([("one", points)], f"{series.title} over the steps", trip=trip, ahead=ahead)


_BARS = Template(
    """<svg class="chart histogram" viewBox="0 0 {{ w }} {{ h }}" role="img" aria-label="{{ label }}">
<line class="grid" x1="{{ left }}" x2="{{ right }}" y1="{{ bottom }}" y2="{{ bottom }}"/>
{%- for x, y, width, height, text, zero in bars -%}
<rect class="bar{{ ' zero' if zero }}" x="{{ x }}" y="{{ y }}" width="{{ width }}" height="{{ height }}" rx="1.5">
<title>{{ text }}</title></rect>{% endfor %}
{%- if zero is not none %}<line class="zero-line" x1="{{ zero }}" x2="{{ zero }}" y1="{{ top }}" y2="{{ bottom }}"/>
<text class="tick" x="{{ zero + 4 if zero < right - 30 else zero - 10 }}" y="{{ top + 8 }}">0</text>{% endif %}
<text class="tick" x="{{ left }}" y="{{ h - 8 }}">{{ first }}</text>
<text class="tick" x="{{ right }}" y="{{ h - 8 }}" text-anchor="end">{{ last }}</text>
<text class="tick" x="{{ (left + right) / 2 }}" y="{{ h - 8 }}" text-anchor="middle">{{ note }}</text>
</svg>""",
    autoescape=True,
)


def bars(histogram: Histogram, label: str, *, zeros: bool = False) -> Markup:
    """A histogram; `zeros`: the bin of 0 is marked. Heights are logarithmic if a few bins hold nearly everything."""
    counts, edges, most = histogram.counts, histogram.edges, max(histogram.counts, default=0)
    if not counts or not most or not all(map(math.isfinite, edges)):
        return Markup("")
    left, right, top, bottom = 8, WIDTH - 8, 10, HEIGHT - _BOTTOM
    width, several = (right - left) / len(counts), sorted(c for c in counts if c)
    log = most > 50 * several[len(several) // 2]
    drawn, zero = [], None
    for i, amount in enumerate(counts):
        share = math.log1p(amount) / math.log1p(most) if log else amount / most
        size = max(round(share * (bottom - top), 1), 2.0) if amount else 0.0
        text = f"{amount} from {number(edges[i])} to {number(edges[i + 1])}"
        x = left + i * width
        if edges[i] <= 0 <= edges[i + 1] and zero is None:
            inside = (0 - edges[i]) / ((edges[i + 1] - edges[i]) or 1)
            zero = round(x + inside * width, 1)
        at_zero = zeros and edges[i] <= 0 < edges[i + 1]
        drawn.append((round(x + 0.75, 1), round(bottom - size, 1), round(width - 1.5, 1), size, text, at_zero))
    notes = [name for name, on in (("logarithmic axis", histogram.log), ("logarithmic height", log)) if on]
    return Markup(
        _BARS.render(
            w=WIDTH, h=HEIGHT, left=left, right=right, top=top, bottom=bottom, bars=drawn, zero=zero, label=label,
            first=number(edges[0]), last=number(edges[-1]), note=", ".join(notes),
        )
    )  # fmt: skip


# --- pictures --------------------------------------------------------------------------------------------------------

# Dark violet to light yellow: readable on a light and on a dark page, and without color vision.
_STOPS = ((0, 26, 19, 56), (0.2, 72, 33, 115), (0.45, 152, 45, 128), (0.7, 240, 96, 93), (0.9, 254, 186, 128),
          (1.0, 252, 244, 182))  # fmt: skip
_LEVELS = 250
_NO_DATA, _BAD = 254, 255


def _ramp() -> list[tuple[int, int, int]]:
    colors = []
    for i in range(_LEVELS):
        share = i / (_LEVELS - 1)
        (a, *low), (b, *high) = next(pair for pair in itertools.pairwise(_STOPS) if share <= pair[1][0])
        part = (share - a) / (b - a)
        red, green, blue = (round(x + (y - x) * part) for x, y in zip(low, high, strict=True))
        colors.append((red, green, blue))
    return colors + [(0, 0, 0)] * (_NO_DATA - _LEVELS) + [(128, 128, 136), (0, 229, 255)]


def heat_picture(heat: HeatMap) -> tuple[str, float, float]:
    """The map as a PNG, one pixel per cell, with the magnitudes of its darkest and its lightest color."""
    sizes = [v for row in heat.values for v in row if v is not None and math.isfinite(v) and v > 0]
    low, high = (min(sizes), max(sizes)) if sizes else (1.0, 1.0)
    low = max(low, high * 1e-12)  # a layer that is nearly 0 must not take all colors from the others
    span = math.log10(high) - math.log10(low)

    def level(value: float | None) -> int:
        if value is None:
            return _NO_DATA
        if not math.isfinite(value):
            return _BAD
        if value <= low or span <= 0:
            return 0
        return min(int((math.log10(value) - math.log10(low)) / span * (_LEVELS - 1)), _LEVELS - 1)

    rows = [bytes(map(level, row)) for row in heat.values]
    return _png(len(heat.steps), len(rows), 3, rows, _ramp()), low, high


def ramp_picture() -> str:
    """The colors of a heat map, from low to high."""
    return _png(_LEVELS, 1, 3, [bytes(range(_LEVELS))], _ramp())


def picture(preview: Preview) -> str:
    """A preview as a PNG; empty if its pixels do not fit its size."""
    try:
        pixels = base64.b64decode(preview.pixels, validate=True)
    except (binascii.Error, ValueError):
        return ""
    width = preview.width * preview.channels
    kind = {1: 0, 3: 2, 4: 6}.get(preview.channels)
    if kind is None or not 0 < preview.width <= 256 or len(pixels) != width * preview.height or not pixels:
        return ""
    rows = [pixels[at : at + width] for at in range(0, len(pixels), width)]
    return _png(preview.width, preview.height, kind, rows)


def _png(width: int, height: int, kind: int, rows: list[bytes], palette: Sequence[tuple[int, int, int]] = ()) -> str:
    """A PNG of 8 bits per channel as a data address."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    if palette:
        content += chunk(b"PLTE", b"".join(map(bytes, palette)))
    content += chunk(b"IDAT", zlib.compress(b"".join(b"\0" + row for row in rows), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(content).decode("ascii")
