"""Source in a report: the statement around the origin, and diffs."""

from __future__ import annotations

import os
import re
import textwrap
import tokenize
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from firstnan.records import Origin, Site
from firstnan.records.words import cell_source, line_of, place, short_path
from firstnan.report.characters import Charset
from firstnan.report.sentences import at_expression

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
    return without_wrapping(Text(f"{name} {chars.bar} ", style="dim"), Text(code, style=style))


def without_wrapping(*parts: Text) -> Text:
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
    indent = len(row.text) - len(row.text.lstrip())
    left_out = max(start - indent - LONGEST_LINE, 0)  # of a line that goes on for pages
    text = row.text[:indent] + row.text[indent + left_out :]
    start, end = start - left_out, end - left_out
    for i, char in enumerate(text.rstrip()[: 2 * LONGEST_LINE]):
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
"""The most characters of a changed line: of longer ones, only what is around the change is shown."""
_BESIDE_CHANGE = 60
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
            hunk.append(line.rstrip("\r"))
    return out


def _block(path: str, number: int, hunk: list[str]) -> list[tuple[str, str]]:
    """One change: its place, then its lines without their shared indentation."""
    changes = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
    if not changes:
        return []
    if max(len(hunk[i]) for i in changes) > LONGEST_LINE:
        for i, line in zip(changes, _around_change([hunk[i][1:] for i in changes]), strict=True):
            hunk[i] = hunk[i][0] + line
    hunk = [line[: LONGEST_LINE + 1] for line in hunk]
    place = [("", line_of(path, number + changes[0]) if number else short_path(path))] if path else []
    first, last = max(changes[0] - AROUND, 0), changes[-1] + AROUND
    # An empty line around a change says nothing.
    lines = [x for i, x in enumerate(hunk[: last + 1]) if i >= first and (x.strip() or changes[0] <= i <= changes[-1])]
    marks = [line[:1] or " " for line in lines]
    texts = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
    return place + list(zip(marks, texts, strict=True))


def shared_start(lines: list[str]) -> int:
    """How many characters all of them begin with."""
    return next((i for i, chars in enumerate(zip(*lines, strict=False)) if len(set(chars)) > 1), min(map(len, lines)))


def _around_change(lines: list[str]) -> list[str]:
    """The part of each line that they do not share, with a little of what they begin and end with."""
    start = shared_start(lines)
    end = shared_start([line[start:][::-1] for line in lines])
    before, after = max(start - _BESIDE_CHANGE, 0), max(end - _BESIDE_CHANGE, 0)
    return ["…" * bool(before) + line[before : len(line) - after] + "…" * bool(after) for line in lines]
