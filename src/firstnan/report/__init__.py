"""Reading, writing and showing reports; needs no torch, so a saved report opens at once."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from firstnan.records import Report
from firstnan.records.errors import NonFiniteError
from firstnan.report import json, text
from firstnan.report.fields import ReportError

__all__ = ["FORMATS", "ReportError", "load", "nonfinite_error", "print_text", "render_text", "write", "write_whole"]

LARGEST_FILE = 256 * 2**20


def render_text(
    report: Report,
    *,
    width: int | None = None,
    color: bool = False,
    ascii: bool = False,
    encoding: str = "utf-8",
    saved: str = "",
) -> str:
    """The report as one screen of text; `width` is the terminal's, at most 100, where none is given."""
    return text.render(report, width=width, color=color, ascii=ascii, encoding=encoding, saved=saved)


def print_text(report: Report, stream: TextIO, *, saved: str = "") -> None:
    """Writes the report to `stream`: in color on a terminal, in ASCII where its encoding has no more."""
    tty = stream.isatty()
    width = text.WIDTH
    if tty:
        with contextlib.suppress(OSError, ValueError):  # a terminal without a size, as in some log viewers
            width = min(width, os.get_terminal_size(stream.fileno()).columns or width)
    color = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(render_text(report, width=width, color=color, encoding=encoding, saved=saved))
    stream.flush()


def nonfinite_error(report: Report) -> NonFiniteError:
    """The error that shows this report."""
    return NonFiniteError(report)


def _as_text(report: Report) -> str:
    return render_text(report, width=text.WIDTH)


FORMATS: dict[str, Callable[[Report], str]] = {".json": json.render, ".txt": _as_text}
"""What a report file may be, by its extension."""


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a JSON file; ReportError says in one line why there is none."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ReportError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_FILE:
        raise ReportError(f"{name}: too large for a report")
    try:
        return json.parse(content)
    except ReportError as error:
        raise ReportError(f"{name}: {error}") from None


def write(report: Report, path: str | os.PathLike[str], *, extension: str | None = None) -> None:
    """Writes the report in the format of the path's extension (or of that given), all of it or nothing."""
    render = FORMATS.get((extension or Path(path).suffix).lower())
    if render is None:
        raise ReportError(f"{os.fspath(path)}: a report is written as {' or '.join(FORMATS)}")
    write_whole(path, render(report))


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Puts `text` in place of the file in one move: whoever opens it sees the old one or the new one, never a part."""
    target, content = Path(os.path.realpath(path)), text.encode("utf-8")  # a link stays a link
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_bytes(content)
        return
    # Beside the target, so that the replacement is one rename on one file system.
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
