"""The program's alarm clock and its signal handlers while the program stands still."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


@contextlib.contextmanager
def timers_stopped() -> Iterator[None]:
    """Stops `signal.alarm` and `setitimer`: an investigation takes longer than the step that they are set for."""
    process, (left, interval) = os.getpid(), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left and os.getpid() == process:  # a forked child has none
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextlib.contextmanager
def own_handlers_interrupt() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what is done here, also where the program only takes note of them, to stop soon."""
    process, changed = os.getpid(), dict[signal.Signals, Any]()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler) and handler is not signal.default_int_handler and not _is_ours(handler):
                changed[number] = handler
                signal.signal(number, _interrupting(handler))
    try:
        yield
    finally:
        for number, handler in changed.items():
            if os.getpid() == process:  # Ctrl-C is not for a forked child
                signal.signal(number, handler)


def _is_ours(handler: Any) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("firstnan.")


def _interrupting(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        handler(number, frame)
        raise KeyboardInterrupt

    return interrupt
