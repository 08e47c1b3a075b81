"""The event log: which events it keeps, logs and passes on."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import pytest

from firstnan.engine.journal import EventLog
from firstnan.records import NaNEvent


def event(n: int = 0, **fields: Any) -> NaNEvent:
    return NaNEvent(**{"kind": "spike", "message": f"event {n}", "step": n, **fields})


def steps(log: EventLog) -> list[int | None]:
    return [e.step for e in log]


@pytest.mark.parametrize("most", [0, 1, 2, 7, 10, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 9, 10, 11, 60])
def test_the_first_and_the_last_are_kept(most: int, count: int) -> None:
    log = EventLog(most)
    for n in range(count):
        log.add(event(n))
    every = list(range(count))
    first = (most + 1) // 2
    expected = every if count <= most else every[:first] + every[count - most // 2 :]
    assert steps(log) == expected
    assert len(log) == len(expected)
    assert log.dropped == count - len(expected)


def test_a_cleared_log_starts_over() -> None:
    log = EventLog(2)
    for n in range(5):
        log.add(event(n))
    log.clear()
    assert (steps(log), len(log), log.dropped) == ([], 0, 0)
    log.add(event(7))
    assert steps(log) == [7]


def test_a_log_is_a_sequence() -> None:
    log = EventLog(4)
    for n in range(9):
        log.add(event(n))
    assert (log[0].step, log[-1].step, log[2].step) == (0, 8, 7)
    assert [e.step for e in log[1:3]] == [1, 7]
    assert [e.step for e in log[::-1]] == [e.step for e in reversed(log)] == [8, 7, 1, 0]
    assert log[1] in log
    with pytest.raises(IndexError):
        log[4]


def test_a_negative_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        EventLog(-1)


def test_iterating_sees_a_copy() -> None:
    log = EventLog(4)
    log.add(event(0))
    for e in log:
        log.add(event(e.step + 1 if e.step is not None else 0))
    assert steps(log) == [0, 1]


def test_threads_lose_nothing() -> None:
    told: list[int | None] = []
    log = EventLog(10, lambda e: told.append(e.step))

    def work(thread: int) -> None:
        for n in range(200):
            log.add(event(1000 * thread + n))
            list(log)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert len(log) == 10
    assert log.dropped == 790
    assert sorted(n for n in told if n is not None) == sorted(1000 * t + n for t in range(4) for n in range(200))


LEVELS = [({"kind": kind}, logging.WARNING) for kind in ("spike", "explosion", "skipped", "rolled_back", "clipped")] + [
    ({"kind": "nonfinite", "phase": "forward", "what": "output", "layer": "fc"}, logging.INFO),
    ({"kind": "nonfinite", "phase": "backward", "what": "input", "layer": "fc"}, logging.INFO),
    ({"kind": "nonfinite", "phase": "forward", "what": "loss"}, logging.WARNING),
    ({"kind": "nonfinite", "phase": "forward", "what": "input"}, logging.WARNING),  # the batch itself
    ({"kind": "nonfinite", "phase": "backward", "what": "gradient", "layer": "fc.weight"}, logging.WARNING),
    ({"kind": "skipped", "phase": "forward", "what": "output", "layer": "fc"}, logging.WARNING),
]


@pytest.mark.parametrize(("fields", "level"), LEVELS)
def test_log_level_of_an_event(fields: dict[str, Any], level: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "firstnan")
    log = EventLog()
    log.add(event(message="100 % of it {}", **fields))
    log.add(event(**fields), level=logging.ERROR)
    assert [(r.name, r.levelno) for r in caplog.records] == [("firstnan", level), ("firstnan", logging.ERROR)]
    assert caplog.records[0].getMessage() == "firstnan: 100 % of it {}"


def test_a_failing_callback_is_reported_once_and_still_called(caplog: pytest.LogCaptureFixture) -> None:
    told = []

    def fails(e: NaNEvent) -> None:
        told.append(e.step)
        raise ZeroDivisionError("mine")

    log = EventLog(on_event=fails)
    for n in range(3):
        log.add(event(n))
    assert told == [0, 1, 2]
    said = [r for r in caplog.records if "on_event" in r.getMessage()]
    assert len(said) == 1
    assert said[0].exc_info is not None
    assert said[0].exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_keyboard_interrupt_and_exit_pass_through(stop: type[BaseException]) -> None:
    def stops(_: NaNEvent) -> None:
        raise stop

    log = EventLog(on_event=stops)
    for n in range(2):  # the second time too: nothing is left half done
        with pytest.raises(stop):
            log.add(event(n))
    assert steps(log) == [0, 1]


def test_the_callback_may_use_the_log_and_cause_events() -> None:
    told: list[tuple[int | None, int]] = []

    def curious(e: NaNEvent) -> None:
        told.append((e.step, len(log)))
        log.add(event(100))  # as running the model once more would

    log = EventLog(on_event=curious)
    log.add(event(0))
    log.add(event(1))
    assert told == [(0, 1), (1, 3)]
    assert steps(log) == [0, 100, 1, 100]


def test_a_log_handler_that_fails_stops_nothing() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("disk full")

    handler = Broken()
    logging.getLogger("firstnan").addHandler(handler)
    told: list[NaNEvent] = []
    try:
        log = EventLog(on_event=told.append)
        log.add(event(0))
    finally:
        logging.getLogger("firstnan").removeHandler(handler)
    assert len(log) == len(told) == 1
