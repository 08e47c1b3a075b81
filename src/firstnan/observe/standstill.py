"""The program's alarm clocks and its signal handlers while the program stands still."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_standing: dict[int, int] = {}
"""The threads in which the program stands still, and how often."""


@contextlib.contextmanager
def timers_stopped(*, over: bool = False) -> Iterator[None]:
    """Stops `signal.alarm` and `setitimer`: an investigation takes longer than the step that they are set for.

    For good if the program is `over` and we have stopped it: the alarm was set for its next step, and python's end, in
    which there is no handler any more, may take longer than what is left.

    The clock of `faulthandler`, which ends the process, cannot be asked what is left of its time.
    """
    process, (left, interval) = os.getpid(), signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler = sys.modules.get("faulthandler")
    if faulthandler is not None:
        faulthandler.cancel_dump_traceback_later()
    me = threading.get_ident()
    _standing[me] = _standing.get(me, 0) + 1
    try:
        yield
    finally:
        _standing[me] -= 1
        ended = sys.modules.get("firstnan.observe.ending")
        is_over = over and ended is not None and ended.Stopped.is_here()
        if left and os.getpid() == process and not is_over:  # a forked child has none
            signal.setitimer(signal.ITIMER_REAL, left, interval)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses Python's garbage collector: where it has run, all objects would have to be visited for the next child."""
    process, ran = os.getpid(), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran and os.getpid() == process:  # never in a forked child, where it would copy all memory
            gc.enable()


def wait_for_standstill() -> None:
    """Waits while the program stands still in another thread, and forever if it is to end there.

    For a watchdog of the program's, which ends the process if a step takes too long.
    """
    me, ending = threading.get_ident(), sys.modules.get("firstnan.observe.ending")
    while any(count for thread, count in list(_standing.items()) if thread != me) or (
        ending is not None and ending.Stopped.is_here() and threading.current_thread() is not threading.main_thread()
    ):
        time.sleep(0.05)


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
