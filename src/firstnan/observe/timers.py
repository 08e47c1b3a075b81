"""The program's alarm clock, which stands still while the program does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def timers_stopped() -> Iterator[None]:
    """Stops `signal.alarm` and `setitimer`: an investigation takes longer than the step that they are set for."""
    process, (left, interval) = os.getpid(), signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        if left and os.getpid() == process:  # a forked child has none
            signal.setitimer(signal.ITIMER_REAL, left, interval)
