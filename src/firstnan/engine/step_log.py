"""Hands the numbers of each step, and events, to where the program logs: a sink of `integrations/`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from firstnan.records import NaNEvent, Report, StepRecord
from firstnan.records.words import headline

if TYPE_CHECKING:
    from firstnan.engine.session import Session

_MOST_WAITING = 64
_LONGEST_WAIT = 2.0
"""Steps, and seconds, after which what is known is written."""


class NumberSink(Protocol):
    """Where numbers and events are written."""

    def steps(self, rows: Sequence[tuple[str, StepRecord]]) -> None:
        """The numbers of some steps, oldest first, each with the name of its optimizer; empty if it is the only one."""

    def event(self, event: NaNEvent) -> None: ...


class StepLog:
    """Collects a few steps and writes them together; a sink that raises is not used again."""

    def __init__(self, sink: NumberSink) -> None:
        self._sink, self._rows = sink, list[tuple[str, StepRecord]]()
        self._written = time.monotonic()
        self._process = os.getpid()
        self._failed = False
        self._latest = -1
        """The last step that was added."""

    def add(self, session: Session) -> None:
        """A step is over."""
        if self._failed or os.getpid() != self._process:
            return
        known = session.gate.last_step()
        if known is None:
            return
        self._rows.append(known)
        self._latest = known[1].step
        if len(self._rows) >= _MOST_WAITING or time.monotonic() > self._written + _LONGEST_WAIT:
            self.flush()

    def failed(self, report: Report) -> None:
        """The failing step of a program that is ended by it: what is known of it, and what has happened."""
        known = [record for record in report.history.steps[-1:] if self._latest < record.step == report.step]
        self._rows += [("", record) for record in known]
        self.event(NaNEvent("nonfinite", headline(report), report.step, time=time.time()))

    def event(self, event: NaNEvent) -> None:
        if os.getpid() == self._process:
            self.flush()
            self._write(self._sink.event, event)

    def flush(self) -> None:
        """Writes what waits."""
        rows, self._rows, self._written = self._rows, [], time.monotonic()
        if rows and os.getpid() == self._process:
            self._write(self._sink.steps, rows)

    def _write(self, act: object, what: object) -> None:
        if self._failed:
            return
        try:
            act(what)  # type: ignore[operator]  # one of the two functions of a sink
        except Exception as error:  # a full disk or a lost connection must not stop training
            self._failed = True
            text = "firstnan: stopped logging to %s: %s: %s"
            logging.getLogger("firstnan").warning(text, type(self._sink).__name__, type(error).__name__, error)
