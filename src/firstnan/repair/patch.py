"""The change of a remedy as a unified diff, read strictly, and applied to exactly the text it was made for."""

from __future__ import annotations

import difflib
import io
import os
import re
import shlex
import stat
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from firstnan.records import Edit, Remedy, Report
from firstnan.records.words import cell_source


def choose(report: Report, number: int | None = None) -> Remedy | None:
    """The first proven change, or the one of this number (counted from 1), proven or not."""
    if number is None:
        return next((remedy for remedy in report.remedies if remedy.proven and remedy.diff), None)
    if not 1 <= number <= len(report.remedies):
        raise PatchError(f"--number must be a fix of the report, which has {len(report.remedies)}, got {number}")
    remedy = report.remedies[number - 1]
    if not remedy.diff:
        raise PatchError(f"fix {number} is advice without a diff: {remedy.title}")
    return remedy


def portable(remedy: Remedy, folder: str) -> tuple[str, str]:
    """The diff with relative paths, and the folder they are relative to.

    That is the given folder if it contains all files, else the deepest one that does.
    """
    try:
        files = {name: os.path.realpath(located(name, folder)) for name in edits_of(remedy)}
    except PatchError:
        return remedy.diff, folder
    base, diff = os.path.realpath(folder), remedy.diff
    if any(not file.startswith(os.path.join(base, "")) for file in files.values()):
        base = os.path.commonpath([os.path.dirname(file) for file in files.values()])
    for name, file in files.items():
        path = Path(os.path.relpath(file, base)).as_posix()
        diff = diff.replace(f"--- a/{name}\n+++ b/{name}\n@@", f"--- a/{path}\n+++ b/{path}\n@@", 1)
    return diff, base


def how_to_apply(folder: str, here: str, patch: str = "") -> str:
    """The command that applies a patch whose paths are relative to a folder; empty if that is the current one."""
    if os.path.realpath(folder) == os.path.realpath(here):
        return ""
    return f"patch -p1 -d {shlex.quote(folder)}" + (f" < {shlex.quote(patch)}" if patch else "")


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


_LARGEST_FILE = 16 * 2**20
_INSTALLED = {"site-packages", "dist-packages"}


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
    def read(name: str, root: str | None = None) -> FileOnDisk:
        """The file of this name, or the cell of a notebook; PatchError if it is not a regular file of source text.

        With a root it must be a file that a report may change: see `allowed`.
        """
        if root is None and (cell := cell_source(name)):
            return FileOnDisk(Path(name), cell.encode(), "utf-8")
        path = located(name) if root is None else allowed(name, root)
        try:
            if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
                raise PatchError(f"{name}: not a regular file")
            with open(path, "rb", opener=None if root is None else _without_links) as file:
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


def _without_links(path: str, flags: int) -> int:
    """Opens a file whose links were all followed before: what has become a link since is refused."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def located(name: str, folder: str = "") -> Path:
    """The path of the file that a change names; `home/me/train.py` may stand for `/home/me/train.py`."""
    path = Path(folder, name)
    if not os.path.exists(path) and os.path.exists(Path(os.sep, name)):
        path = Path(os.sep, name)
    return path


def allowed(name: str, root: str) -> Path:
    """The file that a change names, with all links followed; PatchError unless it is source below the root.

    Whoever wrote the report chose the name. Hidden files, such as those of git, and installed packages are not the
    program's source, unless the root itself is among them.
    """
    base = os.path.realpath(root)
    path = Path(os.path.realpath(located(name, base)))
    if base not in map(str, path.parents):
        raise PatchError(f"{name}: not inside {base}; --root DIR names the folder of the program")
    for part in path.relative_to(base).parts:
        if part.startswith(".") or part in _INSTALLED:
            kind = "an installed package" if part in _INSTALLED else "hidden"
            raise PatchError(f"{name}: {part} is {kind}, not part of the program in {base}")
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
            changed = f"expected {wanted[:80]!r}, found {there[:80]!r}"
            raise PatchError(f"{edit.file}:{number}: {changed} (the line has changed since the report)")


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


def new_contents(remedy: Remedy, root: str | None = None) -> list[tuple[FileOnDisk, bytes]]:
    """Every file that a remedy changes with its new content; PatchError unless all of it fits.

    With a root, every file must be one that a report may change: see `allowed`.
    """
    edits = edits_of(remedy)
    files = {name: FileOnDisk.read(name, root) for name in edits}
    if len({os.path.realpath(file.path) for file in files.values()}) < len(files):
        raise PatchError("the change names one file twice")
    texts = {name: edited(file.text, edits[name]) for name, file in files.items()}
    diffs = {name: render(name, files[name].text, text) for name, text in texts.items()}
    _check_diff(remedy.diff, "".join(diffs.values()))
    for name, diff in diffs.items():
        _check_pinned(name, diff)
    return [(file, file.encoded(texts[name])) for name, file in files.items()]


def _check_diff(shown: str, rendered: str) -> None:
    """The edits make the change that the user was shown, and the lines around it are still the same."""
    where = "the diff"
    for wanted, there in zip_longest(LINE_END.split(shown), LINE_END.split(rendered), fillvalue=""):
        if wanted != there:
            raise PatchError(f"{where}: expected {wanted[:80]!r} near the change, found {there[:80]!r}")
        where = there.removeprefix("--- a/") if there.startswith("--- a/") else where


def _check_pinned(name: str, diff: str) -> None:
    """Every hunk has a line of the file that is not blank, so it fits nowhere else by chance."""
    for hunk in diff.split("\n@@ -")[1:] or [""]:
        if not any(line.startswith((" ", "-")) and line[1:].strip() for line in hunk.split("\n")):
            raise PatchError(f"{name}: no line of the file shows where the change belongs")


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
