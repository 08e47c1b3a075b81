"""Hides what a program writes to its terminal while a step of it is played again."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


class MutedOutput:
    """Points the standard streams of the whole process at nothing, and back; python's own may be no files at all."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._files: list[tuple[int, int]] = []
        self._nothing: Any = None

    def begin(self) -> None:
        if self._streams:
            return
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._flush()
        # Left open: what the program made meanwhile may hold it.
        self._nothing = open(os.devnull, "w")  # noqa: SIM115
        for name in self._streams:
            setattr(sys, name, self._nothing)
        for number in (1, 2):
            with contextlib.suppress(OSError):  # one that is closed stays so
                self._files.append((number, os.dup(number)))
                os.dup2(self._nothing.fileno(), number)

    def end(self) -> None:
        self._flush()
        for name, stream in self._streams.items():
            if getattr(sys, name) is self._nothing:
                setattr(sys, name, stream)
        for number, kept in self._files:
            os.dup2(kept, number)
            os.close(kept)
        self._streams, self._files = {}, []

    def _flush(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(Exception):  # the program may have put anything in their place
                stream.flush()
