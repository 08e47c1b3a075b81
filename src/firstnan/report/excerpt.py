"""The source around a Site: which lines to show, and which part of each belongs to the guilty expression."""

from __future__ import annotations

import os
import tokenize
from dataclasses import dataclass

from firstnan.records import Site

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
    """The lines of a source file; none if it is missing, too large or not text."""
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
