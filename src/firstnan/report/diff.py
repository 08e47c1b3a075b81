"""A unified diff shortened for reading: the place, the changed lines, and one line around them."""

from __future__ import annotations

import re
import textwrap

from firstnan.records.words import short_path

AROUND = 1
"""Lines shown before and after a change."""
_LONGEST = 100_000


def shown(diff: str) -> list[tuple[str, str]]:
    """The lines of a diff with their marks (`+`, `-` or a blank); above each change its place, without a mark."""
    path, number, out = "", 0, list[tuple[str, str]]()
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


def _block(path: str, number: int, hunk: list[str]) -> list[tuple[str, str]]:
    """One change: its place, then its lines without their shared indentation."""
    changes = [i for i, line in enumerate(hunk) if line.startswith(("+", "-"))]
    if not changes:
        return []
    place = [("", f"{path}:{number + changes[0]}" if number else path)] if path else []
    first, last = max(changes[0] - AROUND, 0), changes[-1] + AROUND
    # An empty line around a change says nothing.
    lines = [x for i, x in enumerate(hunk[: last + 1]) if i >= first and (x.strip() or changes[0] <= i <= changes[-1])]
    marks = [line[:1] or " " for line in lines]
    texts = textwrap.dedent("\n".join(line[1:] for line in lines)).split("\n")
    return place + list(zip(marks, texts, strict=True))
