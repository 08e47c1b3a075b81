"""Small training programs that fail, each in a different way, to try the tool on."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Demo", "demos", "find"]

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True)
class Demo:
    """One program, named after its file; its title is the first line of the file's docstring."""

    name: str
    title: str
    path: Path


def demos() -> list[Demo]:
    """All demo programs, sorted by name."""
    return [Demo(path.stem, _title(path), path) for path in sorted(PROGRAMS.glob("*.py"))]


def find(name: str) -> Demo | None:
    """The program of that name; None if there is none."""
    return next((demo for demo in demos() if demo.name == name), None)


def _title(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
    return docstring.splitlines()[0].rstrip(".")
