"""Ends what waits for a program that we have stopped.

After its loop the program would have told its threads and processes that there is no more work, or its main thread that
the result is there. Stopped inside the loop it does not, and they would wait forever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

IDLE = 5.0
"""Seconds without processor time after which a wait is in vain."""
_TO_END = 5.0
"""Seconds that a process has to end after it was interrupted."""
_TICK = 0.05
_BUSY = 0.05
"""The share of a processor that our own looking may take."""


class Stopped:
    """That the program was stopped, for the rest of this process."""

    process = 0
    """The one in which it was."""
    released_main = False
    """Whether the main thread was interrupted, since it waited in vain."""

    @classmethod
    def is_here(cls) -> bool:
        return cls.process == os.getpid()


def stop_begins() -> None:
    """This thread is about to raise the exception that ends the program, or itself if it is not the main thread."""
    Stopped.process = os.getpid()
    if threading.current_thread() is not threading.main_thread():
        threading.Thread(target=_release_main, name="firstnan", daemon=True).start()


def _release_main() -> None:
    """Interrupts the main thread as Ctrl-C does if it waits for a thread that was stopped."""
    main = threading.main_thread()

    def waits() -> bool:
        frames = sys._current_frames()
        others = [t for t in threading.enumerate() if t is not main and t.name != "firstnan" and not _is_of_pool(t)]
        all_wait = all(_waits(frames.get(t.ident or 0)) for t in others)
        return all_wait and _waits(frames.get(main.ident or 0), forever=True)

    while main.is_alive():
        if _idles(waits, _worker_numbers):
            Stopped.released_main = True
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(_TICK)


def threads_wait_in_vain() -> bool:
    """Waits for the threads that python waits for at its end; whether some are left that nobody will wake."""

    def left() -> list[threading.Thread]:
        mine = threading.main_thread()
        return [t for t in threading.enumerate() if not (t is mine or t.daemon or _is_of_pool(t))]

    def wait() -> bool:
        frames = sys._current_frames()
        return all(_waits(frames.get(t.ident or 0), forever=True) for t in left())

    while left():
        if _idles(lambda: bool(left()) and wait()):
            return True
        time.sleep(_TICK)
    return False


def interrupt_idle_workers() -> None:
    """Interrupts processes of `multiprocessing` that python waits for at its end, once all only wait for others.

    As by Ctrl-C, so they close their files; those that go on are told to end.
    """

    def all_wait() -> bool:
        numbers = _worker_numbers()
        return bool(numbers) and all(map(_waits_for_others, numbers))

    while not _idles(all_wait, _worker_numbers):
        if not _workers():
            return
        time.sleep(_TICK)
    for number in (signal.SIGINT, signal.SIGTERM):
        for worker in _workers():
            with contextlib.suppress(OSError):
                os.kill(worker.pid, number)
        _idles(lambda: bool(_workers()), _worker_numbers, _TO_END)


def _waits_for_others(process: int) -> bool:
    """Whether all threads of a process wait for a pipe or a lock; one that sleeps or waits for a server will go on."""
    try:
        places = [(task / "wchan").read_text() for task in Path(f"/proc/{process}/task").iterdir()]
    except OSError:
        return False
    return all("pipe" in place or "futex" in place or "unix" in place for place in places)


def _workers() -> list[Any]:
    known: Any = sys.modules.get("multiprocessing.process")
    return [one for one in list(known._children) if not one.daemon and one.is_alive()] if known is not None else []


def _worker_numbers() -> list[int]:
    return [worker.pid for worker in _workers()]


def _idles(
    is_so: Callable[[], bool], processes: Callable[[], Iterable[int]] = tuple, seconds: float | None = None
) -> bool:
    """Waits while something is so; whether it stays so for long without any processor time being used."""
    used, since = -1.0, time.monotonic()
    while is_so():
        now = sum(map(_processor_time, (os.getpid(), *processes())))
        if not 0 <= now - used < 0.02 + _BUSY * (time.monotonic() - since):
            used, since = now, time.monotonic()
        elif time.monotonic() - since > (IDLE if seconds is None else seconds):
            return True
        time.sleep(_TICK)
    return False


def _processor_time(process: int) -> float:
    if process == os.getpid():
        return time.process_time()
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or this is another system: it is never idle then
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _waits(frame: FrameType | None, *, forever: bool = False) -> bool:
    """Whether a thread waits for another one: for a lock, an event, a queue."""
    if frame is None or frame.f_code.co_filename != threading.__file__:
        return False
    return not forever or frame.f_locals.get("timeout", 0) in (None, -1)


def _is_of_pool(thread: threading.Thread) -> bool:
    """Whether it belongs to an executor, which tells it at python's end that there is no more work."""
    pools: Any = sys.modules.get("concurrent.futures.thread")
    return pools is not None and thread in pools._threads_queues
