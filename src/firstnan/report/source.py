"""The source lines of a report, with the guilty expression underlined."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text

from firstnan.records import Origin, Site
from firstnan.records.words import place
from firstnan.report.chars import Charset
from firstnan.report.excerpt import Row, excerpt
from firstnan.report.words import at_expression

TAB = 4

Cells = list[tuple[str, bool]]
"""What a source line shows: one screen column or wide character per entry, and whether it is marked."""


def source_lines(origin: Origin, chars: Charset, width: int) -> list[Text]:
    """Where the value was created, the statement there, and the guilty expression underlined."""
    if origin.site is None:
        return []
    rows = excerpt(origin.site)
    gutter = max([len(str(row.number)) for row in rows if row.number is not None], default=1) + 2
    where = chars.prose(_location(origin.site, origin.library_site), width - 12)
    lines = [Text(" " * (gutter - 1) + "--> " + where, style="dim")]
    room = max(width - gutter - 3, 20)
    rows_of_cells = _dedented([_cells(row, chars) for row in rows])
    final = max((i for i, row in enumerate(rows) if row.mark), default=-1)
    for i, (row, cells) in enumerate(zip(rows, rows_of_cells, strict=True)):
        name = chars.ellipsis if row.number is None else str(row.number)
        code, carets = _cropped(cells, room, chars)
        lines.append(_line(name.rjust(gutter), code, "bold" if row.mark else "", chars))
        if row.mark:
            remark = chars.prose(at_expression(origin)) if i == final else ""
            lines += [_line(" " * gutter, text, "bold red", chars) for text in _underline(carets, remark, room)]
    return lines


def _location(site: Site, library: Site | None) -> str:
    where = place(site)
    if site.function and not site.function.startswith("<"):
        where += f", in {site.function}"
    if library:
        where += f", inside {place(library)}" + (f" ({library.function})" if library.function else "")
    return where


def _line(name: str, code: str, style: str, chars: Charset) -> Text:
    line = Text.assemble((f"{name} {chars.bar} ", "dim"), (code, style))
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
