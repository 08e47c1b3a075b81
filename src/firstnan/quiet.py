"""Hides what a program writes to its terminal while a step of it is played again."""

from __future__ import annotations

import contextlib
import os
import sys


class Quiet:
    """Points the standard streams of the whole process at nothing, and back."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, int]] = []

    def begin(self) -> None:
        if self._kept:
            return
        _flush()
        with contextlib.suppress(OSError):  # a stream that is closed stays so
            nothing = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                with contextlib.suppress(OSError):
                    self._kept.append((stream, os.dup(stream)))
                    os.dup2(nothing, stream)
            os.close(nothing)

    def end(self) -> None:
        if self._kept:
            _flush()
        for stream, kept in self._kept:
            os.dup2(kept, stream)
            os.close(kept)
        self._kept = []


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the program may have put anything in their place
            stream.flush()
