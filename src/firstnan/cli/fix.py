"""Shows the change that a report has proven, writes it as a patch, or makes it in the user's files."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shlex
import shutil
from pathlib import Path
from typing import TextIO

from firstnan.records import Remedy, Report
from firstnan.records.words import short_path
from firstnan.repair.patch import PatchError, Source, located, new_contents, parse, with_paths
from firstnan.report.chars import Charset
from firstnan.report.words import remedy_result

_NONE_PROVEN = "no change is proven; --number K takes one all the same\n"
_NONE = "the report has no change of the program\n"


class FixError(Exception):
    """The change cannot be shown or made; the text is one line."""


def choose(report: Report, number: int | None = None) -> Remedy | None:
    """The best proven change, or the one of this number (counted from 1) whatever is known of it."""
    if number is None:
        return next((remedy for remedy in report.remedies if remedy.proven and remedy.diff), None)
    if not 1 <= number <= len(report.remedies):
        raise FixError(f"the report has no change {number}: it has {len(report.remedies)}")
    remedy = report.remedies[number - 1]
    if not remedy.diff:
        raise FixError(f"change {number} is advice without a diff: {remedy.title}")
    return remedy


def show(report: Report, number: int | None, stream: TextIO) -> None:
    """Prints what was tried, then the diff; `patch -p1` takes the whole of it, in the folder that is named."""
    chosen = choose(report, number)
    chars = Charset(getattr(stream, "encoding", None) or "utf-8")
    for i, remedy in enumerate(report.remedies, 1):
        mark = ">" if remedy is chosen else " "
        stream.write(f"{mark}{i:2d}  {chars.prose(remedy.title)} ({chars.prose(remedy_result(remedy, report))})\n")
    if chosen is None:
        stream.write(_NONE_PROVEN if report.remedies else _NONE)
    else:
        diff, folder = portable(chosen.diff, os.getcwd())
        command = how_to_apply(folder, os.getcwd())
        if command:
            stream.write(f"\nfor {chars.show(command)}:\n")
        # Raw where another program reads it: a line may hold characters that a terminal would obey.
        stream.write("\n" + ("\n".join(map(chars.show, diff.split("\n"))) if stream.isatty() else diff))
    stream.flush()


def portable(diff: str, folder: str) -> tuple[str, str]:
    """The diff with paths as `patch -p1` and `git apply` want them, and the folder from which they are written.

    That is the given one where all files lie below it, else the one that they have in common: of one file its own.
    """
    try:
        files = {change.path: os.path.realpath(located(change.path)) for change in parse(diff)}
    except PatchError:
        return diff, folder
    base = os.path.realpath(folder)
    if any(not file.startswith(os.path.join(base, "")) for file in files.values()):
        base = os.path.commonpath([os.path.dirname(file) for file in files.values()])
    return with_paths(diff, lambda name: Path(os.path.relpath(files[name], base)).as_posix()), base


def how_to_apply(folder: str, here: str, patch: str = "") -> str:
    """The command that makes a change whose paths are written from another folder than the one we are in."""
    if os.path.realpath(folder) == os.path.realpath(here):
        return ""
    return f"patch -p1 -d {shlex.quote(folder)}" + (f" < {shlex.quote(patch)}" if patch else "")


def apply(remedy: Remedy, stream: TextIO) -> None:
    """Makes the change in the files, all of them or none; each is kept as it was beside it."""
    try:
        changes = new_contents(remedy.diff)
    except PatchError as error:
        raise FixError(f"{error}; nothing was changed") from None
    kept: list[tuple[Path, Path]] = []
    try:
        for source, content in changes:
            target = Path(os.path.realpath(source.path))  # a link stays a link
            backup = _backup(source, target)
            kept.append((backup, target))
            _replace(target, content)
    except OSError as error:
        for backup, target in kept:
            with contextlib.suppress(OSError):
                os.replace(backup, target)
        raise FixError(f"can't write {error.filename}: {error.strerror}; nothing was changed") from None
    for backup, target in kept:
        stream.write(f"changed {short_path(str(target))}, kept {short_path(str(backup))}\n")


def _backup(source: Source, target: Path) -> Path:
    """A copy beside the file, under a name that was free."""
    for number in itertools.count():
        backup = target.with_name(f"{target.name}.orig{f'.{number}' if number else ''}")
        with contextlib.suppress(FileExistsError), open(backup, "xb") as file:
            try:
                file.write(source.content)
                shutil.copystat(target, backup)
            except BaseException:
                backup.unlink()
                raise
            return backup
    raise AssertionError("numbers do not end")


def _replace(target: Path, content: bytes) -> None:
    """Puts the content in place of the file in one move, with its permissions."""
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
        shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
