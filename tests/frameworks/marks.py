"""Where in a test or a program a mark is."""

from __future__ import annotations

from pathlib import Path


def line_of(source: Path | str, mark: str) -> int:
    """The line of a file, or of a text, that holds this mark."""
    text = source.read_text() if isinstance(source, Path) else source
    return next(i for i, line in enumerate(text.splitlines(), 1) if f"# {mark}" in line)
