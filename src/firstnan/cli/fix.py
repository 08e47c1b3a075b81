"""Shows the proven change of a report, or applies it to the user's files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import TextIO

from firstnan.records import Remedy, Report
from firstnan.records.files import replace_file
from firstnan.records.words import short_path
from firstnan.repair.patch import FileOnDisk, PatchError, choose, how_to_apply, new_contents, portable
from firstnan.report.characters import Charset
from firstnan.report.sentences import remedy_result

_NONE_PROVEN = "no fix is proven; --number K selects one anyway\n"
_NONE = "the report proposes no fix\n"


def show(report: Report, number: int | None, stream: TextIO, root: str = "") -> None:
    """Prints what was tried, then the diff; the whole output is valid input for `patch -p1`."""
    chosen = choose(report, number)
    chars = Charset(getattr(stream, "encoding", None) or "utf-8")
    for i, remedy in enumerate(report.remedies, 1):
        mark = ">" if remedy is chosen else " "
        stream.write(f"{mark}{i:2d}  {chars.prose(remedy.title)} ({chars.prose(remedy_result(remedy, report))})\n")
    if chosen is None:
        stream.write(_NONE_PROVEN if report.remedies else _NONE)
    else:
        diff, folder = portable(chosen, os.path.abspath(root))
        command = how_to_apply(folder, os.getcwd())
        if command:
            stream.write(f"\nfor {chars.show(command)}:\n")
        # Escaped only for a terminal, which would obey control characters in a line.
        stream.write("\n" + ("\n".join(map(chars.show, diff.split("\n"))) if stream.isatty() else diff))
    stream.flush()


def apply(remedy: Remedy, stream: TextIO, root: str = "") -> None:
    """Changes all of the files or none, only below the root, and keeps a backup next to each."""
    try:
        changes = new_contents(remedy, root)
    except PatchError as error:
        raise PatchError(f"{error}; nothing was changed") from None
    kept: list[tuple[Path, Path]] = []
    try:
        for file, content in changes:
            target = file.path
            if os.path.realpath(target) != str(target):
                raise OSError(errno.ELOOP, "became a link", str(target))
            backup = _backup(file, target)
            kept.append((backup, target))
            replace_file(target, content, keep_mode=True)
    except OSError as error:
        for backup, target in kept:
            with contextlib.suppress(OSError):
                os.replace(backup, target)
        raise PatchError(f"can't write {error.filename}: {error.strerror}; nothing was changed") from None
    for backup, target in kept:
        stream.write(f"changed {short_path(str(target))}, backup in {short_path(str(backup))}\n")


def _backup(original: FileOnDisk, target: Path) -> Path:
    """A copy next to the file, under an unused name."""
    for number in itertools.count():
        backup = target.with_name(f"{target.name}.orig{f'.{number}' if number else ''}")
        with contextlib.suppress(FileExistsError), open(backup, "xb") as file:
            try:
                file.write(original.content)
                shutil.copystat(target, backup)
            except BaseException:
                backup.unlink()
                raise
            return backup
    raise AssertionError("unreachable")
