"""Processes that the program starts itself: those that train are watched too, and send their reports here."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from firstnan.engine.ranks import RECEIVED, Ranks, answer_of
from firstnan.observe.runner import tell_spawned, when_imported
from firstnan.observe.sites import Ownership
from firstnan.records import Report
from firstnan.records.codec import ReportError
from firstnan.records.words import headline


class WorkerReports:
    """Reports of other processes, which append them to one open file that has no name."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - as long as the program runs
        self._process = os.getpid()

    def add(self, report: Report) -> None:
        append(self._file.fileno(), report)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is not the one that collects the reports."""
        return os.getpid() != self._process

    def watch_spawned(self, directories: tuple[str, ...], *, tries: bool) -> None:
        """Spawned processes start from nothing, and have to be told to watch themselves; `tries`: and to try fixes."""
        tell_spawned(_Watched(self._process, self._file.fileno(), directories, tries))

    def first(self) -> Report | None:
        """The last report of the worker that was the first to send one; of ranks, the answer of all."""
        self._file.seek(0)
        found: dict[int, Report] = {}
        for line in self._file:
            try:
                process, data = json.loads(line)
                found[process] = Report.from_dict(data)
            except (ValueError, ReportError):
                continue
        first = next(iter(found.values()), None)
        if first is None or first.world_size == 1:
            return first
        return answer_of(report for report in found.values() if report.world_size == first.world_size)


def append(number: int, report: Report) -> None:
    os.write(number, json.dumps([os.getpid(), report.to_dict()]).encode() + b"\n")


def announce(report: Report) -> None:
    """Says at once that this process has found something, which may be hours before its program ends."""
    received = report.cause is not None and report.cause.slug == RECEIVED
    if not received and Ranks().says_first("failure"):
        later = "the process goes on, and the report is printed when the program ends"
        print(f"firstnan: in a process that the program has started: {headline(report)}; {later}", file=sys.stderr)


class _Watched:
    """Sent to a spawned process with its first data; unpickling it there begins a watch."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return watch_this_process, self._parts


def watch_this_process(parent: int, number: int, directories: tuple[str, ...], tries: bool) -> None:
    """Watches a spawned process from the moment it imports torch."""

    def save(report: Report) -> None:
        opened = os.open(f"/proc/{parent}/fd/{number}", os.O_WRONLY | os.O_APPEND)
        try:
            append(opened, report)
        finally:
            os.close(opened)

    def begin() -> None:
        from firstnan.engine.program_watch import watch_worker

        watch_worker(Ownership(directories), save, tries=tries)

    when_imported("torch", begin)
