"""The report as one HTML file that opens offline, and as a small card for a notebook."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.util
import json
import keyword
import math
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from firstnan.diagnose.causes import catalogue
from firstnan.records import Origin, PathStep, Remedy, Report, SampleValues, Site, TensorStat
from firstnan.records.codec import encode
from firstnan.records.forecast_words import sentence
from firstnan.records.words import cell_name, count, headline, kind, line_of, noticed, number, place, short_path
from firstnan.report import charts
from firstnan.report.characters import Charset
from firstnan.report.markdown import render_markdown
from firstnan.report.sentences import (
    at_expression,
    batch_line,
    feature_line,
    ranks_line,
    remedy_result,
    replay_line,
    whole_path,
)
from firstnan.report.series import HeatMap, Series, extra, heat_maps, series_of
from firstnan.report.source_excerpt import TAB, Row, excerpt, location, shared_start, shown
from firstnan.report.text import (
    argument,
    evidence_lines,
    extra_values,
    first_bad_layer,
    growth,
    history_head,
    short_dtype,
    tensor_facts,
)

ASSETS = Path(__file__).parent / "assets"
LARGEST_PAGE = 8_000_000
WIDE = 70
"""Characters from which on a line of source needs the whole width of the page."""
MOST = {"inputs": 12, "diff": 60, "line": 240, "path": 30, "events": 100, "rows": 40, "features": 12, "text": 2000}
_CHARS = Charset()


def render_html(report: Report, *, interactive: bool = True, saved: str = "") -> str:
    """The report as one HTML file: styles, scripts and pictures are in it, and it asks no server for anything.

    With plotly installed (`pip install firstnan[html]`) its curves can be zoomed, unless `interactive` is False or
    the page would exceed 8 MB. `saved` names the JSON file of the report, which `firstnan fix` reads.
    """
    view = View(report, saved)
    plotly = _plotly() if interactive and view.series else None
    page = _page(view, plotly)
    return page if plotly is None or len(page.encode()) <= LARGEST_PAGE else _page(view, None)


def render_card(report: Report) -> str:
    """The essential part of the report as a fragment of HTML, for a notebook."""
    style = (ASSETS / "card.css").read_text(encoding="utf-8")
    return _templates().get_template("card.html").render(report=View(report), style=Markup(style))


def _page(view: View, plotly: _Library | None) -> str:
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    scripts = [_digest(script), *([plotly.digest] if plotly else [])]
    # plotly sets its own styles; without it only the style sheet of the page applies.
    styles = "'unsafe-inline'" if plotly else _digest(style)
    policy = (
        f"default-src 'none'; img-src data:; style-src {styles}; script-src {' '.join(scripts)}; base-uri 'none'; "
        "form-action 'none'"
    )
    return _templates().get_template("page.html").render(
        report=view, style=Markup(style), script=Markup(script), policy=policy, data=_as_json(view.chart_data()),
        plotly=plotly.packed if plotly else "", markdown=_as_json(render_markdown(view.report)),
    )  # fmt: skip


@cache
def _templates() -> Environment:
    made = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"prose": prose, "plain": plain, "number": number, "tick": charts.tick, "dtype": short_dtype}
    made.filters |= {"path_end": _CHARS.path_end, "size": math.prod}
    return made


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_json(value: Any) -> Markup:
    """JSON that no HTML parser takes for anything else."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


@dataclass(frozen=True, slots=True)
class _Library:
    packed: str
    """Compressed with gzip, in base64."""
    digest: str


@cache
def _plotly() -> _Library | None:
    """plotly's script; None where it is not installed."""
    found = importlib.util.find_spec("plotly")
    if found is None or not found.submodule_search_locations:
        return None
    try:  # the file is read without importing plotly, which takes longer than the page
        path = Path(found.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
        source = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (OSError, ValueError):
        return None
    packed = base64.b64encode(gzip.compress(source.encode(), 9, mtime=0)).decode("ascii")
    return _Library(packed, _digest(source))


# --- text --------------------------------------------------------------------------------------------------------


def plain(text: Any, limit: int = MOST["text"]) -> str:
    """Any text, with unprintable characters escaped, and cut."""
    return _CHARS.cut(_CHARS.show(str(text)[: 2 * limit]), limit)


def prose(text: str) -> Markup:
    """A sentence; what it has in backticks is code."""
    parts = _CHARS.prose(text, MOST["text"]).split("`")
    if len(parts) % 2 == 0:
        return escape("`".join(parts))
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(p) if i % 2 else escape(_arrows(p)) for i, p in enumerate(parts))


def _arrows(text: str) -> str:
    return text.replace(" -> ", " → ")


_TOKEN = re.compile(
    r"(?P<comment>\#.*)|(?P<string>[rbfuRBFU]{0,2}(?:'''.*?(?:'''|$)|\"\"\".*?(?:\"\"\"|$)|'(?:\\.|[^'\\])*'?|\"(?:\\.|[^\"\\])*\"?))"
    r"|(?P<number>\b\d[\d_.]*(?:[eE][+-]?\d+)?j?\b)|(?P<call>\b[A-Za-z_]\w*(?=\())|(?P<name>\b[A-Za-z_]\w*)"
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source line: its kind of token, and whether it is marked."""

    text: str
    style: str = ""
    marked: bool = False


def pieces(text: str, mark: tuple[int, int] | None = None) -> list[Piece]:
    """A line of source in parts for highlighting; a long one is cut around what is marked."""
    text, mark = _window(text, mark)
    styles = [""] * len(text)
    for found in _TOKEN.finditer(text):
        name = found.lastgroup or ""
        if name in ("name", "call"):
            name = "keyword" if keyword.iskeyword(found[0]) else "call" if name == "call" else ""
        styles[found.start() : found.end()] = [name] * len(found[0])
    first, after = mark or (0, 0)
    made: list[Piece] = []
    for i, (char, style) in enumerate(zip(text, styles, strict=True)):
        marked, shown_as = first <= i < after, " " * TAB if char == "\t" else _CHARS.show(char)
        if made and (made[-1].style, made[-1].marked) == (style, marked):
            made[-1] = Piece(made[-1].text + shown_as, style, marked)
        else:
            made.append(Piece(shown_as, style, marked))
    return made


def _window(text: str, mark: tuple[int, int] | None) -> tuple[str, tuple[int, int] | None]:
    text, most = text.rstrip(), MOST["line"]
    if len(text) <= most:
        return text, mark
    start = max(0, min(mark[0] - 40, len(text) - most)) if mark else 0
    cut = ("…" if start else "") + text[start : start + most] + ("…" if start + most < len(text) else "")
    if mark is None:
        return cut, None
    shift = start - bool(start)
    return cut, (mark[0] - shift, min(mark[1] - shift, len(cut)))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of source or of a diff; `sign` is +, - or blank, `head` the place above a change."""

    pieces: list[Piece]
    number: int | None = None
    sign: str = ""
    head: str = ""
    marked: bool = False


def source(site: Site) -> list[Line]:
    """The excerpt around a place, without the indentation that all its lines share."""
    rows = excerpt(site)
    indent = min((len(row.text) - len(row.text.lstrip()) for row in rows if row.text.strip()), default=0)
    return [_source_line(row, indent) for row in rows]


def _source_line(row: Row, indent: int) -> Line:
    if row.number is None:
        return Line([Piece("…")])
    mark = (max(row.mark[0] - indent, 0), max(row.mark[1] - indent, 0)) if row.mark else None
    return Line(pieces(row.text[indent:], mark), row.number, marked=mark is not None)


def diff(text: str) -> list[Line]:
    """A diff with the characters marked that a line and its replacement do not share."""
    lines = shown(text)
    made = []
    for i, (sign, line) in enumerate(lines[: MOST["diff"]]):
        if not sign:
            made.append(Line([], head=plain(line)))
            continue
        other = {"-": lines[i + 1] if i + 1 < len(lines) else None, "+": lines[i - 1] if i else None}.get(sign)
        paired = other is not None and {sign, other[0]} == {"+", "-"}
        made.append(Line(pieces(line, _changed(line, other[1]) if other and paired else None), sign=sign))
    if len(lines) > MOST["diff"]:
        made.append(Line([Piece(f"and {count(len(lines) - MOST['diff'], 'more line')}")], sign=" "))
    return made


def _changed(line: str, other: str) -> tuple[int, int] | None:
    """The part of a line that the other one does not have, between what both begin and end with."""
    first = shared_start([line, other])
    after = shared_start([line[first:][::-1], other[first:][::-1]])
    return (first, len(line) - after) if first < len(line) - after < len(line) + 1 else None


# --- the report, section by section ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fix:
    """A remedy as it is shown."""

    remedy: Remedy
    label: str
    result: str
    state: str
    """proven, failed or open."""
    lines: list[Line]
    losses: Markup


@dataclass(frozen=True, slots=True)
class Tensor:
    stat: TensorStat
    made: bool
    """Written by the operator, not read."""
    facts: str
    bars: Markup


@dataclass(frozen=True, slots=True)
class Node:
    """One operator of the path; `more` operators are left out before it."""

    step: PathStep
    where: str
    first: bool = False
    more: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """Operators of the path that follow each other in one layer and one phase."""

    module: str
    phase: str
    nodes: list[Node]


@dataclass(frozen=True, slots=True)
class Heat:
    heat: HeatMap
    picture: str
    low: float
    high: float


class View:
    """What the templates show of one report."""

    def __init__(self, report: Report, saved: str = "") -> None:
        self.report = report
        named = shlex.quote(short_path(saved)) if saved else ""
        self.fix_command = f"firstnan fix {named} --apply" if named else ""
        self.show_command = f"firstnan show {named} --open" if named else ""
        self.origin: Origin | None = report.origin
        self.verdict = report.verdict
        self.headline = headline(report)
        self.batch_line = batch_line(report)
        self.cause = report.cause
        self.sure = report.cause is None or report.cause.confidence >= 0.4
        self.known_cause = report.cause is not None and report.cause.slug in catalogue()
        self.evidence = evidence_lines(report)
        self.extra_values = extra_values(report)
        self.raised = report.origin.event.raised if report.origin and report.origin.event else None
        self.replay = replay_line(report)
        self.noticed = noticed(report.noticed) if report.noticed else ""
        self.ranks_line = ranks_line(report.ranks, report.world_size) if report.ranks else ""
        series = series_of(report)
        self._constant = [one for one in series if len(set(one.values)) == 1 and not one.forecast]
        self.series = [one for one in series if one not in self._constant]
        self._maps = heat_maps(report.history)
        self.trip = report.step if report.verdict != "clean" else None
        self.unit = report.batch.unit if report.batch else "sample"

    @property
    def title(self) -> str:
        return plain(self.headline, 120)

    @property
    def badge(self) -> str:
        return {"nonfinite": kind(self.origin.produced if self.origin else None), "diverged": "Diverged"}.get(
            self.verdict, "Clean"
        )

    @cached_property
    def facts(self) -> list[tuple[str, str, str]]:
        """(label, text, remark) of what a reader looks for first."""
        report, origin = self.report, self.origin
        found: list[tuple[str, str, str]] = []
        if report.step is not None:
            found.append(("Step", str(report.step), f"of {count(self._last_step() + 1, 'step')} seen" * self._more()))
        if origin and origin.op:
            node = origin.event.node if origin.event else None
            found.append(("Operator", origin.op, node or origin.phase))
        if origin and (origin.module or origin.label):
            layer = _CHARS.path_end(origin.module or "", 40)
            found.append(("Layer" if origin.module else "Tensor", layer or origin.label, origin.module_type))
        if report.batch and (report.batch.index is not None or report.batch.bad_samples):
            bad = report.batch.bad_samples or ()
            which = f"{self.unit} {bad[0]}" if len(bad) == 1 else count(len(bad), f"bad {self.unit}") if bad else ""
            remark = "" if report.batch.index is None else f"batch {report.batch.index}"
            found.append(("Batch", which or str(report.batch.index), remark if which else ""))
        if self.noticed:
            found.append(("Noticed in", self.noticed.removeprefix("the "), ""))
        if report.world_size > 1:
            found.append(("Rank", f"{report.rank} of {report.world_size}", ""))
        return found

    def _last_step(self) -> int:
        return max((record.step for record in self.report.history.steps), default=0)

    def _more(self) -> bool:
        return self._last_step() >= (self.report.step or 0) > 0

    @cached_property
    def place(self) -> str:
        return location(self.origin.site, self.origin.library_site) if self.origin and self.origin.site else ""

    @cached_property
    def source(self) -> list[Line]:
        return source(self.origin.site) if self.origin and self.origin.site else []

    @cached_property
    def remark(self) -> str:
        return at_expression(self.origin) if self.origin else ""

    @cached_property
    def read_at(self) -> tuple[str, list[Line]] | None:
        site = self.origin.read_at if self.origin else None
        if site is None or (self.origin and site == self.origin.site):
            return None
        return place(site), [line for line in source(site) if line.marked]

    @cached_property
    def tensors(self) -> list[Tensor]:
        origin = self.origin
        if origin is None:
            return []
        read = [Tensor(stat, False, "; ".join(tensor_facts(stat)), _bars(stat)) for stat in origin.inputs]
        made = origin.produced
        if made is not None and origin.inputs != (made,):
            read = [*read[: MOST["inputs"]], Tensor(made, True, "; ".join(tensor_facts(made)), Markup(""))]
        return read

    @cached_property
    def histograms(self) -> list[Tensor]:
        return [t for t in self.tensors if t.bars][:4]

    @cached_property
    def groups(self) -> list[Group]:
        """The path, its middle left out if it is long, in groups of one layer and phase."""
        steps, most = whole_path(self.report), MOST["path"]
        if self.verdict == "diverged":
            return []
        gap = len(steps) - most if len(steps) > most + 1 else 0
        shown_steps = [*steps[: most * 2 // 3], *steps[most * 2 // 3 + gap :]] if gap else steps
        groups: list[Group] = []
        before = ""
        for i, step in enumerate(shown_steps):
            said = self._line_of(step)
            where, before = said if said != before else "", said
            first = i == 0 and bool(self.origin and self.origin.op)
            module = self.origin.module if first and self.origin else step.module
            node = Node(step, where, first, gap if gap and i == most * 2 // 3 else 0)
            if groups and (groups[-1].module, groups[-1].phase) == (module, step.phase) and not node.more:
                groups[-1].nodes.append(node)
            else:
                groups.append(Group(module, step.phase, [node]))
        return groups

    def _line_of(self, step: PathStep) -> str:
        """Its line; without folders, since there is little room."""
        file = step.file or (self.origin.site.file if self.origin and self.origin.site else "")
        if step.line is None or not file:
            return ""
        return line_of(file if cell_name(file) else os.path.basename(file), step.line)

    @cached_property
    def curves(self) -> list[tuple[Series, Markup, str]]:
        return [(series, charts.curve(series, self.trip), _arrows(growth(series.values))) for series in self.series]

    @cached_property
    def constant(self) -> str:
        """The series that never change, which need no drawing."""
        return ", ".join(f"{series.title} {number(series.values[0])}" for series in self._constant)

    @cached_property
    def is_wide(self) -> bool:
        """Whether source and fix need the whole width."""
        best = self.best
        lines = [*self.source, *(best.lines if best else ())]
        told = [line for line in lines if line.marked or line.sign in ("+", "-")]
        return any(sum(len(piece.text) for piece in line.pieces) > WIDE for line in told)

    @cached_property
    def history_head(self) -> str:
        return history_head(self.report, len(self.report.history.steps)) if self.report.history.steps else ""

    @cached_property
    def forecast(self) -> list[str]:
        """What was expected, and in which step it was known or withdrawn."""
        return [
            f"step {f.since_step}: {sentence(f)}"
            + (f"; withdrawn in step {f.withdrawn}" if f.withdrawn is not None else "")
            for f in self.report.forecast
        ]

    @cached_property
    def headroom(self) -> list[list[str]]:
        return _table(extra(self.report, "headroom"))

    @cached_property
    def heats(self) -> list[Heat]:
        return [Heat(heat, *charts.heat_picture(heat)) for heat in self._maps]

    @cached_property
    def ramp(self) -> str:
        return charts.ramp_picture()

    @cached_property
    def first_bad_layer(self) -> str:
        return first_bad_layer(self.report)

    @cached_property
    def features(self) -> list[str]:
        batch = self.report.batch
        return [feature_line(feature, batch.unit) for feature in batch.features[: MOST["features"]]] if batch else []

    @cached_property
    def samples(self) -> list[tuple[int, list[tuple[SampleValues, str]]]]:
        """The values of each bad sample, with a picture where it is an image."""
        found: dict[int, list[tuple[SampleValues, str]]] = {}
        for one in self.report.batch.values[:32] if self.report.batch else ():
            found.setdefault(one.sample, []).append((one, charts.picture(one.preview) if one.preview else ""))
        return list(found.items())

    def dataset_index(self, sample: int) -> int | None:
        batch = self.report.batch
        indices = dict(zip(batch.bad_samples or (), batch.dataset_indices or (), strict=False)) if batch else {}
        return indices.get(sample)

    @cached_property
    def fixes(self) -> list[Fix]:
        remedies = self.report.remedies
        return [
            Fix(
                remedy,
                "Fix" if len(remedies) == 1 else f"Fix {i + 1}",
                remedy_result(remedy, self.report),
                "proven" if remedy.proven else "failed" if remedy.tried else "open",
                diff(remedy.diff) if remedy.diff else [],
                self._losses(remedy),
            )
            for i, remedy in enumerate(remedies)
        ]

    @cached_property
    def best(self) -> Fix | None:
        """The fix shown beside the source: the proven one, or the first that changes it."""
        fixes = self.fixes
        return next((f for f in fixes if f.state == "proven"), next((f for f in fixes if f.lines), None))

    def _losses(self, remedy: Remedy) -> Markup:
        after = [(float(one.step), one.loss) for one in remedy.losses]
        before = [(float(r.step), r.loss) for r in self.report.history.steps if r.loss is not None]
        if len(after) < 2:
            return Markup("")
        return charts.curves(
            [("without", before[-400:]), ("with", after)], "loss without and with this change", trip=self.trip
        )

    @cached_property
    def other_causes(self) -> list[tuple[str, str]]:
        return [(cause.title, cause.slug) for cause in self.report.other_causes]

    @cached_property
    def events(self) -> tuple[list[Any], int]:
        events = self.report.events
        return list(events[: MOST["events"]]), max(len(events) - MOST["events"], 0)

    @cached_property
    def environment(self) -> list[tuple[str, str]]:
        return _scalars(encode(self.report.environment))

    @cached_property
    def optimizer(self) -> list[tuple[str, str]]:
        history = self.report.history
        found = [("optimizer", history.optimizer)] if history.optimizer else []
        found += [(n, argument(value)) for n, value in history.settings if value is not None and value is not False]
        for name, site in (("optimizer made at", history.made_at), ("optimizer steps at", history.stepped_at)):
            found += [(name, place(site))] if site else []
        return found

    @cached_property
    def capsule(self) -> str:
        return short_path(self.report.capsule)

    def chart_data(self) -> dict[str, Any]:
        """The data of the charts, for hovering and zooming."""
        return {
            "trip": self.trip,
            "series": [
                {
                    "title": plain(s.title, 80),
                    "steps": _digits(s.steps),
                    "values": _digits(s.values),
                    "forecast": [_digits(p) for p in s.forecast],
                }
                for s in self.series
            ],
            "heat": [
                {
                    "phase": h.phase,
                    "layers": [plain(name, 120) for name in h.layers],
                    "steps": list(h.steps),
                    "values": [_digits(row, 3) for row in h.values],
                }
                for h in self._maps
            ],
        }


def _bars(stat: TensorStat) -> Markup:
    if stat.histogram is None:
        return Markup("")
    return charts.bars(stat.histogram, f"histogram of {plain(stat.name, 60)}", zeros=stat.zeros > 0)


def _digits(values: Iterable[float | None], digits: int = 6) -> list[float | str | None]:
    """Numbers as JSON has them, in few digits; what is not finite as text."""
    return [
        None if v is None else float(f"{v:.{digits}g}") if math.isfinite(v) else encode(v) for v in values
    ]  # fmt: skip


def _table(data: Any) -> list[list[str]]:
    """Rows of JSON objects as a table, its head first; other JSON as names and values."""
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        return [["", ""], *([name, value] for name, value in _scalars(data))] if data else []
    rows = [_placed(row) for row in data[: MOST["rows"]]]
    names = list(dict.fromkeys(key for row in rows for key, value in row.items() if value not in (None, "")))
    cells = [[plain(argument(row[name]), 100) if row.get(name) is not None else "–" for name in names] for row in rows]
    return [[name.replace("_", " ") for name in names], *cells] if names else []


def _placed(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its file and line in one cell."""
    file, line = row.get("file"), row.get("line")
    if not isinstance(file, str) or not isinstance(line, int):
        return row
    return {"place": line_of(file, line)} | {key: v for key, v in row.items() if key not in ("file", "line")}


def _scalars(data: Any, name: str = "", depth: int = 4) -> list[tuple[str, str]]:
    """The numbers and texts in some JSON with their names, not more than fit a table."""
    found: list[tuple[str, str]] = []
    if isinstance(data, dict) and depth:
        for key, value in data.items():
            found += _scalars(value, f"{name} {key}".strip().replace("_", " "), depth - 1)
    elif isinstance(data, list) and data and all(isinstance(item, dict) for item in data) and depth:
        for i, item in enumerate(data):
            found += _scalars(item, f"{name} {item.get('name', i)}".strip(), depth - 1)
    elif data is not None and data != "" and data != []:
        found.append((name, argument(data) if not isinstance(data, str) else plain(data, 200)))
    return found[: MOST["rows"]]
