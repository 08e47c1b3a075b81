"""Unified diffs: read strictly and applied in memory, to exactly the text they were made for or not at all."""

from __future__ import annotations

import io
import os
import re
import stat
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

_LINE_END = re.compile(r"\r\n|\n|\r")
"""What ends a line for python; form feeds and the like, at which `splitlines` cuts too, do not."""
_RANGE = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@(?: .*)?$")
_LARGEST_FILE = 16 * 2**20


class PatchError(Exception):
    """The diff cannot be read, or the file is not what it was made for; the text is one line."""


# --- a diff -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    mark: str
    """` ` for one that stays, `-` for one that goes, `+` for one that comes."""
    text: str
    ends: bool = True
    """False where the diff says that no newline follows."""


@dataclass
class Hunk:
    start: int
    """The first old line, counted from 1; where there is none, the line after which new ones come."""
    lines: list[Line] = field(default_factory=list)

    @property
    def old(self) -> list[Line]:
        return [line for line in self.lines if line.mark != "+"]


@dataclass
class Change:
    """What a diff does to one file."""

    path: str
    line: int
    """Where in the diff it begins."""
    hunks: list[Hunk] = field(default_factory=list)


def parse(diff: str) -> list[Change]:
    """The changes in a unified diff, one a file; PatchError where it is anything else."""
    lines = _LINE_END.split(diff)
    if not lines[-1]:
        lines.pop()
    changes: list[Change] = []
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- "):
            changes.append(Change(_path(line, lines[at + 1] if at + 1 < len(lines) else ""), at))
            at += 2
        elif line.startswith("@@") and changes:
            hunk, at = _hunk(lines, at)
            changes[-1].hunks.append(hunk)
        elif line.startswith(("diff ", "index ")) or not line:
            at += 1
        else:
            raise PatchError(f"line {at + 1} of the diff is none: {line[:60]!r}")
    _check(changes)
    return changes


def with_paths(diff: str, rename: Callable[[str], str]) -> str:
    """The diff with other names for its files; as it is where it cannot be read."""
    try:
        changes = parse(diff)
    except PatchError:
        return diff
    lines = _split(diff)
    for change in changes:
        for at, head in ((change.line, "--- a/"), (change.line + 1, "+++ b/")):
            lines[at] = (head + rename(change.path), lines[at][1])
    return "".join(map("".join, lines))


def _check(changes: list[Change]) -> None:
    if not changes:
        raise PatchError("there is no change in the diff")
    seen: set[str] = set()
    for change in changes:
        if change.path in seen:
            raise PatchError(f"the diff names {change.path} twice")
        seen.add(change.path)
        if not any(line.mark != " " for hunk in change.hunks for line in hunk.lines):
            raise PatchError(f"the diff changes nothing in {change.path}")


def _path(old: str, new: str) -> str:
    if not new.startswith("+++ "):
        raise PatchError(f"after {old[:60]!r} the diff has no line '+++ '")
    names = [line[4:].split("\t")[0].rstrip() for line in (old, new)]
    if "/dev/null" in names:
        raise PatchError("the diff makes or removes a file; only changes are allowed")
    bare = [name.removeprefix(f"{side}/") for side, name in zip("ab", names, strict=True)]
    if bare[0] != bare[1] and names[0] != names[1]:
        raise PatchError(f"the diff renames {bare[0]!r} to {bare[1]!r}; only changes are allowed")
    name = bare[0] if bare[0] == bare[1] else names[0]
    if not name or not name.isprintable():  # shown as it is to whoever is asked whether to change it
        raise PatchError(f"the diff names no file: {name[:60]!r}")
    return name


def _hunk(lines: list[str], at: int) -> tuple[Hunk, int]:
    """The hunk whose `@@` is at this line of the diff, and the line after it."""
    found = _RANGE.match(lines[at])
    if found is None:
        raise PatchError(f"line {at + 1} of the diff is no range: {lines[at][:60]!r}")
    left = [1 if found[i] is None else int(found[i]) for i in (2, 3)]
    hunk = Hunk(int(found[1]))
    if hunk.start == 0 and left[0]:
        raise PatchError(f"line {at + 1} of the diff begins at a line 0")
    at += 1
    while any(left) or (at < len(lines) and lines[at].startswith("\\") and hunk.lines):
        if at == len(lines):
            raise PatchError("the diff ends in the middle of a change")
        mark, text = lines[at][:1] or " ", lines[at][1:]
        if mark == "\\":
            hunk.lines[-1:] = [Line(hunk.lines[-1].mark, hunk.lines[-1].text, False)] if hunk.lines else []
        elif mark in " -+":
            hunk.lines.append(Line(mark, text))
            left[0] -= mark != "+"
            left[1] -= mark != "-"
        if mark not in " -+\\" or min(left) < 0:
            raise PatchError(f"line {at + 1} of the diff does not fit its range: {lines[at][:60]!r}")
        at += 1
    return hunk, at


def moved(diff: str, file: str, line: int) -> int:
    """Where a line of a file (both as they are now) stands after the diff; as it is where the diff is about others."""
    shift = 0
    for change in parse(diff):
        if os.path.realpath(located(change.path)) != os.path.realpath(file):
            continue
        for hunk in change.hunks:
            at = hunk.start if hunk.old else hunk.start + 1
            for entry in hunk.lines:
                if at >= line and entry.mark != "+":
                    break
                shift += (entry.mark == "+") - (entry.mark == "-")
                at += entry.mark != "+"
    return line + shift


# --- applying it --------------------------------------------------------------------------------------------------


def apply(diff: str, read: Callable[[str], str]) -> dict[str, str]:
    """The new text of every file that the diff names; `read` gives the old one, with its line ends as they are."""
    return {change.path: changed(change, read(change.path)) for change in parse(diff)}


def changed(change: Change, text: str) -> str:
    """The text with the change made; PatchError where it is not the text that the diff was made for."""
    old = _split(text)
    usual = next((end for _, end in old if end), "\n")
    new: list[tuple[str, str]] = []
    done = 0
    for hunk in change.hunks:
        begin = hunk.start - 1 if hunk.old else hunk.start
        if begin < done:
            raise PatchError(f"{change.path}: the changes at line {hunk.start} overlap or are out of order")
        _compare(change.path, old, hunk, begin)
        new += old[done:begin]
        done = begin
        for line in hunk.lines:
            if line.mark == "+":
                new.append((line.text, usual if line.ends else ""))
            elif line.mark == " ":
                new.append(old[done])
            done += line.mark != "+"
    new += old[done:]
    # Whatever was last before, only the last line may lack an end now.
    return "".join(content + (end or usual) for content, end in new[:-1]) + "".join(new[-1] if new else ())


def _compare(path: str, old: list[tuple[str, str]], hunk: Hunk, begin: int) -> None:
    if begin > len(old):
        raise PatchError(f"{path}: has {len(old)} lines, the diff starts at line {hunk.start}")
    for number, line in enumerate(hunk.old, begin):
        content, end = old[number] if number < len(old) else (None, "")
        if content is None:
            raise PatchError(f"{path}:{number + 1}: the diff expects {line.text[:80]!r}, the file ends before it")
        if content != line.text:
            raise PatchError(f"{path}:{number + 1}: the diff expects {line.text[:80]!r}, there is {content[:80]!r}")
        if end and not line.ends:
            raise PatchError(f"{path}:{number + 1}: the diff expects the file to end here without a newline")


def _split(text: str) -> list[tuple[str, str]]:
    """Every line with what ends it."""
    lines, at = [], 0
    for end in _LINE_END.finditer(text):
        lines.append((text[at : end.start()], end[0]))
        at = end.end()
    return [*lines, (text[at:], "")] if at < len(text) else lines


# --- files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A source file as it lies on disk; `encoding` is what its first lines say."""

    path: Path
    content: bytes
    encoding: str

    @property
    def text(self) -> str:
        return self.content.decode(self.encoding)

    @staticmethod
    def read(name: str) -> Source:
        """The file that a diff names; PatchError where it is not a regular file of source text."""
        path = located(name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for its writer
                raise PatchError(f"{name}: not a regular file")
            with open(path, "rb") as file:
                content = file.read(_LARGEST_FILE + 1)
            if len(content) > _LARGEST_FILE:
                raise PatchError(f"{name}: too large for a source file")
            encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
            content.decode(encoding)
            return Source(path, content, encoding)
        except OSError as error:
            raise PatchError(f"{name}: {error.strerror or error}") from None
        except (SyntaxError, ValueError, LookupError) as error:
            raise PatchError(f"{name}: not readable as source: {error}") from None

    def encoded(self, text: str) -> bytes:
        """Another text in the encoding of this file, with its byte order mark if it has one."""
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise PatchError(f"{self.path}: the change has characters that {self.encoding} lacks") from error


def located(name: str) -> Path:
    """Where the file is that a diff names; `a/home/me/train.py` may stand for `/home/me/train.py`."""
    path = Path(name)
    if not path.is_absolute() and not path.exists() and Path(os.sep, name).exists():
        path = Path(os.sep, name)
    return path


def new_contents(diff: str) -> list[tuple[Source, bytes]]:
    """Every file that the diff names as it is, and what it becomes; all of them fit, or PatchError comes first."""
    sources: dict[str, Source] = {}

    def read(name: str) -> str:
        sources[name] = Source.read(name)
        return sources[name].text

    texts = apply(diff, read)
    real = {os.path.realpath(source.path) for source in sources.values()}
    if len(real) < len(sources):
        raise PatchError("the diff names one file by two names")
    return [(sources[name], sources[name].encoded(text)) for name, text in texts.items()]
