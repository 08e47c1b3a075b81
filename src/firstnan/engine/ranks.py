"""Processes that train together: what each of them has found, and one answer for all.

They talk through the store by which they have found each other, never by a collective: a process that trains on, hangs
or is gone is waited for only so long. What a rank sends does not grow with the number of ranks; one of them reads what
all have found.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from firstnan.diagnose.rules import on_no_rank
from firstnan.records import RankFinding, Report

_PATIENCE = 20.0
"""Seconds that a process which has found something waits for what the others have found."""
_BUSY = 3
"""How many times as long if one of them still investigates: a search for samples takes up to 30 seconds."""
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
_HELD, _BEGUN = "firstnan/held", "firstnan/begun"
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


_kept: LimitedStore | None = None


def keep_store() -> None:
    """Remembers the launcher's store: a program may leave its group before it ends with an error.

    One that a rank holds itself would not end with the group, so it is not kept.
    """
    global _kept
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not world().is_alone:
        _kept = _default_store()


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
        self._has_begun = False
        self.is_first = self._has_settled = False
        """Whether the failure of this rank was the first of all, and whether the others have the answer."""

    def join(self) -> None:
        """Remembers the others, as long as the program knows them."""
        now = world()
        self._world = now if now.size >= self._world.size else self._world
        if self._store is None:
            self._store = _default_store() if not now.is_alone else _kept

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

    def says_first(self, what: str) -> bool:
        """Whether no other rank has said this: all of them foresee the same."""
        with contextlib.suppress(Exception):
            if not world().is_alone:
                return int(_default_store().add(f"firstnan/said/{what}", 1)) == 1
        return True

    def placed(self, report: Report) -> Report:
        return replace(report, rank=self._world.rank, world_size=self._world.size)

    def begin(self) -> None:
        """Tells the others that this rank investigates something."""
        if not self._has_begun:
            self._has_begun = True
            with contextlib.suppress(Exception):
                if self._store is not None:
                    self._store.add(_BEGUN, 1)

    def announce(self, report: Report) -> None:
        """Tells the others what this rank has found in its own loss, before they get anything of it."""
        with contextlib.suppress(Exception):
            if self._store is not None:
                self._say(report)
                self._store.add(_HELD, 1)

    def is_named(self) -> bool:
        """Whether the others, who have got something from this rank, have waited for it and named it."""
        with contextlib.suppress(Exception):
            return self._store is not None and self._store.check([_FIRST]) and int(self._store.get(_FIRST)) == self.rank
        return False

    def _say(self, report: Report) -> None:
        found = {"order": _order(report), **asdict(_finding(self.rank, report))}
        self._store.set(_FOUND.format(self.rank), json.dumps(found))

    def exchange(self, report: Report, *, by_all: bool = True) -> Report | None:
        """Tells the others what was found here, and waits for what they have found.

        `by_all`: whether every rank may have found something, not only those that have announced it.
        Returns the report with what every rank has found, if this was the first failure of all; otherwise None.
        """
        first = self.rank
        with contextlib.suppress(Exception):  # the store is gone with the process that held it
            if self._store is not None:
                first = self._first_of_all(report, by_all)
        self.is_first = first == self.rank
        if not self.is_first:
            return None
        with contextlib.suppress(Exception):
            self._listed = tuple(RankFinding(**one) for one in json.loads(self._store.get(_LIST)))
        return _with_all(report, self._listed, self._world.size)

    def _first_of_all(self, report: Report, by_all: bool) -> int:
        self._say(report)
        awaited = self._world.size if by_all else self._store.add(_HELD, 0)
        is_last = self._store.add(_COUNT, 1) >= awaited
        for _ in range(0 if is_last else _BUSY):
            if (first := self._awaited(_FIRST, self.patience)) is not None:
                return int(first)
            known = self._store.add(_COUNT, 0) + self._store.add(_HELD, 0)
            if self.termination.asked or self._store.add(_BEGUN, 0) <= known:
                break
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


def answer_of(reports: Iterable[Report]) -> Report:
    """The answer of ranks that could not talk to each other: the first failure of all, with what each has found."""
    by_rank: dict[int, Report] = {}
    for report in reports:
        by_rank.setdefault(report.rank, report)
    first = min(by_rank.values(), key=_order)
    return _with_all(first, tuple(_finding(rank, by_rank[rank]) for rank in sorted(by_rank)), first.world_size)


def _with_all(report: Report, known: tuple[RankFinding, ...], size: int) -> Report:
    """The report with what every rank has found; of ranks that are not `known`, only if they are few."""
    known = known or (_finding(report.rank, report),)
    heard = {one.rank for one in known}
    others = (RankFinding(rank, "unknown") for rank in range(size if size <= _MOST_LISTED else 0) if rank not in heard)
    ranks = tuple(sorted((*known, *others), key=lambda one: one.rank))
    if len(ranks) == size and all(one.what == "received" for one in ranks):
        named = report.rank if _is_own(report) else None
        report = replace(report, cause=on_no_rank(size, named), reproduced="transient")
    return replace(report, ranks=ranks)


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


_ANSWERED_WITHIN = 20.0
"""Seconds after which a store that does not answer counts as gone: the process that holds it may be stopped."""
_ASKED_WHILE_HELD = 1.0
"""Seconds after which a rank that is held asks again whether the others have named it."""
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
    """Calls `late` if the program's own thread is still held after some seconds, and `ended` if SIGTERM comes then.

    Also `ended` if the others do not wait any longer (`is_named`): a rank without an optimizer comes to no update.
    """

    def __init__(
        self, seconds: float, late: Callable[[], None], ended: Callable[[], None], is_named: Callable[[], bool]
    ) -> None:
        self._late, self._ended, self._is_named = late, ended, is_named
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
            left = _ASKED_WHILE_HELD if self._until is None else max(self._until - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._reading], [], [], min(left, _ASKED_WHILE_HELD))
            if not ready and self._until is not None and time.monotonic() >= self._until:
                self._until = None
                self._late()
            if not ready and self._is_named() and not select.select([self._reading], [], [], _ASKED_WHILE_HELD)[0]:
                self._ended()
            if not ready:
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
