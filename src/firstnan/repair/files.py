"""The user's files with edits applied: every edit finds exactly the text it was made for, or nothing is changed."""

from __future__ import annotations

import io
import os
import stat
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from firstnan.records import Edit, Remedy
from firstnan.repair.diff import LINE_END, PatchError, parse, render

_LARGEST_FILE = 16 * 2**20


@dataclass(frozen=True)
class FileOnDisk:
    """The bytes of a source file; `encoding` is what its first lines declare."""

    path: Path
    content: bytes
    encoding: str

    @property
    def text(self) -> str:
        return self.content.decode(self.encoding)

    @staticmethod
    def read(name: str) -> FileOnDisk:
        """The file of this name; PatchError if it is not a regular file of source text."""
        path = located(name)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise PatchError(f"{name}: not a regular file")
            with open(path, "rb") as file:
                content = file.read(_LARGEST_FILE + 1)
            if len(content) > _LARGEST_FILE:
                raise PatchError(f"{name}: too large for a source file")
            encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
            content.decode(encoding)
            return FileOnDisk(path, content, encoding)
        except OSError as error:
            raise PatchError(f"{name}: {error.strerror or error}") from None
        except (SyntaxError, ValueError, LookupError) as error:
            raise PatchError(f"{name}: cannot be decoded as source: {error}") from None

    def encoded(self, text: str) -> bytes:
        """Another text in the encoding of this file, with its byte order mark if it has one."""
        try:
            return text.encode(self.encoding)
        except UnicodeEncodeError as error:
            raise PatchError(f"{self.path}: the change has characters that {self.encoding} cannot encode") from error


def located(name: str) -> Path:
    """The path of the file that a change names; `home/me/train.py` may stand for `/home/me/train.py`."""
    path = Path(name)
    if not path.is_absolute() and not path.exists() and Path(os.sep, name).exists():
        path = Path(os.sep, name)
    return path


def line_starts(text: str) -> list[int]:
    """The offset at which each line begins; the last is that of the text after the last line end."""
    return [0, *(end.end() for end in LINE_END.finditer(text))]


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits made; PatchError if one does not find its old text, or two overlap."""
    starts, first_end = line_starts(text), LINE_END.search(text)
    newline = first_end[0] if first_end else "\n"
    parts, done = [], 0
    for edit in sorted(edits, key=lambda e: (e.line, e.column, e.end_line, e.end_column)):
        (start, fits), (end, ends) = (
            _offset(text, starts, edit.file, *position)
            for position in ((edit.line, edit.column), (edit.end_line, edit.end_column))
        )
        _check(edit, LINE_END.sub("\n", text[start:end]))
        if not (fits and ends):
            raise PatchError(f"{edit.file}:{edit.line}: the line is shorter than expected")
        if not done <= start <= end:
            raise PatchError(f"{edit.file}:{edit.line}: the edits overlap")
        parts += [text[done:start], text[start:end] if edit.old == edit.new else edit.new.replace("\n", newline)]
        done = end
    return "".join(parts) + text[done:]


def _offset(text: str, starts: list[int], file: str, line: int, column: int) -> tuple[int, bool]:
    """The offset of a position, and whether the line is long enough for it."""
    if not 1 <= line <= len(starts):
        raise PatchError(f"{file}: line {line} is expected, the file has {len(starts)}")
    start, line_end = starts[line - 1], LINE_END.search(text, starts[line - 1])
    return start + column, start <= start + column <= (line_end.start() if line_end else len(text))


def _check(edit: Edit, found: str) -> None:
    pairs = zip_longest(edit.old.split("\n"), found.split("\n"), fillvalue="(nothing)")
    for number, (wanted, there) in enumerate(pairs, edit.line):
        if wanted != there:
            raise PatchError(f"{edit.file}:{number}: expected {wanted[:80]!r}, found {there[:80]!r}")


def edits_of(remedy: Remedy) -> dict[str, list[Edit]]:
    """The edits of a remedy by file; those of an old report are read from its diff."""
    found = by_file(remedy.edits or parse(remedy.diff))
    for name in found:
        if not name or not name.isprintable():  # a terminal would obey control characters
            raise PatchError(f"not a file name: {name[:60]!r}")
    return found


def by_file(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.file, []).append(edit)
    return found


def new_contents(remedy: Remedy) -> list[tuple[FileOnDisk, bytes]]:
    """Every file that a remedy changes with its new content; PatchError unless all of it fits."""
    edits = edits_of(remedy)
    files = {name: FileOnDisk.read(name) for name in edits}
    if len({os.path.realpath(file.path) for file in files.values()}) < len(files):
        raise PatchError("the change names one file twice")
    texts = {name: edited(file.text, edits[name]) for name, file in files.items()}
    if remedy.edits:
        _check_diff(remedy.diff, "".join(render(name, files[name].text, text) for name, text in texts.items()))
    return [(file, file.encoded(texts[name])) for name, file in files.items()]


def _check_diff(shown: str, rendered: str) -> None:
    """The edits make the change that the user was shown, and the lines around it are still the same."""
    where = "the diff"
    for wanted, there in zip_longest(LINE_END.split(shown), LINE_END.split(rendered), fillvalue=""):
        if wanted != there:
            raise PatchError(f"{where}: expected {wanted[:80]!r} near the change, found {there[:80]!r}")
        where = there.removeprefix("--- a/") if there.startswith("--- a/") else where


def moved_line(remedy: Remedy, file: str, line: int) -> int:
    """The number of a line of a file (both as they are now) after the edits."""
    before = [
        edit
        for name, edits in edits_of(remedy).items()
        if os.path.realpath(located(name)) == os.path.realpath(file)
        for edit in edits
        if (edit.end_line, edit.end_column) <= (line, 0)
    ]
    return line + sum(edit.new.count("\n") - edit.old.count("\n") for edit in before)
