"""Unified diffs: rendered from two texts, and read strictly into edits where a report has nothing else."""

from __future__ import annotations

import difflib
import re

from firstnan.records import Edit

LINE_END = re.compile(r"\r\n|\n|\r")
"""What ends a line in Python; form feeds and the like, where `splitlines` splits too, do not."""
_RANGE = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@(?: .*)?$")
_CONTEXT = 3


class PatchError(Exception):
    """A change cannot be read, or does not fit the files; the message is one line."""


def render(name: str, old: str, new: str) -> str:
    """The unified diff between two texts of a file, in the lines that `patch` sees; empty if they are equal."""
    lines = difflib.unified_diff(_lines(old), _lines(new), f"a/{name}", f"b/{name}", n=_CONTEXT)
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse(diff: str) -> tuple[Edit, ...]:
    """The edits of a unified diff, one per line; a context line replaces itself, so applying checks it too."""
    lines = LINE_END.split(diff)
    if not lines[-1]:
        lines.pop()
    edits: dict[str, list[Edit]] = {}
    path, at = "", 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- "):
            path = _path(line, lines[at + 1] if at + 1 < len(lines) else "")
            if path in edits:
                raise PatchError(f"the diff names {path} twice")
            edits[path] = []
            at += 2
        elif line.startswith("@@") and edits:
            hunk, at = _hunk(path, lines, at)
            if hunk and edits[path] and hunk[0].line < edits[path][-1].end_line:
                raise PatchError(f"{path}: the hunks at line {hunk[0].line} overlap or are out of order")
            edits[path] += hunk
        elif line.startswith(("diff ", "index ")) or not line:
            at += 1
        else:
            raise PatchError(f"line {at + 1} of the diff is not part of a diff: {line[:60]!r}")
    if not edits:
        raise PatchError("the diff is empty")
    for path, found in edits.items():
        if all(edit.old == edit.new for edit in found):
            raise PatchError(f"the diff changes nothing in {path}")
    return tuple(edit for found in edits.values() for edit in found)


def _path(old: str, new: str) -> str:
    if not new.startswith("+++ "):
        raise PatchError(f"the diff has no '+++ ' line after {old[:60]!r}")
    names = [line[4:].split("\t")[0].rstrip() for line in (old, new)]
    if "/dev/null" in names:
        raise PatchError("the diff creates or deletes a file; only edits are allowed")
    bare = [name.removeprefix(f"{side}/") for side, name in zip("ab", names, strict=True)]
    if bare[0] != bare[1] and names[0] != names[1]:
        raise PatchError(f"the diff renames {bare[0]!r} to {bare[1]!r}; only edits are allowed")
    return bare[0] if bare[0] == bare[1] else names[0]


def _hunk(path: str, lines: list[str], at: int) -> tuple[list[Edit], int]:
    """The edits of the hunk whose `@@` is at this line of the diff, and the line after it."""
    found = _RANGE.match(lines[at])
    if found is None:
        raise PatchError(f"line {at + 1} of the diff is not a hunk range: {lines[at][:60]!r}")
    left = [1 if found[i] is None else int(found[i]) for i in (2, 3)]
    # A hunk without old lines names the line after which the new ones come.
    line, column = int(found[1]) + (left[0] == 0), 0
    if line == 0:
        raise PatchError(f"line {at + 1} of the diff starts at line 0")
    edits: list[Edit] = []
    at += 1
    while any(left):
        if at == len(lines):
            raise PatchError("the diff ends inside a hunk")
        mark, text = lines[at][:1] or " ", lines[at][1:]
        left[0] -= mark != "+"
        left[1] -= mark != "-"
        if mark not in " -+" or min(left) < 0:
            raise PatchError(f"line {at + 1} of the diff does not fit its range: {lines[at][:60]!r}")
        at += 1
        end = (line, column) if mark == "+" else (line + 1, 0)
        if at < len(lines) and lines[at].startswith("\\"):  # no newline at the end of the file
            end = end if mark == "+" else (line, len(text))
            at += 1
        else:
            text += "\n"
        edits.append(Edit(path, line, column, *end, "" if mark == "+" else text, "" if mark == "-" else text))
        line, column = end
    return edits, at
