"""The report as one screen of text, with its tensors and its history."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import re
import shlex
import shutil
import textwrap
import tokenize
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from firstnan.diagnose.causes import catalogue
from firstnan.records import (
    Batch,
    Element,
    Feature,
    NaNEvent,
    Origin,
    PathStep,
    RankFinding,
    Remedy,
    Report,
    Site,
    TensorStat,
)
from firstnan.records.codec import encode
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import (
    came_with_numbers,
    cell_name,
    cell_source,
    count,
    headline,
    kind,
    line_of,
    noticed,
    number,
    place,
    short_path,
)
from firstnan.repair.verdict import BEYOND, DIVERGES_LATER, last_bad_step

WIDTH, NARROWEST = 100, 40
LABEL_WIDTH = 8
MOST = {"inputs": 5, "evidence": 4, "remedies": 3, "diff": 12, "causes": 3, "notes": 4, "layers": 6, "features": 4}

Parts = Literal["whole", "first", "rest"]
"""What of a report to show: all of it, or only the part before the fixes, or the fixes and what follows."""
Rows = Iterable[tuple[str, RenderableType]]
"""Labels and what is shown beside them."""


def render_text(
    report: Report,
    *,
    width: int | None = None,
    color: bool = False,
    ascii: bool = False,
    encoding: str = "utf-8",
    saved: str = "",
    parts: Parts = "whole",
) -> str:
    """The report as one screen of text, in characters that `encoding` has; `saved` names the JSON file.

    Without `width` it is as wide as the terminal, at most 100 columns.
    """
    if width is None:
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 40)).columns)
    width = max(width, NARROWEST)
    page = _Page(report, Charset("ascii" if ascii else encoding), width)
    file = io.StringIO()
    console = Console(
        file=file,
        width=width,
        force_terminal=color,
        force_jupyter=False,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,  # brackets in the user's text are no markup
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ={},  # the arguments count, not FORCE_COLOR or COLUMNS
    )
    console.print(page.built(saved, parts), crop=False)  # a diff line may be wider: it is copied as a whole
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def print_text(report: Report, stream: TextIO, *, saved: str = "", parts: Parts = "whole") -> None:
    """Writes the report to `stream`: in color to a terminal, in ASCII if the encoding has nothing else."""
    tty = stream.isatty()
    width = WIDTH
    if tty:
        with contextlib.suppress(OSError, ValueError):  # a terminal without a size, as in some log viewers
            width = min(width, os.get_terminal_size(stream.fileno()).columns or width)
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(render_text(report, width=width, color=color, encoding=encoding, saved=saved, parts=parts))
    stream.flush()


def nonfinite_error(report: Report) -> NonFiniteError:
    """The error to raise for a report, with the report as its text; one line for a value checked outside any step."""
    if report.origin is None and report.step is None and report.events:
        return NonFiniteError(report, f"firstnan: {report.events[0].message}")
    try:
        text = render_text(report, width=WIDTH).rstrip()
    except Exception:  # the error matters more than its text: without one it shows the headline
        text = ""
    return NonFiniteError(report, text)


class _Page:
    """Builds the sections of one report for one width and one set of characters."""

    def __init__(self, report: Report, chars: Charset, width: int) -> None:
        self.report, self.chars, self.width = report, chars, width

    def built(self, saved: str, parts: Parts) -> RenderableType:
        report = self.report
        if report.verdict == "clean":
            return Group(self._headline(saved), *self._tables(self._notes()))
        shown: list[RenderableType] = []
        if parts != "rest":
            shown.append(self._headline())
            if report.origin and (source := source_lines(report.origin, self.chars, self.width)):
                shown += [Text(), *source]
                shown += read_lines(report.origin, self.chars, self.width)
        first, rest = (self._cause(), self._numbers()), (self._remedies(), self._footer(saved))
        for section in first if parts == "first" else rest if parts == "rest" else (*first, *rest):
            if rows := list(section):
                shown += [Text(), *self._tables(rows)]
        return Group(*shown)

    def _tables(self, rows: Rows) -> list[RenderableType]:
        """Labels on the left, text on the right that wraps below itself, unless it says that it must not wrap."""
        shown: list[RenderableType] = []
        last = ""
        for wraps, part in itertools.groupby(rows, lambda row: not (isinstance(row[1], Text) and row[1].no_wrap)):
            if not wraps:
                shown += [_unwrapped(Text(" " * (LABEL_WIDTH + 2)), body) for _, body in part if isinstance(body, Text)]
                continue
            grid = Table.grid(padding=(0, 2, 0, 0))
            grid.add_column(width=LABEL_WIDTH, no_wrap=True, style="bold cyan")
            grid.add_column(overflow="fold")
            for label, body in part:
                grid.add_row(label if label != last else "", body)
                last = label
            shown.append(grid)
        return shown

    def _text(self, text: str, style: str = "") -> Text:
        return Text(self.chars.prose(text), style=style)

    def _headline(self, saved: str = "") -> Table:
        tone = "bold green" if self.report.verdict == "clean" else "bold red"
        tail = f"  ({self.chars.prose(saved)})" if saved else ""
        text = Text.assemble((self.chars.prose(headline(self.report)), tone), tail)
        grid = self._hanging("firstnan:", text, "bold")
        if batch := batch_line(self.report):
            grid.add_row("", self._text(batch, "bold"))
        return grid

    def _cause(self) -> Rows:
        report = self.report
        if cause := report.cause:
            sure = "cause" if cause.confidence >= 0.4 else "maybe"
            title = (self.chars.prose(cause.title) + "  ", "bold") if cause.title else ("", "")
            yield sure, Text.assemble(title, (f"[{self.chars.prose(cause.slug)}]", "yellow"))
            if cause.why:
                yield sure, self._text(cause.why)
            for line in evidence_lines(self.report)[: MOST["evidence"]]:
                yield sure, self._hanging(self.chars.bullet, self._text(line))
        elif report.origin:
            yield "cause", Text("no known cause fits", style="yellow")

    def _numbers(self) -> Rows:
        """What the operator read and wrote, the path from there, and how the numbers grew."""
        report = self.report
        if origin := report.origin:
            yield from self._values(origin)
        yield from self._samples()
        if path := path_line(report):
            yield "path", self._text(path)
        if rows := history_rows(report):
            yield "history", self._text(history_head(report))
            for name, values, growth in rows:
                spark = sparkline(values, self.chars.spark)
                yield "history", Text.assemble(f"{name:<12}", (spark, "magenta"), f"  {growth}")
        yield from self._layers()

    def _samples(self) -> Rows:
        """What is unusual in the bad samples, and what the search for them could not show."""
        batch = self.report.batch
        if batch is None:
            return
        label = f"{batch.unit}s"
        for feature in batch.features[: MOST["features"]]:
            yield label, self._text(feature_line(feature, batch.unit))
        if (left_out := len(batch.features) - MOST["features"]) > 0:
            yield label, Text(f"and {count(left_out, 'more value')} in the JSON", style="dim")
        if batch.note:
            yield label, self._text(batch.note)

    def _layers(self) -> Rows:
        """The first bad layer, and the layers that grew."""
        if first := first_bad_layer(self.report):
            yield "layers", self._text(first)
        tracks = [t for t in self.report.history.layers if t.max_abs][: MOST["layers"]]
        names = [self._path_end(t.layer) for t in tracks]
        widest = max(map(cell_len, names), default=0)
        most = min(max(self.width - LABEL_WIDTH - widest - 42, 8), 40)  # what the phase and three numbers leave free
        for name, track in zip(names, tracks, strict=True):
            values = track.max_abs[-most:]
            head = f"{name}{' ' * (widest - cell_len(name))}  {track.phase:<8}  "
            spark = sparkline(values, self.chars.spark)
            yield "layers", Text.assemble(head, (spark, "magenta"), f"  {growth(values)}")

    def _path_end(self, path: str, most: int = 28) -> str:
        """A layer's path, cut at the start: its end says more."""
        shown = self.chars.show(path)
        return shown if len(shown) <= most else self.chars.ellipsis + shown[len(self.chars.ellipsis) - most :]

    def _hanging(self, mark: str, text: Text, style: str = "") -> Table:
        """A text whose wrapped lines stay right of its mark."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style=style)
        grid.add_column(overflow="fold")
        grid.add_row(mark, text)
        return grid

    def _values(self, origin: Origin) -> Rows:
        """What the operator read and wrote, one line per tensor."""
        worst_first = sorted(range(len(origin.inputs)), key=lambda i: -origin.inputs[i].bad)
        kept = sorted(worst_first[: MOST["inputs"]])
        tensors = [("", origin.inputs[i]) for i in kept]
        if origin.produced and origin.inputs != (origin.produced,):  # a tensor from outside was read, not produced
            tensors.append(("-> " if origin.inputs else "", origin.produced))
        rows = [[arrow + stat.name, str(list(stat.shape)), short_dtype(stat.dtype)] for arrow, stat in tensors]
        rows = [[self.chars.cut(self.chars.show(cell), 160) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        for i, (row, (_, stat)) in enumerate(zip(rows, tensors, strict=True)):
            made = len(rows) > len(kept) and i == len(rows) - 1
            head = "  ".join(cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
            facts = [self.chars.show(fact) for fact in tensor_facts(stat)]
            room = self.width - LABEL_WIDTH - 2
            while len(facts) > 1 and cell_len(f"{head}  {'   '.join(facts)}") > room:
                facts.pop()  # the last one matters least
            yield "values", Text(f"{head}  {self.chars.cut('   '.join(facts), 160)}", style="red" if made else "")
        if left_out := len(origin.inputs) - len(kept):
            yield "values", Text(f"and {count(left_out, 'more input')}", style="dim")
        if line := extra_values(self.report):
            yield "values", self._text(line)
        if origin.event and origin.event.raised:
            yield "raised", self._text(origin.event.raised)

    def _remedies(self) -> Rows:
        """What to change: in full what is proven to help, otherwise what might."""
        remedies = self.report.remedies
        helps = bool(remedies) and remedies[0].proven
        for i, remedy in enumerate(remedies[: MOST["remedies"]]):
            label = "fix" if len(remedies) == 1 else f"fix {i + 1}"
            result = remedy_result(remedy, self.report)
            tone = "green" if remedy.proven else "yellow"
            holds = helps or remedy.fails_in or remedy.note.startswith(DIVERGES_LATER)  # until another reason
            in_full = remedy.diff and (i == 0 if holds else not remedy.tried)
            title = (self.chars.prose(remedy.title), "bold")
            if not in_full:
                yield label, Text.assemble(title, "  (", (self.chars.prose(result), tone), ")")
                continue
            yield label, Text.assemble(title, f": {self.chars.prose(remedy.why)}" if remedy.why else "")
            yield label, self._text(result, tone)
            yield from ((label, line) for line in self._diff(remedy))
        if len(remedies) > MOST["remedies"]:
            yield "", Text(f"and {len(remedies) - MOST['remedies']} more in the JSON", style="dim")
        if self.report.other_causes:
            causes = self.report.other_causes[: MOST["causes"]]
            yield "or maybe", self._text("; ".join(f"{c.title} [{c.slug}]" for c in causes), "dim")

    def _diff(self, remedy: Remedy) -> Iterable[RenderableType]:
        lines = shown(remedy.diff)
        for mark, line in lines[: MOST["diff"]]:
            text = self.chars.cut(self.chars.show(line.expandtabs(TAB)), LONGEST_LINE)
            style = {"+": "green", "-": "red", " ": ""}.get(mark, "dim")
            yield _unwrapped(Text(f"{mark} {text}", style=style)) if mark else Text(text, style=style)
        if len(lines) > MOST["diff"]:
            yield Text(f"and {count(len(lines) - MOST['diff'], 'more line')}", style="dim")

    def _ranks(self) -> Rows:
        if self.report.ranks:
            yield "ranks", self._text(ranks_line(self.report.ranks, self.report.world_size))

    def _footer(self, saved: str) -> Rows:
        yield from self._ranks()
        if replay := replay_line(self.report):
            yield "replay", self._text(replay)
        yield from self._notes()
        if self.report.cause and self.report.cause.slug in catalogue():
            yield "more", Text(f"firstnan causes {self.report.cause.slug}")
        if self.report.capsule:
            yield "capsule", self._text(f"{self.report.capsule} (restored by firstnan replay)")
        if saved:
            yield "json" if saved.endswith(".json") else "report", self._text(saved)
        if saved.endswith(".json") and self.report.remedies[:1] and self.report.remedies[0].proven:
            yield "", self._text(f"to apply the fix: firstnan fix {shlex.quote(short_path(saved))} --apply", "dim")

    def _notes(self) -> Rows:
        notes = self.report.notes
        for note in notes[: MOST["notes"]]:
            yield "note", self._text(note)
        if len(notes) > MOST["notes"]:
            yield "note", Text(f"and {len(notes) - MOST['notes']} more in the JSON", style="dim")


def evidence_lines(report: Report) -> list[str]:
    """The evidence of the cause without the lines that the table of values repeats."""
    read = report.origin.inputs if report.origin else ()
    repeated = tuple(f"{stat.name} {list(stat.shape)} " for stat in read if stat.name)
    lines = report.cause.evidence if report.cause else ()
    return [line for line in lines if not (repeated and line.startswith(repeated))]


def extra_values(report: Report) -> str:
    """The values at the first bad element, unless the evidence has them, and the operator's other arguments."""
    origin, evidence = report.origin, report.cause.evidence if report.cause else ()
    if origin is None:
        return ""
    witness = witness_line(origin)
    return ", ".join(part for part in ("" if witness in evidence else witness, scalars_line(origin)) if part)


GROWTH = frozenset(
    ("divergence_lr", "exploding_gradient", "overflow", "exp_overflow", "low_precision_overflow", "optimizer_overflow")
)
"""Causes that the steps before help to explain."""
DRAWN = 40
"""The most steps that a history shows."""


def history_head(report: Report, drawn: int = DRAWN) -> str:
    """`steps 0 to 11, SGD, lr 10, momentum 0.9`, of the steps that are drawn."""
    history, steps = report.history, report.history.steps[-drawn:]
    first, last, points = steps[0].step, steps[-1].step, len(steps)
    # Several optimizers count their own steps, so there may be more updates than steps.
    updates = f"{points} updates in " if points > last - first + 1 else ""
    words = [f"{updates}steps {first} to {last}", history.optimizer]
    words += [
        f"{name} {argument(value)}" for name, value in history.settings[:4] if value is not None and value is not False
    ]
    return ", ".join(w for w in words if w)


def history_rows(report: Report) -> list[tuple[str, list[float], str]]:
    """(name, values, `first -> last`) of what grew in the steps before, if the cause is one of growth."""
    steps = report.history.steps[-DRAWN:]
    if len(steps) < 3 or report.cause is None or report.cause.slug not in GROWTH:
        return []
    rows = []
    for name, key in (("loss", "loss"), ("grad norm", "grad_norm"), ("param norm", "param_norm"), ("lr", "lr")):
        values = [v for v in (getattr(step, key) for step in steps) if v is not None]
        if len(values) >= 3 and _grew(values):
            rows.append((name, values, growth(values)))
    return rows


def first_bad_layer(report: Report) -> str:
    """The first layer that read or wrote a non-finite value in the failing step, if layers were watched."""
    events = [e for e in report.events if e.kind == "nonfinite" and e.layer and e.what in ("input", "output")]
    return next((f"first bad: {_layer_event(e)}" for e in events if e.step == report.step), "")


def _layer_event(event: NaNEvent) -> str:
    """`encoder.1 (Linear), output[0], NaN 3 of 512, first at [0, 2]`."""
    stat = event.tensor
    inside = stat.name if stat and stat.name.startswith(("[", ".")) else ""
    of_gradient = "gradient of its " if event.phase == "backward" else ""
    words = [event.layer + (f" ({event.layer_type})" if event.layer_type else "")]
    words += [f"call {event.call}"] if event.call else []
    words += [f"{of_gradient}{event.what}{inside}", bad_elements(stat) if stat and stat.bad else kind(stat)]
    return ", ".join(words)


def _grew(values: Sequence[float]) -> bool:
    """Whether there is a change worth drawing: at least twofold."""
    sizes = [abs(v) for v in values if math.isfinite(v)]
    return bool(sizes) and max(sizes) >= 2 * min(sizes) > 0


def growth(values: Sequence[float]) -> str:
    """The first, the last finite and the last value, each once."""
    finite = [v for v in values if math.isfinite(v)]
    marks = [*finite[:1], *finite[1:][-1:]] + ([] if math.isfinite(values[-1]) else [values[-1]])
    return " -> ".join(number(v) for v in marks)


def sparkline(values: Sequence[float], levels: str) -> str:
    """One character per value, from the lowest to the highest of `levels`; logarithmic if they span decades."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 100:
        values = [math.log10(v) if math.isfinite(v) else v for v in values]
        finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # Halved first: the distance between two huge numbers of opposite sign can exceed the range of float.
    span = high / 2 - low / 2
    marks = []
    for v in values:
        share = (v / 2 - low / 2) / span if span > 0 and math.isfinite(v) else 0.0
        marks.append(levels[min(int(share * len(levels)), len(levels) - 1)] if math.isfinite(v) else "!")
    return "".join(marks)


_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_RESULTS = ("result", "output", "out")


def short_dtype(name: str) -> str:
    """`f32` for `torch.float32`."""
    name = name.removeprefix("torch.")
    letters = name.rstrip("0123456789")
    return _DTYPES.get(letters, letters) + name[len(letters) :] if len(letters) < len(name) else name


def tensor_facts(stat: TensorStat) -> list[str]:
    """What is known about the values of a tensor, the most important first."""
    spread = _spread(stat)
    if stat.bad:
        return [bad_elements(stat), *([f"the rest {spread}"] if spread else [])]
    if not stat.numel:
        return ["no elements"]
    facts = [spread] if spread else []
    if (stat.zeros or stat.negative) and stat.min != stat.max:
        facts.append(f"zeros {stat.zeros}  negative {stat.negative}")
    if stat.smallest and stat.smallest < 1e-6:
        facts.append(f"smallest {number(stat.smallest)}")
    if stat.binary and stat.min != stat.max:
        facts.append("only 0 and 1")
    return facts


def _spread(stat: TensorStat) -> str:
    if stat.min is None or stat.max is None:
        return ""
    if stat.min == stat.max:
        return number(stat.min) if stat.numel - stat.bad == 1 else f"all {number(stat.min)}"
    return f"{number(stat.min)} … {number(stat.max)}"


def bad_elements(stat: TensorStat) -> str:
    """`NaN 3, Inf 1 of 512, first at [0, 2]`."""
    if stat.numel == 1:
        return kind(stat)
    kinds = [f"{name} {n}" for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    first = f", first at {list(stat.first_index)}" if stat.first_index and stat.bad < stat.numel else ""
    if stat.bad == stat.numel and len(kinds) == 1:
        return f"{kind(stat)}, all {stat.numel}"
    return f"{', '.join(kinds)} of {stat.numel}{first}"


def witness_line(origin: Origin) -> str:
    """The values at the first bad element: `at [6, 3]: self = -0.499 -> nan`."""
    pairs = list(origin.event.witness[:8]) if origin.event else []
    if not pairs:
        return ""
    produced = origin.produced
    results = (*_RESULTS, produced.name) if produced else _RESULTS
    result = f" -> {number(pairs.pop()[1])}" if pairs[-1][0] in results else ""
    index = (origin.event.witness_index if origin.event else None) or (produced.first_index if produced else None)
    at = f"at {list(index)}: " if index else ""
    read = ", ".join(f"{name} = {number(value)}" for name, value in pairs)
    return f"{at}{read}{result}"


def scalars_line(origin: Origin) -> str:
    """The operator's arguments other than tensors: `with dim = -1, eps = 1e-05`."""
    pairs = [(n, v) for n, v in origin.event.scalars if v is not None][:6] if origin.event else []
    return "with " + ", ".join(f"{name} = {argument(value)}" for name, value in pairs) if pairs else ""


def argument(value: Any) -> str:
    """The value of an argument, the same for a new report and for a loaded one."""
    value = encode(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ", ".join(argument(v) for v in value[:8]) + (", …]" if len(value) > 8 else "]")
    return str(value)[:60]


# --- source: the excerpt around the origin, and diffs ------------------------------------------------------------

TAB = 4

Cells = list[tuple[str, bool]]
"""What a source line shows: one screen column or wide character per entry, and whether it is marked."""


def source_lines(origin: Origin, chars: Charset, width: int) -> list[Text]:
    """Where the value was created, the statement there, and the guilty expression underlined."""
    if origin.site is None:
        return []
    where = location(origin.site, origin.library_site)
    return _shown_source(excerpt(origin.site), where, at_expression(origin), chars, width)


def read_lines(origin: Origin, chars: Charset, width: int) -> list[Text]:
    """For a value created before the step: the statement in which the step reads it first."""
    site = origin.read_at
    if site is None or site == origin.site:
        return []
    return _shown_source(
        [row for row in excerpt(site) if row.mark], location(site, None), "read here first", chars, width
    )


def _shown_source(rows: list[Row], where: str, remark: str, chars: Charset, width: int) -> list[Text]:
    gutter = max([len(str(row.number)) for row in rows if row.number is not None], default=1) + 2
    lines = [Text(" " * (gutter - 1) + "--> " + chars.prose(where, width - 12), style="dim")]
    room = max(width - gutter - 3, 20)
    rows_of_cells = _dedented([_cells(row, chars) for row in rows])
    final = max((i for i, row in enumerate(rows) if row.mark), default=-1)
    for i, (row, cells) in enumerate(zip(rows, rows_of_cells, strict=True)):
        name = chars.ellipsis if row.number is None else str(row.number)
        code, carets = _cropped(cells, room, chars)
        lines.append(_line(name.rjust(gutter), code, "bold" if row.mark else "", chars))
        if row.mark:
            said = chars.prose(remark) if i == final else ""
            lines += [_line(" " * gutter, text, "bold red", chars) for text in _underline(carets, said, room)]
    return lines


def location(site: Site, library: Site | None = None) -> str:
    """`train.py:22, in contrastive_loss`, and the place inside a library."""
    where = place(site)
    if site.function and not site.function.startswith("<"):
        where += f", in {site.function}"
    if library:
        where += f", inside {place(library)}" + (f" ({library.function})" if library.function else "")
    return where


def _line(name: str, code: str, style: str, chars: Charset) -> Text:
    return _unwrapped(Text(f"{name} {chars.bar} ", style="dim"), Text(code, style=style))


def _unwrapped(*parts: Text) -> Text:
    """The parts on one line, however long it is."""
    line = Text.assemble(*parts)
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _underline(carets: str, remark: str, room: int) -> list[str]:
    """The carets with the remark after them, or below them where it does not fit."""
    if cell_len(carets) + 1 + cell_len(remark) <= room:
        return [f"{carets} {remark}"]
    indent = " " * min(len(carets) - len(carets.lstrip()), max(room - cell_len(remark), 0))
    return [carets, indent + remark] if remark else [carets]


def _cells(row: Row, chars: Charset) -> Cells:
    """The line as it will be seen: tabs expanded, unprintable characters escaped."""
    start, end = row.mark or (0, 0)
    cells: Cells = []
    column = 0
    for i, char in enumerate(row.text.rstrip()[:4000]):
        shown = " " * (TAB - column % TAB) if char == "\t" else chars.show(char)
        pieces = [shown] if len(shown) == 1 else list(shown)
        cells += [(piece, start <= i < end) for piece in pieces]
        column += cell_len(shown)
    return cells


def _cropped(cells: Cells, room: int, chars: Charset) -> tuple[str, str]:
    """The line and its underline, cut to `room` columns around what is marked."""
    first = next((i for i, (_, marked) in enumerate(cells) if marked), 0)
    after = max((i for i, (_, marked) in enumerate(cells) if marked), default=0) + 1
    dots: Cells = [(c, False) for c in chars.ellipsis]
    if _columns(cells) > room:
        space = room - 2 * len(dots)
        if _columns(cells[:after]) > space and first > 8:
            cells = dots + cells[first - 8 :]
        if _columns(cells) > room:
            while _columns(cells) > room - len(dots):
                cells = cells[: -max(1, (_columns(cells) - room + len(dots)) // 2)]
            cells = cells + dots
    code = "".join(piece for piece, _ in cells)
    carets = "".join(("^" if marked else " ") * cell_len(piece) for piece, marked in cells)
    return code, carets.rstrip()


def _columns(cells: Cells) -> int:
    return sum(cell_len(piece) for piece, _ in cells)


def _dedented(rows: list[Cells]) -> list[Cells]:
    """The rows without the indentation that all of them share."""
    indents = [next((i for i, (piece, _) in enumerate(row) if piece != " "), None) for row in rows]
    least = min((i for i in indents if i is not None), default=0)
    return [row[least:] for row in rows]


BEFORE, AFTER = 2, 1
LONGEST_FILE = 4_000_000
MOST_STATEMENT_LINES = 7
MOST_MARKED_LINES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line to show; `mark` is the guilty part as (start, end) characters. No number: lines are left out here."""

    number: int | None
    text: str = ""
    mark: tuple[int, int] | None = None


def excerpt(site: Site) -> list[Row]:
    """The statement at `site` with a few lines around it, as far as they are known."""
    file = _file_lines(site.file)
    statement, recorded = _statement(site, file)
    if not statement:
        return []
    last = min(max(site.end_line or site.line, site.line), max(statement))
    rows = [Row(n, text, _mark(site, n, last, text, recorded)) for n, text in sorted(statement.items())]
    return _context(rows, file, before=True) + _shortened(rows) + _context(rows, file, before=False)


def _file_lines(path: str) -> list[str]:
    """The lines of a source file or of a notebook's cell; none if it is missing, too large or not text."""
    if cell := cell_source(path):
        return cell.split("\n")
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > LONGEST_FILE:
            return []
        with tokenize.open(path) as file:
            return file.read().split("\n")
    except (OSError, SyntaxError, ValueError):
        return []


def _statement(site: Site, file: list[str]) -> tuple[dict[int, str], bool]:
    """Line number -> text of the statement, and whether that is the recorded text, which the columns refer to.

    The record of a very long statement may end before the guilty line. Then the file's line is shown instead, or the
    bare expression.
    """
    start = site.source_line if site.source_line is not None else site.line
    if start <= site.line < start + len(site.source):
        return {start + i: line.rstrip("\r\n") for i, line in enumerate(site.source)}, True
    code = site.code.split("\n")
    if not site.code.strip():
        return {}, False
    end = site.line + len(code) - 1
    if site.line >= 1 and end <= len(file) and code[0].strip() in file[site.line - 1]:
        return {n: file[n - 1] for n in range(site.line, end + 1)}, False
    return {site.line + i: line for i, line in enumerate(code)}, False


def _mark(site: Site, number: int, last: int, text: str, recorded: bool) -> tuple[int, int] | None:
    """The part of line `number` that belongs to the expression; the whole line if the columns do not fit."""
    if not site.line <= number <= last:
        return None
    indent, end = len(text) - len(text.lstrip()), len(text.rstrip())
    whole = (indent, end) if indent < end else None
    if site.column is None or site.end_column is None or not recorded:
        at = text.find(site.code) if site.code and site.line == last else -1
        return (at, at + len(site.code)) if at >= 0 else whole
    first = max(site.column, 0) if number == site.line else indent
    after = min(site.end_column, len(text)) if number == last and last == (site.end_line or site.line) else end
    return (first, after) if first < after else whole


def _context(rows: list[Row], file: list[str], *, before: bool) -> list[Row]:
    """Lines of the file next to the statement, if the file still has that statement there."""
    first, last = rows[0].number or 0, rows[-1].number or 0
    if first < 1 or [r.text.rstrip() for r in rows] != [line.rstrip() for line in file[first - 1 : last]]:
        return []
    numbers = range(max(1, first - BEFORE), first) if before else range(last + 1, min(len(file), last + AFTER) + 1)
    found = [Row(n, file[n - 1]) for n in numbers]
    while found and not found[0].text.strip():
        found.pop(0)
    while found and not found[-1].text.strip():
        found.pop()
    return found


def _shortened(rows: list[Row]) -> list[Row]:
    """A few rows: the statement's first line and the marked lines, with gaps for the rest."""
    marked = [i for i, row in enumerate(rows) if row.mark]
    hidden: set[int] = set()
    if len(marked) > MOST_MARKED_LINES:
        hidden.update(marked[2:-1])
    if len(rows) - len(hidden) > MOST_STATEMENT_LINES:
        near = {i + d for i in marked for d in (-1, 0, 1)} or set(range(MOST_STATEMENT_LINES - 1))
        hidden.update(i for i in range(1, len(rows)) if i not in near)
    shown: list[Row] = []
    for i, row in enumerate(rows):
        if i not in hidden:
            shown.append(row)
        elif shown and shown[-1].number is not None:
            shown.append(Row(None))
    return shown


AROUND = 1
"""Lines shown before and after a change."""
LONGEST_LINE = 2000
"""The most characters of a changed line: longer ones are in the JSON."""
_LONGEST = 100_000


def shown(diff: str) -> list[tuple[str, str]]:
    """The lines of a diff with their marks (`+`, `-` or a blank); above each change its place, without a mark."""
    path, number, out = "", 0, list[tuple[str, str]]()
    hunk: list[str] = []
    for line in [*diff[:_LONGEST].strip("\n").split("\n"), "@@"]:
        if line.startswith(("--- ", "+++ ", "@@")):
            out += _block(path, number, hunk)
            hunk = []
            if line.startswith("--- "):
                path, number = line[4:].split("\t")[0].strip().removeprefix("a/"), 0
            elif found := re.match(r"@@ -\d{1,9}(?:,\d+)? \+(\d{1,9})", line):
                number = int(found[1])
        elif not line.startswith("\\"):
            hunk.append(line.rstrip("\r")[: LONGEST_LINE + 1])
    return out


def _block(path: str, number: int, hunk: list[str]) -> list[tuple[str, str]]:
    """One change: its place, then its lines without their shared indentation."""
    changes = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
    if not changes:
        return []
    place = [("", line_of(path, number + changes[0]) if number else short_path(path))] if path else []
    first, last = max(changes[0] - AROUND, 0), changes[-1] + AROUND
    # An empty line around a change says nothing.
    lines = [x for i, x in enumerate(hunk[: last + 1]) if i >= first and (x.strip() or changes[0] <= i <= changes[-1])]
    marks = [line[:1] or " " for line in lines]
    texts = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
    return place + list(zip(marks, texts, strict=True))


# --- sentences and characters ------------------------------------------------------------------------------------


def batch_line(report: Report) -> str:
    """The batch, its bad samples, and the rank, as far as they are known."""
    parts = [_batch(report.batch)] if report.batch else []
    if loops := loop_words(report):
        parts.append(loops)
    if report.world_size > 1:
        parts.append(f"rank {report.rank} of {report.world_size}")
    return ", ".join(p for p in parts if p)


def loop_words(report: Report) -> str:
    """`epoch = 3, i = 17`: how far the program's loops were, unless one of them counts as the steps are counted."""
    values = {turn.value for turn in report.loops}
    if report.step in values and not report.history.others:
        return ""
    return ", ".join(f"{turn.variable} = {turn.value}" for turn in report.loops[-3:] if turn.variable != "_")


def _batch(batch: Batch) -> str:
    words = [] if batch.index is None else [f"batch {batch.index}"]
    size = "" if batch.size is None else f" of {batch.size}"
    if batch.bad_samples:
        few = _few(batch.bad_samples)
        noun = batch.unit if len(batch.bad_samples) == 1 else f"{batch.unit}s"
        many = f"{len(batch.bad_samples)}{size} {noun}: " if len(batch.bad_samples) > 8 else ""
        words.append(many + few if many else f"{noun} {few}{size}")
        if batch.elements:
            words.append(_elements(batch.elements))
        elif batch.dataset_indices:
            index = "index" if len(batch.dataset_indices) == 1 else "indices"
            words.append(f"dataset {index} {_few(batch.dataset_indices)}")
        if batch.confirmed:
            words.append(f"confirmed by {count(batch.replays, 'replay')}")
    elif batch.size is not None:
        # Only how many there are: none of them is known to be bad.
        size = count(batch.size, batch.unit)
        words = [f"{words[0]} with {size}" if words else f"batch of {size}"]
    return ", ".join(words)


def _elements(elements: tuple[Element, ...]) -> str:
    """`dataset index 77 of Tiles`; of several datasets, each with its indices."""
    places = dict.fromkeys((e.dataset, e.part) for e in elements)
    words = []
    for name, part in list(places)[:3]:
        found = tuple(e.index for e in elements if (e.dataset, e.part) == (name, part))
        index = "index" if len(found) == 1 else "indices"
        words.append(f"dataset {index} {_few(found)} of {name}" + (f" ({part})" if part else ""))
    return ", ".join(words) + (", …" if len(places) > 3 else "")


_ON_RANKS = {
    "created": "created on {}",
    "received": "received from another by {}",
    "noticed": "noticed, with unknown origin, on {}",
    "transient": "only the first time, not when replayed, on {}",
    "unknown": "nothing is known of {}",
}


def ranks_line(ranks: Sequence[RankFinding], size: int) -> str:
    """`created on rank 1; received from another by ranks 0, 2, 3`."""
    found = {what: tuple(one.rank for one in ranks if one.what == what) for what in _ON_RANKS}
    parts = [
        _ON_RANKS[what].format(f"rank{'s' if len(which) > 1 else ''} {_few(which)}")
        for what, which in found.items()
        if which
    ]
    return "; ".join(parts + ([f"{size - len(ranks)} more ranks are not listed"] if size > len(ranks) else []))


def _few(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def feature_line(feature: Feature, unit: str = "sample") -> str:
    """`sample 6: batch[0][3] = 0, other samples 0.25 … 2`; `unit` if they are not samples."""
    where = feature.member + ("" if not feature.index else str(list(feature.index)))
    what = f"{where} = {number(feature.value)}" + (" everywhere" if feature.index is None else "")
    spread = number(feature.low) + ("" if feature.low == feature.high else f" … {number(feature.high)}")
    return f"{unit} {feature.sample}: {what}, other {unit}s {spread}"


def at_expression(origin: Origin) -> str:
    """The remark beside the underlined expression: what it did."""
    node = origin.event.node if origin.event else None
    what = kind(origin.produced)
    match origin.phase:
        case "backward" if origin.event and origin.event.in_python_backward:
            return f"this produced {what}, in a custom backward"
        case "backward" if origin.edits_gradient:
            return f"{origin.op or 'this'} produced {what}, after backward and before the update"
        case "backward":
            return f"the derivative of this expression produced {what}" + (f" ({node})" if node else "")
        case "optimizer" if not (origin.op or origin.produced):
            return "its updates made the loss explode"
        case "optimizer":
            return f"the update produced {what}"
        case "input" if not origin.op and origin.read_at is None:
            return f"the non-finite {'buffer' if origin.role == 'buffer' else 'data'} enters the step here"
        case "parameter" if not origin.op:
            return f"{origin.label or 'this tensor'} already held {what} before this line ran"
        case _ if origin.event and origin.event.raised:
            return f"{origin.op or 'this'} raised an error"
        case _ if origin.library_site and origin.library_site.file.startswith("<"):
            return f"{origin.op or 'an operator'}, called inside, produced {what}"
        case _ if came_with_numbers(origin):
            return f"the numbers that {origin.op or 'this'} reads contain {what}"
        case _:
            return f"{origin.op or 'this'} produced {what}"


def path_line(report: Report) -> str:
    """The path from the origin to where the value was noticed, shortened in the middle."""
    origin, steps, before = report.origin, whole_path(report), ""
    home = origin.site.file if origin and origin.site else ""
    if report.verdict == "diverged":
        return ""
    words = [origin.label or "the non-finite value"] if origin and not origin.op else []
    phase = steps[0].phase if steps else ""
    keep_head, keep_tail = 3, 2
    for i, step in enumerate(steps):
        if len(steps) > keep_head + keep_tail + 1 and keep_head <= i < len(steps) - keep_tail:
            if i == keep_head:
                words.append(f"… {len(steps) - keep_head - keep_tail} more …")
            before = ""
            continue
        file = step.file or home
        if file == home and not cell_name(home):
            file = os.path.basename(home)
        where = line_of(file, step.line) if step.line is not None and file else ""
        turn = "backward of " if step.phase == "backward" and (step.phase != phase or not i) else ""
        words.append(f"{turn}{step.op}" + (f" ({where})" if where and where != before else ""))
        before, phase = where, step.phase
    if report.noticed:
        words.append(noticed(report.noticed))
    return " -> ".join(words)


def whole_path(report: Report) -> list[PathStep]:
    """The path, starting with the operator of the origin if there is one."""
    origin = report.origin
    if origin is None or not origin.op:
        return list(report.path)
    line, file = (origin.site.line, origin.site.file) if origin.site else (None, "")
    phase = "forward" if origin.edits_gradient else origin.phase
    return [PathStep(origin.op, line, file, phase=phase), *report.path]


def remedy_result(remedy: Remedy, report: Report) -> str:
    """The result of trying the remedy."""
    step = "the failing step" if report.step is None else f"step {report.step}"
    if not remedy.tried:
        in_notebook = any(cell_name(edit.file) for edit in remedy.edits)
        how = "; firstnan run script.py would try it" if remedy.diff and not in_notebook else ""
        return f"not tried: {remedy.note}" if remedy.note else f"not tried{how}"
    if remedy.failing_step_finite is None or report.verdict == "diverged":
        return f"tried: {remedy.note}" if remedy.note else "tried"
    if not remedy.failing_step_finite:
        return f"tried: {step} is still non-finite" + (f" ({remedy.note})" if remedy.note else "")
    if remedy.steps_finite_after is None:
        return f"tried: {step} is finite" + (f", but {remedy.note}" if remedy.note else "")
    after = remedy.steps_finite_after
    steps = {0: "", 1: ", and so is the step after it"}.get(after, f", and so are the {after} steps after it")
    end = f", to the end of the {remedy.up_to}" if remedy.up_to and after else ""
    beyond = f"{BEYOND} {last_bad_step(report) + after}" if after and not remedy.up_to else ""
    beyond = "" if BEYOND in remedy.note else beyond
    parts = (f"tried: {step} is finite{steps}{end}", remedy.note, beyond, _loss_change(remedy))
    return "; ".join(part for part in parts if part)


def _loss_change(remedy: Remedy) -> str:
    change = remedy.loss_change
    if change is None:
        return ""
    if change <= 1e-3:
        return "healthy losses unchanged" + (f" (largest relative change {change:.0e})" if change else "")
    return f"healthy losses change by up to {100 * change:.2g} %"


def replay_line(report: Report) -> str:
    """How the trace was made, and whether the replay reproduced the failure."""
    if report.verdict == "diverged":
        return ""
    every_time = " every time" if report.origin else ""
    result = {
        "deterministic": "the failure was reproduced",
        "similar": "it failed in the same place, but with other numbers than the failing step had",
        "transient": f"the failure was not reproduced{every_time}",
        "not_replayed": "" if report.replay else "the step was not replayed",
    }[report.reproduced]
    return "; ".join(part for part in (report.replay.rstrip(".; "), result) if part)


_GLYPHS = "…│•▁▂▃▄▅▆▇█"
_TO_ASCII = str.maketrans({"…": "...", "│": "|", "•": "*", "→": "->", "×": "x", "–": "-", "—": "-", "“": '"', "”": '"'})
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


class Charset:
    """Turns any text into text that is safe to print in `encoding`: it cannot move the cursor or change colors."""

    def __init__(self, encoding: str = "utf-8") -> None:
        try:
            _GLYPHS.encode(encoding)
        except UnicodeEncodeError:
            self.plain = True
        except LookupError:  # an encoding that Python does not know
            self.plain, encoding = True, "ascii"
        else:
            self.plain = False
        self._encoding = encoding
        self.bar = "|" if self.plain else "│"
        self.bullet = "*" if self.plain else "•"
        self.ellipsis = "..." if self.plain else "…"
        self.spark = "_.-:=+*#" if self.plain else "▁▂▃▄▅▆▇█"

    def show(self, text: str) -> str:
        """`text` with unprintable characters escaped."""
        if text.isascii() and text.isprintable():
            return text
        if self.plain:
            text = text.translate(_TO_ASCII)
        text = "".join(_escape(c) if _unsafe(c) else c for c in text)
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def prose(self, text: str, limit: int = 700) -> str:
        """`text` on one line, without runs of spaces, cut at `limit`."""
        return self.cut(self.show(" ".join(text[: 4 * limit].split())), limit)

    def cut(self, text: str, limit: int) -> str:
        return text if len(text) <= limit else text[: max(0, limit - len(self.ellipsis))].rstrip() + self.ellipsis


def _unsafe(char: str) -> bool:
    """Control characters (escape sequences too), lone surrogates, line separators, and marks that reorder text."""
    return char in _BIDI or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
