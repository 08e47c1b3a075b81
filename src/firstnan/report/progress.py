"""How far the trials are: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how many of the fixes were tried, and about how long the rest will take."""

    def __init__(self, count: int, stream: TextIO | None = None) -> None:
        self._stream, self._count, self._done, self._began = stream or sys.stderr, count, 0, time.monotonic()
        self._bar: Bar | None = None
        fixes = "1 fix" if count == 1 else f"up to {count} fixes"
        if self._stream.isatty():
            console = Console(file=self._stream)
            columns = (TextColumn("firstnan:"), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
            # Drawn only when something has changed: a separate thread would interfere with forked trials.
            self._bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True, auto_refresh=False)
            self._bar.add_task(f"trying {fixes} (Ctrl-C skips this)", total=count)
            self._bar.start()
            self._bar.refresh()
        else:
            self._say(f"trying {fixes}, without touching your files (Ctrl-C skips this)")

    def tried(self, count: int) -> None:
        """So many were tried until now."""
        if count == self._done:
            return
        self._done = count
        left = (time.monotonic() - self._began) / count * (self._count - count)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=count, refresh=True)
        elif left > 10:
            self._say(f"{count} of {self._count} tried, at most {left:.0f} s left")

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _say(self, text: str) -> None:
        self._stream.write(f"firstnan: {text}\n")
        self._stream.flush()
