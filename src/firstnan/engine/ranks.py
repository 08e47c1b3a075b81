"""Processes that train together: what each of them has found, and one answer for all.

They talk through the store by which they have found each other, never by a collective: a process that trains on, hangs
or is gone is waited for only so long. What a rank sends does not grow with the number of ranks; one of them reads what
all have found.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from firstnan.diagnose.rules import on_no_rank
from firstnan.engine.waiting import LimitedStore, Termination
from firstnan.records import RankFinding, Report

_PATIENCE = 20.0
"""Seconds that a process which has found something waits for what the others have found."""
_RANKS_PER_SECOND = 1000
"""One second more for so many ranks: the store takes what they say one after the other."""
_LONGEST = 900.0
"""Seconds that it waits for the one that tries the fixes."""
_LATER = 1.0
"""Seconds by which the others outlive the first of them, so that the launcher names that one."""
_POLL = 0.05
_ASKED_PER_SECOND = 10_000
"""How often all ranks together may ask the store, which is one process."""
_ASKED_AFTER = 30
"""How many times as long as the last answer has taken a rank waits before it asks again: a slow store is busy."""
_AT_MOST = 4
"""How many times as long as usual that may be."""
_MOST_LISTED = 64
_READ_AT_ONCE = 1024
_FOUND, _COUNT, _DECIDES, _FIRST = "firstnan/found/{}", "firstnan/count", "firstnan/decides", "firstnan/first"
_LIST, _ANSWER, _WRITTEN, _OVER = "firstnan/list", "firstnan/answer", "firstnan/written", "firstnan/over"
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
    store, here = _default_store(), world()
    # Another training of the same process may have met in a step of the same number.
    round_, place = divmod(store.add(f"firstnan/came/{where}", 1) - 1, here.size)
    verdict, came = f"firstnan/verdict/{where}/{round_}", place == here.size - 1
    for _ in () if came else _waiting(_patience(here.size), here):
        if store.check([verdict]):
            break
    # The first to decide decides for all: one that has waited too long must not leave the others alone.
    return bool(store.compare_set(verdict, "", "yes" if came else "no") == b"yes")


def _patience(size: int) -> float:
    """Seconds that this many ranks are waited for."""
    return _PATIENCE + size / _RANKS_PER_SECOND


def _default_store() -> LimitedStore:
    """The store by which the processes have found each other."""
    return LimitedStore(sys.modules["torch.distributed"].distributed_c10d._get_default_store())


def _waiting(seconds: float, here: World, ended: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Again and again until the time is over or the process is to end.

    Less often the more ranks there are and the longer the store takes, and not all ranks at the same moments.
    """
    began = now = time.monotonic()
    usual, took = max(_POLL, here.size / _ASKED_PER_SECOND), 0.0
    while now < began + seconds and not ended():
        pause = min(max(usual, _ASKED_AFTER * took), _AT_MOST * usual)
        time.sleep(min(pause * (0.75 + here.rank * 0.618 % 0.5), began + seconds - now))
        asked = time.monotonic()
        yield
        now = time.monotonic()
        took = now - asked


class Ranks:
    """This process among those that train together."""

    def __init__(self, here: World | None = None, store: Any = None) -> None:
        self._world, self._store = here or World(), store
        self.termination = Termination()
        self._listed: tuple[RankFinding, ...] = ()
        """What the ranks have found, as far as they have said so; only the first to fail knows it."""
        self.is_first = self._has_settled = False
        """Whether the failure of this rank was the first of all, and whether the others have the answer."""

    def join(self) -> None:
        """Remembers the others, as long as the program knows them."""
        now = world()
        self._world = now if now.size >= self._world.size else self._world
        if self._store is None and not now.is_alone and "torch.distributed" in sys.modules:
            self._store = _default_store()

    @property
    def rank(self) -> int:
        return self._world.rank

    @property
    def are_many(self) -> bool:
        return self._world.size > 1

    @property
    def patience(self) -> float:
        """Seconds that others are waited for."""
        return _patience(self._world.size)

    @property
    def hangs_in_store(self) -> bool:
        """Whether a thread still waits for the store, which does not answer."""
        return isinstance(self._store, LimitedStore) and self._store.is_gone

    @property
    def writes_for_all(self) -> bool:
        """Whether this rank writes the answer of all: rank 0, and the first to fail, which may be on another host."""
        return self.rank == 0 or self.is_first

    def path(self, path: Path) -> Path:
        """This rank's own file."""
        return path.with_name(f"{path.stem}.rank{self.rank}{path.suffix}")

    def placed(self, report: Report) -> Report:
        return replace(report, rank=self._world.rank, world_size=self._world.size)

    def exchange(self, report: Report) -> Report | None:
        """Tells the others what was found here, and waits for what they have found.

        Returns the report with what every rank has found, if this was the first failure of all; otherwise None.
        """
        first = self.rank
        with contextlib.suppress(Exception):  # the store is gone with the process that held it
            if self._store is not None:
                first = self._first_of_all(report)
        self.is_first = first == self.rank
        if not self.is_first:
            return None
        with contextlib.suppress(Exception):
            self._listed = tuple(RankFinding(**one) for one in json.loads(self._store.get(_LIST)))
        ranks = self._listed or (_finding(self.rank, report),)
        if len(ranks) == self._world.size and all(one.what == "received" for one in ranks):
            named = self.rank if _is_own(report) else None
            report = replace(report, cause=on_no_rank(self._world.size, named), reproduced="transient")
        return replace(report, ranks=ranks)

    def _first_of_all(self, report: Report) -> int:
        found = {"order": _order(report), **asdict(_finding(self.rank, report))}
        self._store.set(_FOUND.format(self.rank), json.dumps(found))
        is_last = self._store.add(_COUNT, 1) >= self._world.size
        if not is_last and (first := self._awaited(_FIRST, self.patience)) is not None:
            return int(first)
        # The last to come, or the first that has waited too long, decides; it may be gone before it has.
        if self._store.compare_set(_DECIDES, "", str(self.rank)) == str(self.rank).encode():
            self._decide()
        first = self._awaited(_FIRST, self.patience)
        return self.rank if first is None else int(first)

    def _decide(self) -> None:
        """Names the first of all, and lists what each has found: what is not like the others before the rest."""
        found = list(self._found())
        first = min(found, key=lambda one: one["order"])["rank"]
        known = {one["rank"]: RankFinding(**{k: v for k, v in one.items() if k != "order"}) for one in found}
        ranks = [known.get(rank) or RankFinding(rank, "unknown") for rank in range(self._world.size)]
        ranks.sort(key=lambda one: (one.rank != first, one.what == "received"))
        listed = sorted(ranks[:_MOST_LISTED], key=lambda one: one.rank)
        self._store.set(_LIST, json.dumps([asdict(one) for one in listed]))
        self._store.set(_FIRST, str(first))

    def _found(self) -> Iterable[dict[str, Any]]:
        """What the ranks have said so far."""
        store, keys = self._store, [_FOUND.format(rank) for rank in range(self._world.size)]
        for at in range(0, len(keys), _READ_AT_ONCE):
            some = keys[at : at + _READ_AT_ONCE]
            if not store.check(some):  # not all of them have come
                some = [key for key in some if store.check([key])]
            at_once = store.has_extended_api() and some
            yield from map(json.loads, store.multi_get(some) if at_once else (store.get(key) for key in some))

    def settle(self, report: Report) -> None:
        """The first of them has said everything: this is the answer for all."""
        if self._store is None or self._has_settled:
            return
        self._has_settled = True
        with contextlib.suppress(Exception):
            self._store.set(_ANSWER, json.dumps(report.to_dict()))
            if self.rank and any(one.rank == 0 and one.what != "unknown" for one in self._listed):
                self._awaited(_WRITTEN, self.patience, alone=True, read=False)
            self._store.set(_OVER, b"1")

    def written(self) -> None:
        """Rank 0 has written the answer for all."""
        with contextlib.suppress(Exception):
            self._store.set(_WRITTEN, b"1")

    def wait_for_end(self) -> None:
        """Lets the first of them end before this one: a launcher ends all when one of them ends."""
        if self._awaited(_OVER, _LONGEST, read=False) is not None and not self.termination.asked:
            time.sleep(_LATER)

    def answer(self) -> Report | None:
        """The answer for all, once it is complete; None if there is none, or it does not come."""
        with contextlib.suppress(Exception):
            if self._store is not None and self._store.add(_COUNT, 0):
                told = self._awaited(_ANSWER, _LONGEST, alone=True)
                return Report.from_dict(json.loads(told)) if told is not None else None
        return None

    def _awaited(self, key: str, seconds: float, *, alone: bool = False, read: bool = True) -> bytes | None:
        """The value of a key, once it is there (empty unless `read`); None if it does not come.

        `alone`: no other rank waits for it.
        """
        with contextlib.suppress(Exception):
            for _ in _waiting(seconds, World() if alone else self._world, lambda: self.termination.asked):
                if self._store.check([key]):
                    return bytes(self._store.get(key)) if read else b""
        return None


def _order(report: Report) -> tuple[int, int, int]:
    """Earlier steps first; in a step, what was created on a rank before what is unknown, or came from another.

    A loss is this rank's own; gradients may be those of all.
    """
    received = report.cause is not None and report.cause.slug == RECEIVED
    kind = (3 if received else 1) + (not _is_own(report)) if received or report.origin is None else 0
    return (report.step if report.step is not None else sys.maxsize, kind, report.rank)


def _is_own(report: Report) -> bool:
    return report.noticed is not None and report.noticed.what == "loss"


def _finding(rank: int, report: Report) -> RankFinding:
    if report.cause is not None and report.cause.slug == RECEIVED:
        return RankFinding(rank, "received", report.step)
    if report.reproduced == "transient":
        return RankFinding(rank, "transient", report.step)
    site = report.origin.site if report.origin is not None else None
    where = f"{site.file}:{site.line}" if site is not None else ""
    return RankFinding(rank, "created" if report.origin is not None else "noticed", report.step, where)
