"""A unified diff as a reader wants it: where, what goes, what comes, and little around it."""

from __future__ import annotations

import re
import textwrap

from firstnan.report.words import short_path

AROUND = 1
"""Lines shown before and after what is changed."""
_LONGEST = 100_000


def shown(diff: str) -> list[str]:
    """The lines of a diff, each change under its place; anything that is no diff comes out as it is."""
    path, number, out = "", 0, []
    hunk: list[str] = []
    for line in [*diff[:_LONGEST].strip("\n").split("\n"), "@@"]:
        if line.startswith(("--- ", "+++ ", "@@")):
            out += _block(path, number, hunk)
            hunk = []
            if line.startswith("--- "):
                path, number = short_path(line[4:].split("\t")[0].strip().removeprefix("a/")), 0
            elif found := re.match(r"@@ -\d{1,9}(?:,\d+)? \+(\d{1,9})", line):
                number = int(found[1])
        elif not line.startswith("\\"):
            hunk.append(line.rstrip("\r")[:500])
    return out


def _block(path: str, number: int, hunk: list[str]) -> list[str]:
    """One change: its place, then its lines without the indentation that they share."""
    changes = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
    if not changes:
        return []
    first = max(changes[0] - AROUND, 0)
    place = [f"{path}:{number + changes[0]}" if number else path] if path else []
    lines = hunk[first : changes[-1] + AROUND + 1]
    marks = [line[:1] or " " for line in lines]
    texts = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
    return place + [f"{mark} {text}".rstrip() for mark, text in zip(marks, texts, strict=True)]
