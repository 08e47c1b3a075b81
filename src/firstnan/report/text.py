"""The report as one screen of text, with its tensors and its history."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from firstnan.diagnose.causes import catalogue
from firstnan.records import NaNEvent, Origin, Remedy, Report, TensorStat
from firstnan.records.codec import encode
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import count, headline, kind, number, short_path
from firstnan.repair.verdict import DIVERGES
from firstnan.report.characters import Charset
from firstnan.report.sentences import batch_line, feature_line, path_line, ranks_line, remedy_result, replay_line
from firstnan.report.source_excerpt import LONGEST_LINE, TAB, read_lines, shown, source_lines, without_wrapping

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
        markup=False,  # brackets in the user's text are not markup
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ={},  # the arguments count, not FORCE_COLOR or COLUMNS
    )
    console.print(page.built(saved, parts), crop=False)  # a diff line may be wider: people copy it whole
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
                shown += [
                    without_wrapping(Text(" " * (LABEL_WIDTH + 2)), body) for _, body in part if isinstance(body, Text)
                ]
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
        names = [self.chars.path_end(t.layer, 28) for t in tracks]
        widest = max(map(cell_len, names), default=0)
        most = min(max(self.width - LABEL_WIDTH - widest - 42, 8), 40)  # what the phase and three numbers leave free
        for name, track in zip(names, tracks, strict=True):
            values = track.max_abs[-most:]
            head = f"{name}{' ' * (widest - cell_len(name))}  {track.phase:<8}  "
            spark = sparkline(values, self.chars.spark)
            yield "layers", Text.assemble(head, (spark, "magenta"), f"  {growth(values)}")

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
        explained = False
        for i, remedy in enumerate(remedies[: MOST["remedies"]]):
            label = "fix" if len(remedies) == 1 else f"fix {i + 1}"
            diverges = remedy.note.startswith(DIVERGES)
            once = replace(remedy, note=DIVERGES) if diverges and explained else remedy
            result, explained = remedy_result(once, self.report), explained or diverges
            tone = "green" if remedy.proven else "yellow"
            holds = helps or remedy.fails_in or diverges  # until another reason
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
            yield without_wrapping(Text(f"{mark} {text}", style=style)) if mark else Text(text, style=style)
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
    if any(line.endswith(witness) for line in evidence):
        witness = ""
    return ", ".join(part for part in (witness, scalars_line(origin)) if part)


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
