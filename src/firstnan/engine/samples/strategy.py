"""The search for bad samples of a batch: which samples to replace in the next replay of the step."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, log2

MOST = 64
"""The most replays, however many bad samples there are."""

TOGETHER = "these samples fail only in combination"
NO_SINGLE = (
    "no single sample is responsible: the step fails with either half of the batch replaced, so the cause is probably"
    " the whole batch or the weights"
)
WHOEVER = (
    "no sample is responsible: the step also fails with other samples in these places, so the cause is probably random"
    " numbers or the weights"
)
WITHOUT = "the step is finite without it, and fails with it whichever half of the others is replaced"
WITHOUT_THESE = "the step is finite without these samples; which of them are responsible is unknown"
ONLY_WITH_OTHERS = "the step is finite without these samples, but they fail only together with others of the batch"
NOT_ALONE = "no single sample is responsible: no part of the batch fails alone"
ENDED = "the search for bad samples ended early: "

Replaced = dict[int, int]
"""Position in the batch -> the sample that replaces it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the search; `bad` is None if no sample is responsible."""

    bad: tuple[int, ...] | None
    confirmed: bool = False
    """The step is finite without them, and fails with them alone or with either half of the others."""
    note: str = ""
    replays: int = 0
    repeated: bool | None = None
    """Whether the same batch failed again; None if that was not tried."""


Search = Generator[Replaced, bool, Finding]
"""Yields the samples to replace, is sent whether the step was finite with that, and returns the result."""


def most_for_one(size: int) -> int:
    """The most replays for one bad sample, about twice what is needed; more if no sample can replace all others."""
    return 2 * ceil(log2(max(size, 1))) + 4


def search(size: int, suspects: Sequence[int] = ()) -> Search:
    """Finds the bad samples of a batch, starting from `suspects`."""
    asked = _Counted(size)
    try:
        found = yield from _search(asked, frozenset(suspects))
    except _EnoughError:
        found = Finding(
            asked.known, note=f"the search ended after {asked.replays} replays; there may be more bad samples"
        )
    return Finding(found.bad, found.confirmed, found.note, asked.replays, asked.repeated)


class _EnoughError(Exception):
    """The limit of replays is reached."""


class _Counted:
    """Requests replays, counts them, and keeps what is known so far."""

    def __init__(self, size: int) -> None:
        self.everyone = frozenset(range(size))
        self.replays = 0
        self.repeated: bool | None = None
        self.known: tuple[int, ...] | None = None

    def finite(self, replaced: Iterable[int], *stand_ins: int) -> Generator[Replaced, bool, bool]:
        """Uses several replacements in turn, since not every step works with a batch of equal samples."""
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
        # Rows at the origin may be bad by chance or because of their position, whatever data is there.
        return Finding(None, note=WHOEVER if suspects else NO_SINGLE)
    if without and (yield from ask.fails_alone(suspects, stand_in)):
        return (yield from _each(ask, suspects, stand_in))
    if without:
        return Finding(ask.known, note=ONLY_WITH_OTHERS)
    return (yield from _halves(ask, stand_in))


def _stand_in(
    ask: _Counted, others: Sequence[int], quarters: tuple[int, ...] = (0, 2)
) -> Generator[Replaced, bool, int | None]:
    """A sample that is healthy even in a batch of its copies; two are tried, since one may be the bad one."""
    for candidate in dict.fromkeys(others[len(others) * quarter // 4] for quarter in quarters):
        if (yield from ask.finite(ask.everyone, candidate)):
            return candidate
    return None


def _each(ask: _Counted, suspects: frozenset[int], stand_in: int) -> Search:
    """Of suspects that fail as a group: those that fail alone, if they explain the failure."""
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
    """Finds one bad sample after another by bisection, until the step is finite without them."""
    found: list[int] = []
    while True:
        one = yield from _one(ask, sorted(ask.everyone - {stand_in, *found}), stand_in)
        if one is None:
            return Finding(tuple(found) or None, note=NOT_ALONE if not found else ONLY_WITH_OTHERS)
        found = sorted([*found, one])
        ask.known = tuple(found)
        if (yield from ask.finite(found, stand_in)):
            break
    # If most of them are bad, what they have in common is to blame.
    if len(found) > max(1, len(ask.everyone) // 2):
        return Finding(
            None, note=f"no single sample is responsible: {len(found)} of {len(ask.everyone)} samples fail alone"
        )
    return Finding(tuple(found), confirmed=True)


def _one(ask: _Counted, candidates: list[int], stand_in: int) -> Generator[Replaced, bool, int | None]:
    """One of the candidates that fails alone, given that they fail together; None if it takes several."""
    seen = False
    while len(candidates) > 1:
        half = candidates[: len(candidates) // 2]
        seen = yield from ask.fails_alone(half, stand_in)
        candidates = half if seen else candidates[len(half) :]
    if candidates and (seen or (yield from ask.fails_alone(candidates, stand_in))):
        return candidates[0]
    return None


def _by_others(ask: _Counted, candidates: frozenset[int]) -> Generator[Replaced, bool, Finding | None]:
    """Finds bad samples if no sample can replace all others, by replacing parts of the batch with several others.

    The parts differ in one bit of the samples' numbers, so any two samples are in different parts once: one of them may
    be what keeps the step finite without the other. None if no part makes a difference.
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
    # Both samples that were tried alone may be bad.
    if (yield from ask.finite(ask.everyone, others[0])) and (yield from ask.fails_alone(candidates, others[0])):
        return (yield from _each(ask, candidates, others[0]))
    return Finding(whole if len(whole) <= len(ask.everyone) // 4 else None, note=WITHOUT_THESE)


def _others(ask: _Counted, candidates: frozenset[int], part: frozenset[int]) -> list[int]:
    """The samples to replace a part with: those not known to be bad."""
    return sorted(ask.everyone - candidates) or sorted(candidates - part)


def _with_either_half(ask: _Counted, one: tuple[int, ...], others: list[int]) -> Search:
    """Whether the step fails with this sample whichever others are there, given that it is finite without it."""
    half = len(others) // 2
    for gone, there in ((others[:half], others[half:]), (others[half:], others[:half])):
        if gone and there and (yield from ask.finite(gone, *there)):
            return Finding(one, note=ONLY_WITH_OTHERS)
    return Finding(one, confirmed=True, note=WITHOUT)
