"""Report -> one screen of text, plain or colored, for someone who is tired and wants to know what to do."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from firstnan.diagnose.causes import catalogue
from firstnan.records import Cause, Origin, Remedy, Report
from firstnan.report import words
from firstnan.report.chars import Charset
from firstnan.report.diff import shown
from firstnan.report.excerpt import Row, excerpt

WIDTH, NARROWEST = 100, 40
LABEL_WIDTH = 8
TAB = 4
MOST = {"inputs": 5, "evidence": 4, "remedies": 3, "diff": 12, "causes": 3, "notes": 4, "layers": 6, "features": 4}

Cells = list[tuple[str, bool]]
"""What a source line shows, one screen column or wide character an entry, and whether it is marked."""


def render(
    report: Report,
    *,
    width: int | None = None,
    color: bool = False,
    ascii: bool = False,
    encoding: str = "utf-8",
    saved: str = "",
) -> str:
    """The report as text of at most `width` columns, in characters that `encoding` has; `saved` names the JSON."""
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
        markup=False,  # the user's own brackets stay what they are
        emoji=False,
        highlight=False,
        legacy_windows=False,
        _environ={},  # what was asked for counts, not FORCE_COLOR or COLUMNS
    )
    console.print(page.whole(saved))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


class _Page:
    """Builds the parts of one report for one width and one set of characters."""

    def __init__(self, report: Report, chars: Charset, width: int) -> None:
        self.report, self.chars, self.width = report, chars, width

    def whole(self, saved: str) -> RenderableType:
        report = self.report
        if report.verdict == "clean":
            return Group(self._headline(saved), self._facts(self._notes()))
        parts: list[RenderableType] = [self._headline()]
        if report.origin and (source := self._source(report.origin)):
            parts += [Text(), *source]
        for section in (self._cause(), self._numbers(), self._ways_out(), self._footer(saved)):
            if facts := list(section):
                parts += [Text(), self._facts(facts)]
        return Group(*parts)

    def _facts(self, rows: Iterable[tuple[str, RenderableType]]) -> Table:
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
        grid.add_row("firstnan:", Text.assemble((self.chars.prose(words.headline(self.report)), tone), tail))
        if batch := words.batch_line(self.report):
            grid.add_row("", self._text(batch, "bold"))
        return grid

    # --- the source ----------------------------------------------------------------------------------------------

    def _source(self, origin: Origin) -> list[Text]:
        """Where, the statement, and the guilty expression underlined."""
        if origin.site is None:
            return []
        rows = excerpt(origin.site)
        gutter = max([len(str(row.number)) for row in rows if row.number is not None], default=1) + 2
        lines = [Text(" " * (gutter - 1) + "--> " + self._whereabouts(origin), style="dim")]
        room = max(self.width - gutter - 3, 20)
        rows_of_cells = _dedented([self._cells(row) for row in rows])
        final = max((i for i, row in enumerate(rows) if row.mark), default=-1)
        for i, (row, cells) in enumerate(zip(rows, rows_of_cells, strict=True)):
            name = self.chars.ellipsis if row.number is None else str(row.number)
            code, carets = self._cropped(cells, room)
            tone = "bold" if row.mark else ""
            lines.append(self._source_line(name.rjust(gutter), code, tone))
            if row.mark:
                remark = self.chars.prose(words.at_expression(origin)) if i == final else ""
                lines += self._underline(carets, remark, gutter, room)
        return lines

    def _whereabouts(self, origin: Origin) -> str:
        site = origin.site
        library = words.library_site(origin)
        where = words.place(site) if site else ""
        if site and site.function and not site.function.startswith("<"):
            where += f", in {site.function}"
        if library:
            where += f", inside {words.place(library)}" + (f" ({library.function})" if library.function else "")
        return self.chars.prose(where, self.width - 12)

    def _source_line(self, name: str, code: str, tone: str) -> Text:
        line = Text.assemble((f"{name} {self.chars.bar} ", "dim"), (code, tone))
        line.no_wrap, line.overflow = True, "ignore"
        return line

    def _underline(self, carets: str, remark: str, gutter: int, room: int) -> list[Text]:
        if cell_len(carets) + 1 + cell_len(remark) <= room:
            return [self._source_line(" " * gutter, f"{carets} {remark}", "bold red")]
        indent = " " * min(len(carets) - len(carets.lstrip()), max(room - cell_len(remark), 0))
        below = [self._source_line(" " * gutter, carets, "bold red")]
        return below + ([self._source_line(" " * gutter, indent + remark, "bold red")] if remark else [])

    def _cells(self, row: Row) -> Cells:
        """The line as it will be seen: tabs opened, unprintable characters escaped."""
        start, end = row.mark or (0, 0)
        cells: Cells = []
        column = 0
        for i, char in enumerate(row.text.rstrip()[:4000]):
            shown = " " * (TAB - column % TAB) if char == "\t" else self.chars.show(char)
            pieces = [shown] if len(shown) == 1 else list(shown)
            cells += [(piece, start <= i < end) for piece in pieces]
            column += cell_len(shown)
        return cells

    def _cropped(self, cells: Cells, room: int) -> tuple[str, str]:
        """The line and its underline, cut to `room` columns around what is marked."""
        first = next((i for i, (_, marked) in enumerate(cells) if marked), 0)
        after = max((i for i, (_, marked) in enumerate(cells) if marked), default=0) + 1
        dots: Cells = [(c, False) for c in self.chars.ellipsis]
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

    # --- the story -----------------------------------------------------------------------------------------------

    def _cause(self) -> Iterable[tuple[str, RenderableType]]:
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

    def _numbers(self) -> Iterable[tuple[str, RenderableType]]:
        """What went in and out, the way it took, and how it grew."""
        report = self.report
        if origin := report.origin:
            yield from self._values(origin)
        yield from self._samples()
        if path := words.path_line(report):
            yield "path", self._text(path)
        if rows := words.history_rows(report):
            yield "history", self._text(words.history_head(report))
            for name, values, growth in rows:
                spark = words.sparkline(values, self.chars.spark)
                yield "history", Text.assemble(f"{name:<12}", (spark, "magenta"), f"  {growth}")
        yield from self._layers()

    def _samples(self) -> Iterable[tuple[str, RenderableType]]:
        """What is unusual in the bad samples, and what their search could not show."""
        batch = self.report.batch
        if batch is None:
            return
        for feature in batch.features[: MOST["features"]]:
            yield "samples", self._text(words.feature_line(feature))
        if (left_out := len(batch.features) - MOST["features"]) > 0:
            yield "samples", Text(f"and {words.count(left_out, 'value')} more in the JSON", style="dim")
        if batch.note:
            yield "samples", self._text(batch.note)

    def _layers(self) -> Iterable[tuple[str, RenderableType]]:
        """The first bad layer, and how those grew that grew."""
        if first := words.first_bad_layer(self.report):
            yield "layers", self._text(first)
        tracks = [t for t in self.report.history.layers if t.max_abs][: MOST["layers"]]
        names = [self._path_end(t.layer) for t in tracks]
        widest = max(map(cell_len, names), default=0)
        most = min(max(self.width - LABEL_WIDTH - widest - 42, 8), 40)  # what the phase and three numbers leave
        for name, track in zip(names, tracks, strict=True):
            values = track.max_abs[-most:]
            head = f"{name}{' ' * (widest - cell_len(name))}  {track.phase:<8}  "
            spark = words.sparkline(values, self.chars.spark)
            yield "layers", Text.assemble(head, (spark, "magenta"), f"  {words.growth(values)}")

    def _path_end(self, path: str, most: int = 28) -> str:
        """A layer's path, cut at its beginning: the end tells more."""
        shown = self.chars.show(path)
        return shown if len(shown) <= most else self.chars.ellipsis + shown[len(self.chars.ellipsis) - most :]

    def _evidence(self, cause: Cause) -> list[str]:
        """The evidence without the lines that the table of values tells again."""
        read = self.report.origin.inputs if self.report.origin else ()
        told = tuple(f"{stat.name} {list(stat.shape)} " for stat in read if stat.name)
        return [line for line in cause.evidence if not (told and line.startswith(told))]

    def _hanging(self, mark: str, text: Text, style: str = "") -> Table:
        """A text whose wrapped lines stay right of its mark."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(no_wrap=True, style=style)
        grid.add_column(overflow="fold")
        grid.add_row(mark, text)
        return grid

    def _values(self, origin: Origin) -> Iterable[tuple[str, RenderableType]]:
        """What the operator read and what it wrote, one line a tensor."""
        worst_first = sorted(range(len(origin.inputs)), key=lambda i: -origin.inputs[i].bad)
        kept = sorted(worst_first[: MOST["inputs"]])
        cells = [words.tensor_cells(origin.inputs[i]) for i in kept]
        if origin.produced and origin.inputs != (origin.produced,):  # what came from outside was read, not made
            cells.append(words.tensor_cells(origin.produced, "-> " if origin.inputs else ""))
        rows = [[self.chars.cut(self.chars.show(c), 160) for c in row] for row in cells]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)][:3]
        for i, row in enumerate(rows):
            made = len(rows) > len(kept) and i == len(rows) - 1
            padded = [c + " " * (w - cell_len(c)) for c, w in zip(row, widths, strict=False)]
            facts = row[3].split("   ")
            while len(facts) > 1 and cell_len("  ".join([*padded, "   ".join(facts)])) > self.width - LABEL_WIDTH - 2:
                facts.pop()  # the last ones matter least
            yield "values", Text("  ".join([*padded, "   ".join(facts)]), style="red" if made else "")
        if left_out := len(origin.inputs) - len(kept):
            yield "values", Text(f"and {words.count(left_out, 'input')} more", style="dim")
        told = self.report.cause.evidence if self.report.cause else ()
        witness = words.witness_line(origin)
        extra = ("" if witness in told else witness, words.scalars_line(origin))
        if line := ", ".join(part for part in extra if part):
            yield "values", self._text(line)
        if origin.event and origin.event.raised:
            yield "raised", self._text(origin.event.raised)

    def _ways_out(self) -> Iterable[tuple[str, RenderableType]]:
        """What can be changed: in full what is known to help, otherwise what might."""
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
            yield Text(f"and {words.count(len(lines) - MOST['diff'], 'line')} more", style="dim")

    def _footer(self, saved: str) -> Iterable[tuple[str, RenderableType]]:
        if replay := words.replay_line(self.report):
            yield "replay", self._text(replay)
        yield from self._notes()
        if self.report.cause and self.report.cause.slug in catalogue():
            yield "more", Text(f"firstnan causes {self.report.cause.slug}")
        if self.report.capsule:
            yield "capsule", self._text(f"{self.report.capsule} (firstnan replay lands in it)")
        if saved:
            yield "json", self._text(saved)
        if saved.endswith(".json") and self.report.remedies[:1] and self.report.remedies[0].proven:
            yield "", self._text(f"firstnan fix {words.short_path(saved)} --apply makes the change", "dim")

    def _notes(self) -> Iterable[tuple[str, RenderableType]]:
        notes = self.report.notes
        for note in notes[: MOST["notes"]]:
            yield "note", self._text(note)
        if len(notes) > MOST["notes"]:
            yield "note", Text(f"and {len(notes) - MOST['notes']} more in the JSON", style="dim")


def _columns(cells: Cells) -> int:
    return sum(cell_len(piece) for piece, _ in cells)


def _dedented(rows: list[Cells]) -> list[Cells]:
    """The rows without the indentation that all of them share."""
    indents = [next((i for i, (piece, _) in enumerate(row) if piece != " "), None) for row in rows]
    least = min((i for i in indents if i is not None), default=0)
    return [row[least:] for row in rows]
