"""Processes that train together: what each of them has found, and one answer for all.

They talk through the store by which they have found each other, never by a collective: a process that trains on, hangs
or is gone is waited for only so long.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from firstnan.records import RankFinding, Report

_PATIENCE = 20.0
"""Seconds that a process which has found something waits for what the others have found."""
_LONGEST = 900.0
"""Seconds that it waits for the one that tries the fixes."""
_POLL = 0.05
_KEY, _DONE, _ANSWER = "firstnan/found/{}", "firstnan/done", "firstnan/answer"
RECEIVED = "collective"
"""The cause where a value came from another rank."""


class World(NamedTuple):
    rank: int = 0
    size: int = 1
    is_alone: bool = True
    """Whether a step can be run again here: other processes would not take part in its collectives."""


def world() -> World:
    """As it is now: a program joins others at any time."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, size = distributed.get_rank(), distributed.get_world_size()
        return World(rank, size, size == 1 or _is_cut_off(distributed))
    with contextlib.suppress(ValueError):
        rank, size = int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)
        if 0 <= rank < size:
            return World(rank, size)
    return World()


def _is_cut_off(distributed: Any) -> bool:
    """Whether this is a forked child, whose groups lead to nobody."""
    group = distributed.group.WORLD
    backend = group._get_backend(group._device_types[0])
    return type(backend).__name__ == "FakeProcessGroup"


def meet(where: str) -> bool:
    """Whether every rank has come here; all of them get the same answer."""
    distributed = sys.modules["torch.distributed"]
    store, size = distributed.distributed_c10d._get_default_store(), world().size
    came, verdict = f"firstnan/came/{where}", f"firstnan/verdict/{where}"
    until, count = time.monotonic() + _PATIENCE, store.add(came, 1)
    while count < size and time.monotonic() < until and not store.check([verdict]):
        time.sleep(_POLL)
        count = store.add(came, 0)
    # The first to decide decides for all: one that has waited too long must not leave the others alone.
    return bool(store.compare_set(verdict, "", "yes" if count >= size else "no") == b"yes")


class Ranks:
    """This process among those that train together."""

    def __init__(self) -> None:
        self._world = World()
        self._store: Any = None
        self._found: dict[int, Report] = {}
        """What each rank has found, as far as it has said so."""

    def join(self) -> None:
        """Remembers the others, as long as the program knows them."""
        now = world()
        self._world = now if now.size >= self._world.size else self._world
        distributed = sys.modules.get("torch.distributed")
        if self._store is None and not now.is_alone and distributed is not None:
            self._store = distributed.distributed_c10d._get_default_store()

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def are_many(self) -> bool:
        return self._world.size > 1

    @property
    def writes_for_all(self) -> bool:
        """Whether this rank writes the answer of all: rank 0, or the first to fail if rank 0 has not said a word."""
        return self.rank == 0 or (0 not in self._found and bool(self._found) and self.first().rank == self.rank)

    def path(self, path: Path) -> Path:
        """This rank's own file."""
        return path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")

    def placed(self, report: Report) -> Report:
        return replace(report, rank=self._world.rank, world_size=self._world.size)

    def exchange(self, report: Report) -> Report:
        """Tells the others what was found here, waits for what they have found; returns the first failure of all."""
        self._found[self.rank] = report
        self._post(_KEY.format(self.rank), report)
        for _ in self._waiting(_PATIENCE):
            self._listen()
            if len(self._found) == self._world.size:
                break
        return self.first()

    def first(self) -> Report:
        """The first failure, with what every rank has found."""
        best = min(self._found.values(), key=_order)
        others = tuple(
            _finding(rank, self._found.get(rank))
            for rank in sorted({*self._found, *range(min(self._world.size, _MOST_LISTED))})
        )
        return replace(best, ranks=others)

    def look(self) -> Report | None:
        """The first failure that other ranks have told of until now."""
        self._listen()
        return self.first() if self._found else None

    def settle(self, report: Report) -> None:
        """The first of them has ended its trials: this is the answer for all."""
        self._post(_ANSWER, report)
        with contextlib.suppress(Exception):
            self._store.set(_DONE, b"1")

    def answer(self) -> Report | None:
        """The answer for all, once it is complete; None if it does not come."""
        for _ in self._waiting(_LONGEST):
            with contextlib.suppress(Exception):
                if self._store.check([_DONE]):
                    return self._read(_ANSWER)
        return None

    def _waiting(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while self._store is not None and time.monotonic() < until:
            yield
            time.sleep(_POLL)

    def _listen(self) -> None:
        if self._store is None:
            return
        for rank in range(self._world.size):
            if rank not in self._found and (report := self._read(_KEY.format(rank))) is not None:
                self._found[rank] = report

    def _post(self, key: str, report: Report) -> None:
        with contextlib.suppress(Exception):  # the store is gone with the process that held it
            self._store.set(key, json.dumps(report.to_dict()))

    def _read(self, key: str) -> Report | None:
        with contextlib.suppress(Exception):
            if self._store.check([key]):
                return Report.from_dict(json.loads(self._store.get(key)))
        return None


_MOST_LISTED = 64


def _order(report: Report) -> tuple[int, int, int]:
    """Earlier steps first; in a step, what was created on a rank before what is unknown, or came from another.

    A loss is this rank's own; gradients may be those of all.
    """
    received = report.cause is not None and report.cause.slug == RECEIVED
    own = report.noticed is not None and report.noticed.what == "loss"
    kind = 3 if received else 0 if report.origin is not None else 1 if own else 2
    return (report.step if report.step is not None else sys.maxsize, kind, report.rank)


def _finding(rank: int, report: Report | None) -> RankFinding:
    if report is None:
        return RankFinding(rank, "unknown")
    if report.cause is not None and report.cause.slug == RECEIVED:
        return RankFinding(rank, "received", report.step)
    site = report.origin.site if report.origin is not None else None
    where = f"{site.file}:{site.line}" if site is not None else ""
    return RankFinding(rank, "created" if report.origin is not None else "noticed", report.step, where)
