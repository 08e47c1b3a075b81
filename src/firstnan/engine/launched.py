"""Processes that a program launches, such as ranks: whether one of them has found something.

A launcher has an exit code of its own, and ranks may be on other hosts than the report: each notes it in a file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

NOTED_IN = "FIRSTNAN_FOUND"


class LaunchedProcesses:
    """Those that this process launches; it may have been launched itself."""

    def __init__(self) -> None:
        self._own: Path | None = None
        noted_in = os.environ.get(NOTED_IN)
        self._noted_in = Path(noted_in) if noted_in else None

    @property
    def are_any(self) -> bool:
        return self._own is not None

    def environment(self) -> dict[str, str]:
        """What they have to know."""
        if self._own is None:
            handle, name = tempfile.mkstemp(prefix="firstnan-found-")
            os.close(handle)
            self._own = Path(name)
        return {NOTED_IN: str(self._own)}

    def note(self) -> None:
        """Tells the one that has launched this process that something was found here."""
        if self._noted_in is not None:
            with contextlib.suppress(OSError):
                self._noted_in.write_text("found\n", encoding="utf-8")

    def have_found(self) -> bool:
        """Whether one of them has found something; asked once, at the end."""
        if self._own is None:
            return False
        try:
            found = self._own.stat().st_size > 0
            self._own.unlink()
        except OSError:
            return False
        return found
