"""Hides what a program prints while one of its steps is replayed."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


class MutedOutput:
    """Redirects stdout and stderr to /dev/null and back, both the file descriptors and `sys.stdout`, `sys.stderr`."""

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}
        self._files: list[tuple[int, int]] = []
        self._devnull: Any = None

    def begin(self) -> None:
        if self._streams:
            return
        self._streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._flush()
        # Not closed afterwards: objects that the program creates meanwhile may refer to it.
        self._devnull = open(os.devnull, "w")  # noqa: SIM115
        for name in self._streams:
            setattr(sys, name, self._devnull)
        for number in (1, 2):
            with contextlib.suppress(OSError):  # a closed descriptor stays closed
                self._files.append((number, os.dup(number)))
                os.dup2(self._devnull.fileno(), number)

    def end(self) -> None:
        self._flush()
        for name, stream in self._streams.items():
            if getattr(sys, name) is self._devnull:
                setattr(sys, name, stream)
        for number, kept in self._files:
            os.dup2(kept, number)
            os.close(kept)
        self._streams, self._files = {}, []

    def _flush(self) -> None:
        for stream in self._streams.values():
            with contextlib.suppress(Exception):  # the program may have replaced it with anything
                stream.flush()
