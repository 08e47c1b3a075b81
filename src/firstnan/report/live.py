"""How training is doing, in one line: it changes on a terminal, and is a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.text import Text

_OFTEN, _SELDOM = 0.25, 30.0
"""Seconds between two lines, on a terminal and elsewhere."""


class LiveStatus:
    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream) if self._stream.isatty() else None
        self._next = 0.0

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
        # The cursor goes back to the beginning: what the program prints next takes the place of this line.
        self._stream.write("\x1b[2K")
        self._console.print(text, end="\r")
        self._stream.flush()

    def end(self) -> None:
        """Leaves no line behind."""
        if self._console is not None:
            self._stream.write("\x1b[2K\r")
            self._stream.flush()
