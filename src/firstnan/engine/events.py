"""The events of a detector: logs them, calls the user's function, and keeps the first and the last ones."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import overload

from firstnan.records import NaNEvent

_LOGGER = logging.getLogger("firstnan")


class EventLog(Sequence[NaNEvent]):
    """Keeps half of `max_events` from the beginning and half from the end; any thread may add events.

    `on_event` is called for every event, in the thread that noticed it, but not for events that it causes itself.
    """

    def __init__(self, max_events: int = 1000, on_event: Callable[[NaNEvent], None] | None = None) -> None:
        self._most_first = (max_events + 1) // 2
        self._first: list[NaNEvent] = []
        self._last: deque[NaNEvent] = deque(maxlen=max_events // 2)
        self._seen = 0
        self._lock = threading.Lock()
        self._on_event = on_event
        self._callback_failed = False
        self._telling = threading.local()

    def add(self, event: NaNEvent, *, level: int | None = None) -> None:
        """Keeps the event, logs it (at `level`, or at the level of its kind), and calls the callback."""
        with self._lock:
            self._seen += 1
            (self._first if len(self._first) < self._most_first else self._last).append(event)
        _say(_level(event) if level is None else level, event.message)
        if self._on_event is not None and not hasattr(self._telling, "now"):
            self._tell(self._on_event, event)

    def _tell(self, callback: Callable[[NaNEvent], None], event: NaNEvent) -> None:
        """Runs outside the lock, since the callback may use the detector or run the model."""
        self._telling.now = True
        try:
            callback(event)
        except Exception:
            if not self._callback_failed:
                self._callback_failed = True
                _say(
                    logging.ERROR,
                    "on_event raised an exception; training continues, and further exceptions are not logged",
                    trace=True,
                )
        finally:
            del self._telling.now

    @property
    def dropped(self) -> int:
        """The number of events between the first and the last ones that were not kept."""
        with self._lock:
            return self._seen - len(self._first) - len(self._last)

    @overload
    def __getitem__(self, at: int) -> NaNEvent: ...
    @overload
    def __getitem__(self, at: slice) -> list[NaNEvent]: ...
    def __getitem__(self, at: int | slice) -> NaNEvent | list[NaNEvent]:
        return list(self)[at]

    def __iter__(self) -> Iterator[NaNEvent]:
        with self._lock:
            return iter([*self._first, *self._last])

    def __len__(self) -> int:
        with self._lock:
            return len(self._first) + len(self._last)

    def clear(self) -> None:
        with self._lock:
            self._first.clear()
            self._last.clear()
            self._seen = 0


def _level(event: NaNEvent) -> int:
    """The log level of an event. Layer events are often harmless: masks, values that never reach the loss."""
    harmless = event.kind == "nonfinite" and event.layer and event.what in ("input", "output")
    return logging.INFO if harmless else logging.WARNING


def _say(level: int, message: str, *, trace: bool = False) -> None:
    with contextlib.suppress(Exception):  # a failing log handler of the user's must not stop training
        _LOGGER.log(level, "firstnan: %s", message, exc_info=trace)
