"""A rank that has found something while others have not: what it does if they do not come, or if its launcher ends it.

Its own thread may be held in a collective of the program, where no Python code runs, so another thread prints.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_ANSWERED_WITHIN = 20.0
"""Seconds after which a store that does not answer counts as gone: the process that holds it may be stopped."""
_RELEASED = 0
"""What is sent to the thread that waits, in place of the number of a signal."""


class Termination:
    """Puts SIGTERM off once a failure was found: a launcher ends all ranks as soon as one of them has ended.

    It kills the process if that takes long (torchrun: 30 seconds), which is enough to print what was found.
    """

    def __init__(self) -> None:
        self.asked = self.is_put_off = False
        """Whether SIGTERM has come, and whether it is for us to obey it."""
        self._interrupts = False
        self._process = os.getpid()

    def put_off(self) -> None:
        """From now on SIGTERM only sets `asked`, unless the program has a handler of its own."""
        if self.is_put_off or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._came)
            self.is_put_off = True

    def _came(self, number: int, frame: Any) -> None:
        if os.getpid() != self._process:  # a child, which nobody waits for
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = True
        if self._interrupts:
            raise KeyboardInterrupt

    def obey(self, *, goes_on: bool) -> None:
        """Everything is said: SIGTERM ends the process again. `goes_on`: nothing else would end it."""
        if self.is_put_off:
            self.is_put_off = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self.asked and goes_on:
                os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """SIGTERM ends what is done here as Ctrl-C does."""
        if self.asked:
            raise KeyboardInterrupt
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False


class HeldRank:
    """Calls `late` if the program's own thread is still held after some seconds, and `ended` if SIGTERM comes then."""

    def __init__(self, seconds: float, late: Callable[[], None], ended: Callable[[], None]) -> None:
        self._late, self._ended = late, ended
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._former: int | None = None
        with contextlib.suppress(ValueError):  # only the main thread hears of signals
            self._former = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._until: float | None = time.monotonic() + seconds
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            left = None if self._until is None else max(self._until - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._reading], [], [], left)
            if not ready:
                self._until = None
                self._late()
                continue
            sent = self._reading.recv(64)
            if not sent or _RELEASED in sent:
                return
            if signal.SIGTERM in sent:
                self._ended()

    def release(self) -> None:
        """The program's own thread goes on; what is being printed is printed to its end."""
        if self._former is not None:
            signal.set_wakeup_fd(self._former)
        with contextlib.suppress(OSError):
            self._writing.send(bytes([_RELEASED]))
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._reading.close()
        self._writing.close()


class LimitedStore:
    """A store of torch whose calls end after some seconds, even if the process that holds it has been stopped."""

    def __init__(self, store: Any) -> None:
        self._store, self.is_gone = store, False
        self._calls: queue.SimpleQueue[tuple[Any, queue.SimpleQueue[Any]]] | None = None

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._store, name)

        def call(*args: Any) -> Any:
            return self._called(lambda: function(*args))

        return call

    def _called(self, act: Callable[[], Any]) -> Any:
        if self.is_gone:
            raise TimeoutError("the store of the process group does not answer")
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=self._serve, args=(self._calls,), daemon=True).start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((act, answer))
        try:
            result, error = answer.get(timeout=_ANSWERED_WITHIN)
        except queue.Empty:
            self.is_gone = True
            raise TimeoutError("the store of the process group does not answer") from None
        if error is not None:
            raise error
        return result

    def _serve(self, calls: queue.SimpleQueue[tuple[Any, queue.SimpleQueue[Any]]]) -> None:
        while True:
            act, answer = calls.get()
            try:
                answer.put((act(), None))
            except Exception as error:
                answer.put((None, error))
