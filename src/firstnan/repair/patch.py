"""The change of a report as a patch: which one it is, with paths that `patch -p1` and `git apply` understand."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from firstnan.records import Remedy, Report
from firstnan.repair.diff import PatchError
from firstnan.repair.files import edits_of, located


def choose(report: Report, number: int | None = None) -> Remedy | None:
    """The first proven change, or the one of this number (counted from 1), proven or not."""
    if number is None:
        return next((remedy for remedy in report.remedies if remedy.proven and remedy.diff), None)
    if not 1 <= number <= len(report.remedies):
        raise PatchError(f"the report has no change {number}: it has {len(report.remedies)}")
    remedy = report.remedies[number - 1]
    if not remedy.diff:
        raise PatchError(f"change {number} is advice without a diff: {remedy.title}")
    return remedy


def portable(remedy: Remedy, folder: str) -> tuple[str, str]:
    """The diff with relative paths, and the folder they are relative to.

    That is the given folder if it contains all files, else the deepest one that does.
    """
    try:
        files = {name: os.path.realpath(located(name)) for name in edits_of(remedy)}
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
