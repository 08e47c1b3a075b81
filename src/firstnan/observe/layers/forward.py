"""Looks at what layers read and make in forward, as little as is needed to name the first bad one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from firstnan.observe.layers.found import Sink, What
from firstnan.observe.layers.tensors import (
    BAD,
    FINITE,
    ONLY_NEGATIVE_INF,
    UNKNOWN,
    WAITING,
    Call,
    Here,
    Known,
    Seen,
    Size,
    Source,
    Waiting,
    examine,
    outline,
    values_of,
    version_of,
)
from firstnan.tensors import finite

# So many calls are judged by one read at most: the tensors between them are kept alive until then.
_LONGEST_CHAIN = 5

_Judged = tuple[str, Known, Source]
_Whole = tuple[Call, Sequence[_Judged], Sequence[_Judged]]


class Forward:
    """Calls that hand every bad number on (a norm, a linear, a GELU...) form a chain, and only its end is read.

    When the end is bad, everything in the chain is read in the order in which it ran.
    """

    def __init__(self, sink: Sink, waiting: Waiting, statistics: bool) -> None:
        self._sink, self._waiting, self._statistics = sink, waiting, statistics

    def called(self, here: Here, call: Call, read: list[Seen], made: list[Seen]) -> None:
        """A layer ran: its call joins the open chain, or ends it."""
        joins = (
            # Looking back, what others have written in place since is seen at the end of a chain only.
            (call.layer.faithful or here.looks_back)
            and here.depth > 0  # else nobody would say when it ends
            and len(read) == len(made) == 1
            and read[0][2] is not made[0][2]
            and not self._statistics
            and finite.reads_are_free(made[0][2])
        )
        if here.chain and not (joins and call.layer.faithful and read[0][1] is here.chain[-1][2][0][1]):
            self.close(here, call, read)
        if not joins:
            self._look(call, read, made)
            return
        here.chain.append((call, read, made))
        if len(here.chain) >= _LONGEST_CHAIN:
            self.close(here)

    def close(self, here: Here, call: Call | None = None, read: list[Seen] | None = None) -> None:
        """Reads the end of the chain; `call` is the one that comes next and has read `read`."""
        if not here.chain:
            return
        chain, here.chain = here.chain, []
        _, known, t, _ = chain[-1][2][0]
        now = here.known(t, version_of(t))
        if now.state == UNKNOWN:
            plain = finite.readable(t)
            now.state = FINITE if plain is None or not plain.numel() else examine(plain, False)[0]
        if now.state == FINITE:
            for _, before, after in chain:
                before[0][1].state = after[0][1].state = FINITE
            return
        if now is not known and not (call and not call.layer.tame and any(k is known for _, k, *_ in read or ())):
            # Written in place since, by the program or by a layer that does no harm: the value was there before.
            known.state, now.told = now.state, True
        for link in chain:
            self._look(*link)

    def _look(self, call: Call, read: list[Seen], made: list[Seen]) -> None:
        """Finds out what is not known yet of these tensors."""
        if call.layer.tame and not self._statistics and read and all(k.state == FINITE for _, k, *_ in read):
            wide = [k for _, k, t, _ in made if t.dtype is not torch.float16]
            for known in wide:
                known.state = FINITE
            if len(wide) == len(made):
                return
        later = []
        for seen, sized in ((read, False), (made, self._statistics)):
            for _, known, t, _ in seen:
                if known.state != UNKNOWN or known.version != version_of(t):
                    continue
                plain = finite.readable(t)
                if plain is None or not plain.numel():
                    known.state = FINITE
                elif finite.reads_are_free(plain):
                    known.state, known.size = examine(plain, sized)
                else:
                    known.state = WAITING
                    later.append((known, values_of(plain, sized)))
        if not later and not self._statistics and all(k.state == FINITE for _, k, *_ in (*read, *made)):
            return
        if not later:
            self._decide(call, [s[:3] for s in read], [s[:3] for s in made])
            return
        # Nothing that waits may keep a tensor alive.
        whole = (call, _outlines(read), _outlines(made))
        for known, values in later[:-1]:
            self._waiting.add(values, partial(self._settle, known, None))
        self._waiting.add(later[-1][1], partial(self._settle, later[-1][0], whole))

    def _settle(self, known: Known, whole: _Whole | None, state: int, size: Size | None) -> None:
        """A tensor that waited has its verdict; with the last one of a call the call can be judged."""
        known.state, known.size = state, size
        if whole is not None:
            self._decide(*whole)

    def _decide(self, call: Call, read: Sequence[_Judged], made: Sequence[_Judged]) -> None:
        if self._statistics:
            for _, known, _ in made:
                if known.size is not None:
                    self._sink.magnitude(call.layer.name, "forward", *known.size)
        spoiled = any(known.state > FINITE for _, known, _ in made)
        for i, (place, known, source) in enumerate(read):
            # Negative infinities alone are a mask, unless they are the data itself and have spoiled the result.
            if known.state == BAD or (known.state == ONLY_NEGATIVE_INF and spoiled and i == 0):
                self._tell(call, "input", place, known, source)
        for place, known, source in made:
            if known.state > FINITE:
                self._tell(call, "output", place, known, source)

    def _tell(self, call: Call, what: What, place: str, known: Known, source: Source) -> None:
        if not known.told:
            known.told = True
            self._sink.layer_event(call.found("forward", what, place, source))


def _outlines(seen: list[Seen]) -> list[_Judged]:
    return [(place, known, outline(t)) for place, known, t, _ in seen]
