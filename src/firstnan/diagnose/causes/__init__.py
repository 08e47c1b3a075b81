"""The catalogue of causes: what each slug means, how it looks in code, what helps, and a program that shows it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["Entry", "catalogue", "families", "link_to"]

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about one cause, whichever run it appears in."""

    slug: str
    family: str
    title: str
    explanation: str
    """Two sentences."""
    code: tuple[str, ...]
    """How it looks in programs."""
    remedies: tuple[str, ...]

    @property
    def link(self) -> str:
        """Its page, relative to the root of the project."""
        return f"docs/causes/{self.slug}.md"

    @property
    def example(self) -> Path | None:
        """A small training program that fails in this way, if there is one."""
        path = HERE / "examples" / f"{self.slug}.py"
        return path if path.is_file() else None


@cache
def catalogue() -> dict[str, Entry]:
    """Every cause by its slug, in the order of the families."""
    return {slug: _entry(slug, **fields) for slug, fields in _file()["causes"].items()}


def link_to(slug: str) -> str | None:
    """The page of a cause; None for a rule of the user's that the catalogue does not have."""
    return entry.link if (entry := catalogue().get(slug)) else None


def families() -> dict[str, list[Entry]]:
    """The causes of each family, by the family's title."""
    entries = catalogue().values()
    return {title: [e for e in entries if e.family == name] for name, title in _file()["families"].items()}


@cache
def _file() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "catalogue.toml").read_text(encoding="utf-8"))


def _entry(slug: str, family: str, title: str, explanation: str, code: list[str], remedies: list[str]) -> Entry:
    return Entry(slug, family, title, " ".join(explanation.split()), tuple(code), tuple(remedies))
