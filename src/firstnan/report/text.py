"""A report as one screen of text, plain or colored."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterable
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from firstnan.diagnose.causes import catalogue
from firstnan.records import Cause, Origin, Remedy, Report
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import count, headline, short_path
from firstnan.report import history, words
from firstnan.report.chars import Charset
from firstnan.report.diff import shown
from firstnan.report.source import TAB, source_lines
from firstnan.report.tensors import scalars_line, short_dtype, tensor_facts, witness_line

WIDTH, NARROWEST = 100, 40
LABEL_WIDTH = 8
MOST = {"inputs": 5, "evidence": 4, "remedies": 3, "diff": 12, "causes": 3, "notes": 4, "layers": 6, "features": 4}

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
    console.print(page.whole(saved))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def print_text(report: Report, stream: TextIO, *, saved: str = "") -> None:
    """Writes the report to `stream`: in color to a terminal, in ASCII if the encoding has nothing else."""
    tty = stream.isatty()
    width = WIDTH
    if tty:
        with contextlib.suppress(OSError, ValueError):  # a terminal without a size, as in some log viewers
            width = min(width, os.get_terminal_size(stream.fileno()).columns or width)
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(render_text(report, width=width, color=color, encoding=encoding, saved=saved))
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

    def whole(self, saved: str) -> RenderableType:
        report = self.report
        if report.verdict == "clean":
            return Group(self._headline(saved), self._table(self._notes()))
        parts: list[RenderableType] = [self._headline()]
        if report.origin and (source := source_lines(report.origin, self.chars, self.width)):
            parts += [Text(), *source]
        for section in (self._cause(), self._numbers(), self._remedies(), self._footer(saved)):
            if rows := list(section):
                parts += [Text(), self._table(rows)]
        return Group(*parts)

    def _table(self, rows: Rows) -> Table:
        """Labels on the left, text on the right that wraps below itself."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=LABEL_WIDTH, no_wrap=True, style="bold cyan")
        grid.add_column(overflow="fold")
        last = ""
        for label, body in rows:
            grid.add_row(label if label != last else "", body)
            last = label
        return grid

    def _text(self, text: str, style: str = "") -> Text:
        return Text(self.chars.prose(text), style=style)

    def _headline(self, saved: str = "") -> Table:
        tone = "bold green" if self.report.verdict == "clean" else "bold red"
        tail = f"  ({self.chars.prose(saved)})" if saved else ""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style="bold")
        grid.add_column(overflow="fold")
        grid.add_row("firstnan:", Text.assemble((self.chars.prose(headline(self.report)), tone), tail))
        if batch := words.batch_line(self.report):
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
            for line in self._evidence(cause)[: MOST["evidence"]]:
                yield sure, self._hanging(self.chars.bullet, self._text(line))
        elif report.origin:
            yield "cause", Text("no known cause fits", style="yellow")

    def _numbers(self) -> Rows:
        """What the operator read and wrote, the path from there, and how the numbers grew."""
        report = self.report
        if origin := report.origin:
            yield from self._values(origin)
        yield from self._samples()
        if path := words.path_line(report):
            yield "path", self._text(path)
        if rows := history.history_rows(report):
            yield "history", self._text(history.history_head(report))
            for name, values, growth in rows:
                spark = history.sparkline(values, self.chars.spark)
                yield "history", Text.assemble(f"{name:<12}", (spark, "magenta"), f"  {growth}")
        yield from self._layers()

    def _samples(self) -> Rows:
        """What is unusual in the bad samples, and what the search for them could not show."""
        batch = self.report.batch
        if batch is None:
            return
        for feature in batch.features[: MOST["features"]]:
            yield "samples", self._text(words.feature_line(feature))
        if (left_out := len(batch.features) - MOST["features"]) > 0:
            yield "samples", Text(f"and {count(left_out, 'more value')} in the JSON", style="dim")
        if batch.note:
            yield "samples", self._text(batch.note)

    def _layers(self) -> Rows:
        """The first bad layer, and the layers that grew."""
        if first := history.first_bad_layer(self.report):
            yield "layers", self._text(first)
        tracks = [t for t in self.report.history.layers if t.max_abs][: MOST["layers"]]
        names = [self._path_end(t.layer) for t in tracks]
        widest = max(map(cell_len, names), default=0)
        most = min(max(self.width - LABEL_WIDTH - widest - 42, 8), 40)  # what the phase and three numbers leave free
        for name, track in zip(names, tracks, strict=True):
            values = track.max_abs[-most:]
            head = f"{name}{' ' * (widest - cell_len(name))}  {track.phase:<8}  "
            spark = history.sparkline(values, self.chars.spark)
            yield "layers", Text.assemble(head, (spark, "magenta"), f"  {history.growth(values)}")

    def _path_end(self, path: str, most: int = 28) -> str:
        """A layer's path, cut at the start: its end says more."""
        shown = self.chars.show(path)
        return shown if len(shown) <= most else self.chars.ellipsis + shown[len(self.chars.ellipsis) - most :]

    def _evidence(self, cause: Cause) -> list[str]:
        """The evidence without the lines that the table of values repeats."""
        read = self.report.origin.inputs if self.report.origin else ()
        repeated = tuple(f"{stat.name} {list(stat.shape)} " for stat in read if stat.name)
        return [line for line in cause.evidence if not (repeated and line.startswith(repeated))]

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
        evidence = self.report.cause.evidence if self.report.cause else ()
        witness = witness_line(origin)
        extra = ("" if witness in evidence else witness, scalars_line(origin))
        if line := ", ".join(part for part in extra if part):
            yield "values", self._text(line)
        if origin.event and origin.event.raised:
            yield "raised", self._text(origin.event.raised)

    def _remedies(self) -> Rows:
        """What to change: in full what is proven to help, otherwise what might."""
        remedies = self.report.remedies
        helps = bool(remedies) and remedies[0].proven
        for i, remedy in enumerate(remedies[: MOST["remedies"]]):
            label = "fix" if len(remedies) == 1 else f"fix {i + 1}"
            result = words.remedy_result(remedy, self.report)
            tone = "green" if remedy.proven else "yellow"
            in_full = remedy.diff and (i == 0 if helps else not remedy.tried)
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
            text = self.chars.cut(self.chars.show(line.expandtabs(TAB)), 400)
            style = {"+": "green", "-": "red", " ": ""}.get(mark, "dim")
            yield self._hanging(mark, Text(text, style=style), style) if mark else Text(text, style=style)
        if len(lines) > MOST["diff"]:
            yield Text(f"and {count(len(lines) - MOST['diff'], 'more line')}", style="dim")

    def _footer(self, saved: str) -> Rows:
        if replay := words.replay_line(self.report):
            yield "replay", self._text(replay)
        yield from self._notes()
        if self.report.cause and self.report.cause.slug in catalogue():
            yield "more", Text(f"firstnan causes {self.report.cause.slug}")
        if self.report.capsule:
            yield "capsule", self._text(f"{self.report.capsule} (restored by firstnan replay)")
        if saved:
            yield "json", self._text(saved)
        if saved.endswith(".json") and self.report.remedies[:1] and self.report.remedies[0].proven:
            yield "", self._text(f"to apply the fix: firstnan fix {short_path(saved)} --apply", "dim")

    def _notes(self) -> Rows:
        notes = self.report.notes
        for note in notes[: MOST["notes"]]:
            yield "note", self._text(note)
        if len(notes) > MOST["notes"]:
            yield "note", Text(f"and {len(notes) - MOST['notes']} more in the JSON", style="dim")
