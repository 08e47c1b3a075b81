"""A report as people see it; needs no torch, so a saved report opens at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from firstnan.records import Report
from firstnan.records.codec import ReportError, dumps
from firstnan.records.files import write_whole
from firstnan.report.progress import Progress
from firstnan.report.text import WIDTH, nonfinite_error, print_text, render_text

__all__ = ["FORMATS", "Progress", "nonfinite_error", "print_text", "render_text", "write"]


def _as_text(report: Report) -> str:
    return render_text(report, width=WIDTH)


FORMATS: dict[str, Callable[[Report], str]] = {".json": dumps, ".txt": _as_text}
"""What a report file may be, by its extension."""


def write(report: Report, path: str | os.PathLike[str], *, extension: str | None = None) -> None:
    """Writes the report in the format of the path's extension (or of `extension`), all of it or nothing."""
    render = FORMATS.get((extension or Path(path).suffix).lower())
    if render is None:
        raise ReportError(f"{os.fspath(path)}: the extension of a report must be {' or '.join(FORMATS)}")
    write_whole(path, render(report))
