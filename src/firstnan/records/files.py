"""Files: a saved report read from one, and text written to one all at once."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from firstnan.records import Report
from firstnan.records.arguments import require_path
from firstnan.records.codec import ReportError, loads

LARGEST_FILE = 256 * 2**20


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a JSON file; ReportError says in one line why it cannot be read."""
    require_path("path", path)
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ReportError(f"{name}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > LARGEST_FILE:
        raise ReportError(f"{name}: too large for a report, the limit is {LARGEST_FILE >> 20} MiB")
    try:
        return Report.from_dict(loads(content))
    except ReportError as error:
        raise ReportError(f"{name}: {error}") from None


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Replaces a file in one move: whoever opens it sees the old text or the new text, never a part."""
    target, content = Path(os.path.realpath(path)), text.encode("utf-8")  # a link stays a link
    if target.exists() and not target.is_file():  # a pipe or a device cannot be replaced
        target.write_bytes(content)
    else:
        replace_file(target, content)


def replace_file(target: Path, content: bytes, *, keep_mode: bool = False) -> None:
    """Replaces a file in one move; whether its permissions stay."""
    # Beside the target: a rename is only atomic within one file system.
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content)
        if keep_mode:
            shutil.copymode(target, part)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
