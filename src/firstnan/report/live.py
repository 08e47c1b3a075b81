"""How training is doing, in one line: it changes on a terminal, and is a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

_OFTEN, _SELDOM = 0.25, 30.0
"""Seconds between two lines, on a terminal and elsewhere."""
_ERASE = "\x1b[2K\r"


class LiveStatus:
    """The status line; on a terminal it makes room for what the program prints there.

    The program's streams are told to call `_make_room` first. It erases the line, and the program's text then takes
    its place. While the program has an unfinished line there, such as a progress bar, no status is shown.
    """

    def __init__(self, stream: TextIO | None = None, programs: Iterable[TextIO | None] | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream) if self._stream.isatty() else None
        self._next = 0.0
        self._lock = threading.RLock()
        self._shown = self._drawing = self._unfinished = False
        """Whether the line is on the terminal, is being written, or would be in the middle of the program's own."""
        self._wrapped: list[Any] = []
        if self._console is not None:
            for one in {id(s): s for s in (programs if programs is not None else (sys.stdout, sys.stderr))}.values():
                self._wrap(one)

    def _wrap(self, stream: Any) -> None:
        """Calls `_make_room` before everything that is written to a terminal by way of this stream."""
        with contextlib.suppress(Exception):  # a stream of another kind keeps its own `write`
            if stream.isatty():
                stream.write = self._writing(stream.write)
                self._wrapped.append(stream)

    def _writing(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def make_room_and_write(text: str, /) -> int:
            if self._drawing or not text:
                return write(text)
            with self._lock:
                self._erase()
                self._unfinished = not text.endswith("\n")
                return write(text)

        return make_room_and_write

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def show(self, parts: list[str], warning: str = "") -> None:
        """Shows `parts`, and a warning that stands out."""
        self._next = time.monotonic() + (_SELDOM if self._console is None else _OFTEN)
        line = "  ".join(["firstnan:", *parts])
        if self._console is None:
            self._stream.write(f"{line}{f'  {warning}' if warning else ''}\n")
            self._stream.flush()
            return
        text = Text(line, style="dim", end="", no_wrap=True, overflow="ellipsis")
        if warning:
            text.append(f"  {warning}", style="bold yellow")
        text.truncate(max(self._console.width - 1, 20), overflow="ellipsis")
        with self._lock:
            if self._unfinished:
                return
            self._drawing = True
            try:
                self._stream.write(_ERASE)
                # The cursor goes back to the beginning, for what does not pass through the program's streams.
                self._console.print(text, end="\r")
                self._stream.flush()
            finally:
                self._drawing = False
            self._shown = True

    def _erase(self) -> None:
        if self._shown:
            self._shown, self._drawing = False, True
            try:
                self._stream.write(_ERASE)
                self._stream.flush()
            finally:
                self._drawing = False

    def end(self) -> None:
        """Removes the line and the wrapped streams."""
        with self._lock:
            self._erase()
            wrapped, self._wrapped = self._wrapped, []
            for stream in wrapped:
                with contextlib.suppress(AttributeError):  # the program has put its own there
                    del stream.write
