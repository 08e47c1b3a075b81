"""Calls a function at the beginning of every thread that Python starts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class NewThreads:
    """While it is on, `act` is called in every thread that is started, before the thread does anything else."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._before: Any = None
        self._hook: Callable[..., Any] | None = None

    def begin(self) -> None:
        self._before, self._hook = threading.gettrace(), self._started
        threading.settrace(self._hook)

    def end(self) -> None:
        if self._hook is not None and threading.gettrace() is self._hook:
            threading.settrace(self._before)

    def _started(self, frame: FrameType, event: str, arg: Any) -> Any:
        # The thread's lines are not followed, unless someone else wants that.
        sys.settrace(self._before)
        self._act()
        return self._before(frame, event, arg) if self._before is not None else None
