"""A report as people see it; needs no torch, so a saved report opens at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from firstnan.records import Report
from firstnan.records.codec import ReportError, dumps
from firstnan.records.files import write_whole
from firstnan.report.markdown import github_annotation, render_markdown
from firstnan.report.progress import Progress
from firstnan.report.text import WIDTH, nonfinite_error, print_text, render_text

__all__ = [
    "FORMATS",
    "Progress",
    "github_annotation",
    "listed_formats",
    "nonfinite_error",
    "print_text",
    "render_text",
    "write",
]


def _as_text(report: Report) -> str:
    return render_text(report, width=WIDTH)


def _as_html(report: Report, saved: str = "") -> str:
    from firstnan.report.page import render_html  # jinja2 takes longer to import than all else here

    return render_html(report, saved=saved)


FORMATS: dict[str, Callable[[Report], str]] = {
    ".json": dumps,
    ".txt": _as_text,
    ".html": _as_html,
    ".md": render_markdown,
}
"""What a report file may be, by its extension."""


def listed_formats() -> str:
    """`.json, .txt, .html or .md`."""
    *most, last = FORMATS
    return f"{', '.join(most)} or {last}"


def write(
    report: Report, path: str | os.PathLike[str], *, extension: str | None = None, saved: Path | None = None
) -> None:
    """Writes the report in the format of the path's extension (or of `extension`), all of it or nothing.

    `saved`: its JSON file, which a page names.
    """
    render = FORMATS.get((extension or Path(path).suffix).lower())
    if render is None:
        raise ReportError(f"{os.fspath(path)}: the extension of a report must be {listed_formats()}")
    write_whole(path, _as_html(report, str(saved or "")) if render is _as_html else render(report))
