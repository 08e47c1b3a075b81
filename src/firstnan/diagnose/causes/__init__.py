"""The catalogue of causes: what each slug means, how it looks in code, what helps, and a program that shows it."""

from __future__ import annotations

import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about one cause, independent of the run."""

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


# --- as text for a terminal and as Markdown ----------------------------------------------------------------------

WIDTH = 100


def listing() -> str:
    """Every slug with its title, family by family."""
    parts = []
    for title, entries in families().items():
        width = max(len(entry.slug) for entry in entries)
        parts.append("\n".join([title, *(f"  {entry.slug:<{width}}  {entry.title}" for entry in entries)]))
    return "\n\n".join([*parts, "Run `firstnan causes SLUG` for details of one cause."])


def page(entry: Entry) -> str:
    """One cause for a terminal."""
    parts = [f"{entry.title}  [{entry.slug}]", _wrapped(entry.explanation)]
    if entry.code:
        parts.append("\n".join(["In code:", *(f"  {line}" for line in entry.code)]))
    parts.append("\n".join(["What helps:", *(_wrapped(remedy, "- ", "  ") for remedy in entry.remedies)]))
    if entry.example is not None:
        run = f"  firstnan run {entry.example}"
        parts.append(f"A program that fails like this:\n{run}\n  firstnan causes {entry.slug} --example prints it.")
    return "\n\n".join(parts)


def _wrapped(text: str, first: str = "", rest: str = "") -> str:
    wrapper = textwrap.TextWrapper(WIDTH, first, rest, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(text)


def markdown(entry: Entry) -> str:
    """One cause as a page of the documentation."""
    parts = [f"# {entry.title}", f"`{entry.slug}`", _wrapped(entry.explanation)]
    if entry.code:
        parts.append("## In code\n" + _block(entry.code))
    parts.append("## What helps\n" + "\n".join(f"- {remedy}" for remedy in entry.remedies))
    if entry.example is not None:
        program = entry.example.read_text(encoding="utf-8")
        steps = f"`firstnan causes {entry.slug} --example > example.py`, then `firstnan run example.py`."
        parts.append(f"## A program that fails like this\n{steps}\n\n" + _block(program.splitlines()))
    return "\n\n".join(parts) + "\n"


def _block(lines: tuple[str, ...] | list[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def index() -> str:
    """The first page: every cause with a link to its page."""
    parts = ["# Causes", "The causes of a NaN or Inf that `firstnan` can name; `firstnan causes` shows the same."]
    for title, entries in families().items():
        rows = [f"| [`{entry.slug}`]({entry.slug}.md) | {entry.title} |" for entry in entries]
        parts.append("\n".join([f"## {title}", "| slug | |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def documents() -> dict[str, str]:
    """The content of every file in docs/causes, by file name."""
    pages = {Path(e.link).name: markdown(e) for entries in families().values() for e in entries}
    return {"README.md": index(), **pages}
