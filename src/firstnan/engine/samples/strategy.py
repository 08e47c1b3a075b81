"""Which samples of a batch are bad: a search that asks for replays of the step with samples replaced."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, log2

MOST = 64
"""So many replays at most, however many bad samples there are."""

TOGETHER = "it takes these samples together: none of them fails alone"
NO_SINGLE = (
    "no sample was found that it takes: the step fails whichever half of the batch takes the place of the other,"
    " so it is likely the whole batch or the weights"
)
WHOEVER = (
    "no sample is to blame: the step fails as well with others where the value is born,"
    " so it is likely random numbers or the weights"
)
WITHOUT = "without it the step is finite, and with it the step fails whichever half of the others is replaced"
WITHOUT_THESE = "without these samples the step is finite; which of them it takes is not known"
ONLY_WITH_OTHERS = "without these samples the step is finite, but it takes others of the batch too"
NOT_ALONE = "no single sample: no part of the batch fails alone"
ENDED = "the search for bad samples ended early: "

Replaced = dict[int, int]
"""Which sample of the batch takes the place of which."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What the search came to; `bad` is None where no sample is to blame."""

    bad: tuple[int, ...] | None
    confirmed: bool = False
    """Without them the step is finite; it fails with them alone, or whichever half of the others is there."""
    note: str = ""
    replays: int = 0
    repeated: bool | None = None
    """Whether the same batch failed again; None where that was not tried."""


Search = Generator[Replaced, bool, Finding]
"""Yields what is to be replaced, is sent whether the step was finite then, returns what it found."""


def most_for_one(size: int) -> int:
    """The bound for one bad sample, about twice what is taken; more where no sample can stand in for all."""
    return 2 * ceil(log2(max(size, 1))) + 4


def search(size: int, suspects: Sequence[int] = ()) -> Search:
    """Finds the bad samples of a batch, starting from `suspects`."""
    asked = _Counted(size)
    try:
        found = yield from _search(asked, frozenset(suspects))
    except _EnoughError:
        found = Finding(asked.known, note=f"the search was ended after {asked.replays} replays: there may be more")
    return Finding(found.bad, found.confirmed, found.note, asked.replays, asked.repeated)


class _EnoughError(Exception):
    """The bound is reached."""


class _Counted:
    """Asks, counts, and keeps what is known so far."""

    def __init__(self, size: int) -> None:
        self.everyone = frozenset(range(size))
        self.replays = 0
        self.repeated: bool | None = None
        self.known: tuple[int, ...] | None = None

    def finite(self, replaced: Iterable[int], *stand_ins: int) -> Generator[Replaced, bool, bool]:
        """Several stand-ins take turns: not every step bears a batch of equal samples."""
        if self.replays >= MOST:
            raise _EnoughError
        self.replays += 1
        return (yield dict(zip(sorted(frozenset(replaced).difference(stand_ins)), cycle(stand_ins), strict=False)))

    def fails_alone(self, kept: Iterable[int], stand_in: int) -> Generator[Replaced, bool, bool]:
        return not (yield from self.finite(self.everyone - frozenset(kept), stand_in))


def _search(ask: _Counted, suspects: frozenset[int]) -> Search:
    ask.known = tuple(sorted(suspects)) or None
    ask.repeated = not (yield from ask.finite((), 0))
    others = sorted(ask.everyone - suspects)
    if not ask.repeated or not others or len(ask.everyone) < 2:
        return Finding(ask.known)
    without = bool(suspects) and (yield from ask.finite(suspects, others[0]))
    stand_in = yield from _stand_in(ask, others if len(others) > 1 or without else [*others, *suspects])
    if stand_in is None:
        found = yield from _by_others(ask, suspects if without else ask.everyone)
        if found is not None:
            return found
        stand_in = yield from _stand_in(ask, others, (1, 3))
    if stand_in is None:
        # Rows that the origin shows may be bad by chance or by their place, whatever data stands there.
        return Finding(None, note=WHOEVER if suspects else NO_SINGLE)
    if without and (yield from ask.fails_alone(suspects, stand_in)):
        return (yield from _each(ask, suspects, stand_in))
    if without:
        return Finding(ask.known, note=ONLY_WITH_OTHERS)
    return (yield from _halves(ask, stand_in))


def _stand_in(
    ask: _Counted, others: Sequence[int], quarters: tuple[int, ...] = (0, 2)
) -> Generator[Replaced, bool, int | None]:
    """A sample that is healthy even where it is the only one; two are tried, since one may be the bad one."""
    for candidate in dict.fromkeys(others[len(others) * quarter // 4] for quarter in quarters):
        if (yield from ask.finite(ask.everyone, candidate)):
            return candidate
    return None


def _each(ask: _Counted, suspects: frozenset[int], stand_in: int) -> Search:
    """Of suspects that fail as a group: those that fail alone, if they are all that is wrong."""
    whole = tuple(sorted(suspects))
    if len(whole) == 1:
        return Finding(whole, confirmed=True)
    if len(whole) > MOST // 2:
        return Finding(whole, confirmed=True, note="confirmed as a group, not one by one")
    alone = [one for one, fails in zip(whole, (yield from _alone(ask, whole, stand_in)), strict=True) if fails]
    if not alone:
        return Finding(whole, confirmed=True, note=TOGETHER)
    if len(alone) < len(whole) and not (yield from ask.finite(alone, stand_in)):
        return Finding(whole, confirmed=True)
    return Finding(tuple(alone), confirmed=True)


def _alone(ask: _Counted, samples: Iterable[int], stand_in: int) -> Generator[Replaced, bool, list[bool]]:
    answers = []
    for one in samples:
        answers += [(yield from ask.fails_alone([one], stand_in))]
    return answers


def _halves(ask: _Counted, stand_in: int) -> Search:
    """Finds one bad sample after the other by halves, until the step is finite without them."""
    found: list[int] = []
    while True:
        one = yield from _one(ask, sorted(ask.everyone - {stand_in, *found}), stand_in)
        if one is None:
            return Finding(tuple(found) or None, note=NOT_ALONE if not found else ONLY_WITH_OTHERS)
        found = sorted([*found, one])
        ask.known = tuple(found)
        if (yield from ask.finite(found, stand_in)):
            break
    # Where most of them are bad, what they have in common is.
    if len(found) > max(1, len(ask.everyone) // 2):
        return Finding(None, note=f"no single sample: {len(found)} of {len(ask.everyone)} samples fail alone")
    return Finding(tuple(found), confirmed=True)


def _one(ask: _Counted, candidates: list[int], stand_in: int) -> Generator[Replaced, bool, int | None]:
    """One of the candidates, of which at least one is bad, that fails alone; None where it takes several."""
    seen = False
    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        seen = yield from ask.fails_alone(half, stand_in)
        candidates = half if seen else candidates[len(half) :]
    if candidates and (seen or (yield from ask.fails_alone(candidates, stand_in))):
        return candidates[0]
    return None


def _by_others(ask: _Counted, candidates: frozenset[int]) -> Generator[Replaced, bool, Finding | None]:
    """Where no sample can stand in for all the others: which samples it takes, by letting others take their places.

    The parts that are tried differ in one bit of their numbers, so that any two samples are in different parts
    once: one of them may be what keeps the step finite without the other. None where no part makes a difference.
    """
    narrowed = True
    while narrowed and len(candidates) > 1:
        narrowed = False
        for bit in reversed(range(max(ask.everyone).bit_length())):
            for part in (frozenset(i for i in candidates if i >> bit & 1 == side) for side in (0, 1)):
                if part and part != candidates and (yield from ask.finite(part, *_others(ask, candidates, part))):
                    candidates, narrowed = part, True
                    break
        ask.known = tuple(sorted(candidates)) if len(candidates) < len(ask.everyone) else None
    whole, others = tuple(sorted(candidates)), sorted(ask.everyone - candidates)
    if not others:
        return None
    if len(whole) == 1:
        return (yield from _with_either_half(ask, whole, others))
    # Both that were tried alone may have been among the bad ones.
    if (yield from ask.finite(ask.everyone, others[0])) and (yield from ask.fails_alone(candidates, others[0])):
        return (yield from _each(ask, candidates, others[0]))
    return Finding(whole if len(whole) <= len(ask.everyone) // 4 else None, note=WITHOUT_THESE)


def _others(ask: _Counted, candidates: frozenset[int], part: frozenset[int]) -> list[int]:
    """Who takes the places of a part: samples that are not to blame, as far as that is known."""
    return sorted(ask.everyone - candidates) or sorted(candidates - part)


def _with_either_half(ask: _Counted, one: tuple[int, ...], others: list[int]) -> Search:
    """A sample without which the step is finite: does it fail with it, whichever others are there?"""
    half = len(others) // 2
    for gone, there in ((others[:half], others[half:]), (others[half:], others[:half])):
        if gone and there and (yield from ask.finite(gone, *there)):
            return Finding(one, note=ONLY_WITH_OTHERS)
    return Finding(one, confirmed=True, note=WITHOUT)
