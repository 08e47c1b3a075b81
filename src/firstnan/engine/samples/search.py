"""Which samples of a batch are bad: what to ask of replays, and one search that asks."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from textwrap import shorten
from time import monotonic
from typing import Any

from firstnan.engine.conclude import is_numeric, not_repeated, without_guesses
from firstnan.engine.handouts import Handouts, ReplayError
from firstnan.engine.ranks import world
from firstnan.engine.samples.cut import Cut, Maker, cut, cut_by_numbers
from firstnan.records import Batch, Report
from firstnan.tensors.state import Handout, copy_batch

_SECONDS = 30.0


@dataclass
class _Subject:
    """One batch of the step: its samples, and the search in it."""

    handout: Handout
    maker: Maker
    cut: Cut | None
    why_not: str
    search: Search


def begin_search(report: Report, handouts: Handouts, *, in_children: bool = False) -> SampleSearch | None:
    """The search for the bad samples of this step; None if its origin does not depend on samples.

    `in_children`: each question is a child of its own, which needs no other rank, and is about the latest batch.
    """
    given, origin = handouts.latest_first()[: 1 if in_children else None], report.origin
    if origin is None or not given or origin.phase not in ("forward", "backward", "input"):
        return None
    if not in_children and not world().is_alone:
        return None
    makers = [Maker.of(handouts.fetched_by(handout)) for handout in given]
    suspects = report.batch.bad_samples or () if report.batch else ()
    return SampleSearch(given, makers, suspects, handouts.previous())


class SampleSearch:
    """One search: hands out the batches of the step, one of them with samples replaced, and is told the outcome."""

    def __init__(
        self, handouts: list[Handout], makers: list[Maker], suspects: tuple[int, ...], previous: Any = None
    ) -> None:
        """`previous`: the batch before, whose samples are healthy."""
        self.finding: SearchResult | None = None
        self._error: BaseException | None = None
        """What the program raised while it was replayed."""
        self.finite: bool | None = True
        """Whether the current replay was finite; None while unknown."""
        self._rest = list(zip(handouts, makers, strict=True))
        """The other batches of the step, searched if the first has no bad sample."""
        self._of_several = any(maker.dataset is not makers[0].dataset for maker in makers)
        """Whether the step has used batches of several loaders."""
        self._suspects, self._previous = suspects, previous
        self._subject = self._found_in = self._begun(*self._rest.pop(0))
        self._question: dict[int, int] | None = None
        self._replays = 0
        self._deadline = monotonic() + _SECONDS

    def _begun(self, handout: Handout, maker: Maker) -> _Subject:
        if handout.pristine is None:
            handout.pristine = copy_batch(handout.batch)
        pieces: Cut | None
        try:
            pieces = cut(handout.pristine, handout.indices)
        except Exception as error:  # CutError, or whatever a container says that is made of other parts
            pieces = maker.collated(handout.pristine, handout.indices)
            try:
                pieces = pieces or cut_by_numbers(handout.pristine, handout.indices)
            except Exception:
                return _Subject(handout, maker, None, f"the batch cannot be split into samples: {error}", search(1))
        suspects = [i for i in self._suspects if i < pieces.size]
        others = pieces.join(self._previous) if self._previous is not None else 0
        return _Subject(handout, maker, pieces, "", search(pieces.size, suspects, others))

    @property
    def decided(self) -> bool:
        return self.finite is not None

    def failed(self) -> None:
        if self.finite is None:
            self.finite = False

    def passed(self) -> None:
        if self.finite is None:
            self.finite = True

    def raised(self, error: BaseException) -> None:
        """The step raised while it was replayed: a failure where a bad value was the reason, else the search ends."""
        if isinstance(error, Exception) and is_numeric(error):
            self.failed()
        else:
            self._error = error

    def left_by(self, error: BaseException) -> None:
        """The loop was left by an error: no more replays will come."""
        self._error = error

    def goes_on(self) -> bool:
        """Passes the last outcome to the search; False if the search is over."""
        if self._error is not None:
            return False
        try:
            if self._question is None:
                self._question = next(self._subject.search)
            else:
                # A loop body that ended without a failure was finite, whether or not it reached an update.
                self._question = self._subject.search.send(self.finite is not False)
        except StopIteration as stop:
            return self._ended(stop.value)
        self.finite = None
        return monotonic() < self._deadline

    def _ended(self, finding: SearchResult) -> bool:
        self._replays += finding.replays
        if self.finding is None or finding.confirmed:
            self.finding, self._found_in = finding, self._subject
        if finding.confirmed or not finding.repeated or not self._rest:
            return False
        self._subject, self._question = self._begun(*self._rest.pop(0)), None
        return self.goes_on()

    def batch(self, handout: Handout) -> Any:
        """The batch to hand to the loop: a new copy each time, since the loop may write into it."""
        subject, question = self._subject, self._question
        if handout is not subject.handout or subject.cut is None or question is None:
            return copy_batch(handout.pristine)
        return subject.cut.replaced(question)

    @property
    def repeated(self) -> bool:
        """Whether the same batch failed again, if known."""
        return self.finding is None or self.finding.repeated is not False

    def told_in(self, report: Report) -> Report:
        """The report with the result."""
        if not self.repeated:
            return not_repeated(report)
        if report.batch is None:
            return report
        found = self.finding or SearchResult(report.batch.bad_samples, note=ENDED + self._why_ended())
        if found.bad is None and report.origin is not None and report.origin.read_at is not None:
            found = replace(found, note="")  # it was created before the step, so nobody asks for samples
        told = self._told(report.batch, replace(found, replays=self._replays))
        return without_guesses(replace(report, batch=told))

    def _why_ended(self) -> str:
        if monotonic() >= self._deadline:
            return f"it exceeded {_SECONDS:.0f} seconds"
        how = "with samples replaced" if self._question else "replayed with the same batch"
        error = self._error or sys.exc_info()[1]  # whoever leaves a `with` does so by it
        if isinstance(error, ReplayError):
            return f"{how}, the program asked for a batch that the step had not used"
        if not isinstance(error, Exception) or type(error).__module__.startswith("firstnan."):
            return f"{how}, the program left its loop"
        text = str(error).partition("\n")[0]
        return f"{how}, the program raised {type(error).__name__}" + (f": {shorten(text, 120)}" if text else "")

    def _told(self, batch: Batch, found: SearchResult) -> Batch:
        pieces, bad = self._found_in.cut, found.bad
        if pieces is None:
            return replace(batch, replays=found.replays, note=self._found_in.why_not)
        if self._of_several and not found.confirmed:
            return replace(batch, replays=found.replays, note=found.note)  # whose rows these are is not known
        return self._found_in.maker.with_elements(
            Batch(
                self._found_in.handout.index, pieces.size, bad, found.confirmed, self._dataset(bad or (), pieces),
                pieces.features(bad or ()), found.replays, found.note, unit=batch.unit,
                values=pieces.values(bad or ()),
            ),
            self._found_in.handout.indices,
        )  # fmt: skip

    def _dataset(self, bad: tuple[int, ...], pieces: Cut) -> tuple[int, ...] | None:
        return self._found_in.maker.in_dataset(bad, pieces, self._found_in.handout.indices)


PROBES = 4
"""After two bad samples, as many of the others are tried alone."""

MOST_TOGETHER = 4
"""The most samples that are looked for where none fails alone."""
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
AMONG_MANY = "the step is finite with a large part of the batch replaced; which samples are responsible is unknown"
ONLY_WITH_OTHERS = "the step is finite without these samples, but they fail only together with others of the batch"
NOT_ALONE = "no single sample is responsible: no part of the batch fails alone"
SEVERAL = "no single sample is responsible: samples of this batch fail only in combination"
ALL_TRIED = "no single sample is responsible: all {} samples that were tried alone fail"
REPLACEMENTS = "no single sample is responsible: it depends on what the samples of this batch are replaced with"
ENDED = "the search for bad samples ended early: "

Replaced = dict[int, int]
"""Position in the batch -> the sample that replaces it; from the size of the batch on, those of another one."""
OTHERS = -1
"""Stands for the samples of another batch, each in the place of one: a step may not work with the same sample twice."""
SHIFTED = -2
"""The same samples, each one place before."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of the search; `bad` is None if no sample is responsible."""

    bad: tuple[int, ...] | None
    confirmed: bool = False
    """The step is finite without them, and fails with them alone or with either half of the others."""
    note: str = ""
    replays: int = 0
    repeated: bool | None = None
    """Whether the same batch failed again; None if that was not tried."""


Search = Generator[Replaced, bool, SearchResult]
"""Yields the samples to replace, is sent whether the step was finite with that, and returns the result."""


def search(size: int, suspects: Sequence[int] = (), others: int = 0) -> Search:
    """Finds the bad samples of a batch, starting from `suspects`; `others` of another batch may replace them."""
    asked = _Counted(size, others)
    try:
        found = yield from _search(asked, frozenset(suspects))
    except _EnoughError:
        found = SearchResult(
            asked.known, note=f"the search ended after {asked.replays} replays; there may be more bad samples"
        )
    return SearchResult(found.bad, found.confirmed, found.note, asked.replays, asked.repeated)


class _EnoughError(Exception):
    """The limit of replays is reached."""


class _Counted:
    """Requests replays, counts them, and keeps what is known so far."""

    def __init__(self, size: int, others: int = 0) -> None:
        self.everyone, self.others = frozenset(range(size)), others
        self.replays = 0
        self.repeated: bool | None = None
        self.known: tuple[int, ...] | None = None

    def finite(self, replaced: Iterable[int], *stand_ins: int) -> Generator[Replaced, bool, bool]:
        """Uses several replacements in turn, since not every step works with a batch of equal samples."""
        if self.replays >= MOST:
            raise _EnoughError
        self.replays += 1
        if stand_ins[0] < 0:
            shift = OTHERS - stand_ins[0]
            return (yield {i: len(self.everyone) + (i + shift) % self.others for i in sorted(replaced)})
        return (yield dict(zip(sorted(frozenset(replaced).difference(stand_ins)), cycle(stand_ins), strict=False)))

    def fails_alone(self, kept: Iterable[int], stand_in: int) -> Generator[Replaced, bool, bool]:
        return not (yield from self.finite(self.everyone - frozenset(kept), stand_in))


def _search(ask: _Counted, suspects: frozenset[int]) -> Search:
    ask.known = tuple(sorted(suspects)) or None
    ask.repeated = not (yield from ask.finite((), 0))
    others = sorted(ask.everyone - suspects)
    if not ask.repeated or not others or len(ask.everyone) < 2:
        return SearchResult(ask.known)
    without = bool(suspects) and (yield from ask.finite(suspects, others[0]))
    stand_in = yield from _stand_in(ask, others if len(others) > 1 or without else [*others, *suspects])
    if stand_in is None:
        found = yield from _by_others(ask, suspects if without else ask.everyone)
        if found is not None and (found.confirmed or not ask.others):
            return found
        stand_in = (yield from _stand_in(ask, others, (1, 3))) if found is None else None
        if stand_in is None and ask.others and (yield from ask.finite(ask.everyone, OTHERS)):
            stand_in = OTHERS
            without = bool(suspects) and (yield from ask.finite(suspects, OTHERS))
        elif found is not None:
            return found
    if stand_in is None:
        # Rows at the origin may be bad by chance or because of their position, whatever data is there.
        return SearchResult(None, note=WHOEVER if suspects else NO_SINGLE)
    if without and (yield from ask.fails_alone(suspects, stand_in)):
        result = yield from _each(ask, suspects, stand_in)
    elif without:
        result = SearchResult(ask.known, note=ONLY_WITH_OTHERS)
    else:
        result = yield from _halves(ask, stand_in)
    if stand_in == OTHERS and result.confirmed and not (yield from _is_confirmed_by(ask, result.bad or (), SHIFTED)):
        return SearchResult(None, note=REPLACEMENTS)
    return result


def _is_confirmed_by(ask: _Counted, bad: tuple[int, ...], stand_in: int) -> Generator[Replaced, bool, bool]:
    """Whether others show the same: one sample of another batch may be what the whole batch lacks, such as a label."""
    return (yield from ask.finite(bad, stand_in)) and (yield from ask.fails_alone(bad, stand_in))


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
        return SearchResult(whole, confirmed=True)
    if len(whole) > MOST // 2:
        return SearchResult(whole, confirmed=True, note="confirmed as a group, not one by one")
    alone = [one for one, fails in zip(whole, (yield from _alone(ask, whole, stand_in)), strict=True) if fails]
    if not alone:
        return SearchResult(whole, confirmed=True, note=TOGETHER)
    if len(alone) < len(whole) and not (yield from ask.finite(alone, stand_in)):
        return SearchResult(whole, confirmed=True)
    return SearchResult(tuple(alone), confirmed=True)


def _alone(ask: _Counted, samples: Iterable[int], stand_in: int) -> Generator[Replaced, bool, list[bool]]:
    answers = []
    for one in samples:
        answers += [(yield from ask.fails_alone([one], stand_in))]
    return answers


def _halves(ask: _Counted, stand_in: int) -> Search:
    """Finds bad samples one by one, by bisection, until the step is finite without them; after two all of the rest."""
    found: list[int] = []
    while True:
        one = yield from _one(ask, sorted(ask.everyone - {stand_in, *found}), stand_in)
        if one is None and not found:
            return (yield from _together(ask, sorted(ask.everyone - {stand_in}), stand_in))
        if one is None:
            return SearchResult(tuple(found), note=ONLY_WITH_OTHERS)
        found = sorted([*found, one])
        ask.known = tuple(found)
        if (yield from ask.finite(found, stand_in)):
            break
        if len(found) < 2:
            continue
        rest = sorted(ask.everyone - {stand_in, *found})
        if (yield from _all_fail(ask, rest, stand_in)):
            return SearchResult(None, note=ALL_TRIED.format(len(found) + PROBES))
        yield from _all_alone(ask, rest, stand_in, found, known=True)
        found.sort()
        if not (yield from ask.finite(found, stand_in)):
            return SearchResult(tuple(found), note=ONLY_WITH_OTHERS)
        break
    # If most of them are bad, what they have in common is to blame.
    if len(found) > max(1, len(ask.everyone) // 2):
        return SearchResult(
            None, note=f"no single sample is responsible: {len(found)} of {len(ask.everyone)} samples fail alone"
        )
    return SearchResult(tuple(found), confirmed=True)


def _together(ask: _Counted, rest: list[int], stand_in: int) -> Search:
    """A few samples that fail only in combination, such as two that are equal.

    Each is the last one of the shortest beginning of the others that fails together with those found so far."""
    if not (yield from ask.fails_alone(rest, stand_in)):
        return SearchResult(None, note=NOT_ALONE)
    found: list[int] = []
    while rest and len(found) < MOST_TOGETHER:
        fewest, most = 1, len(rest)
        while fewest < most:
            middle = (fewest + most) // 2
            if (yield from ask.fails_alone([*found, *rest[:middle]], stand_in)):
                most = middle
            else:
                fewest = middle + 1
        found, rest = [*found, rest[most - 1]], rest[: most - 1]
        if (yield from ask.fails_alone(found, stand_in)):
            # Where they are replaced by others, one of those may be equal to a sample that is left.
            for others in (OTHERS, SHIFTED) if stand_in == OTHERS else (stand_in,):
                if (yield from ask.finite(found, others)):
                    return SearchResult(tuple(sorted(found)), confirmed=True, note=TOGETHER)
            break
    return SearchResult(None, note=SEVERAL)


def _all_fail(ask: _Counted, rest: list[int], stand_in: int) -> Generator[Replaced, bool, bool]:
    """Whether each of a few samples fails alone: to find all, where most are bad, would take too many replays."""
    if len(rest) <= PROBES:
        return False
    for i in range(PROBES):
        if not (yield from ask.fails_alone([rest[len(rest) * i // PROBES]], stand_in)):
            return False
    return True


def _all_alone(
    ask: _Counted, candidates: list[int], stand_in: int, found: list[int], known: bool = False
) -> Generator[Replaced, bool, bool]:
    """Adds to `found` each candidate that fails alone; whether there is one. Bad samples are often neighbours.

    `known`: they fail together, since they are a part of such a group and the other part does not fail.
    """
    surely = known and len(candidates) > 1
    if not candidates or not (surely or (yield from ask.fails_alone(candidates, stand_in))):
        return False
    if len(candidates) == 1:
        found += candidates
        ask.known = tuple(sorted(found))
        return True
    half = len(candidates) // 2
    first = yield from _all_alone(ask, candidates[:half], stand_in, found)
    second = yield from _all_alone(ask, candidates[half:], stand_in, found, known=not first)
    return first or second


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


def _by_others(ask: _Counted, candidates: frozenset[int]) -> Generator[Replaced, bool, SearchResult | None]:
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
    few = len(whole) <= len(ask.everyone) // 4
    return SearchResult(whole if few else None, note=WITHOUT_THESE if few else AMONG_MANY)


def _others(ask: _Counted, candidates: frozenset[int], part: frozenset[int]) -> list[int]:
    """The samples to replace a part with: those not known to be bad."""
    return sorted(ask.everyone - candidates) or sorted(candidates - part)


def _with_either_half(ask: _Counted, one: tuple[int, ...], others: list[int]) -> Search:
    """Whether the step fails with this sample whichever others are there, given that it is finite without it."""
    half = len(others) // 2
    for gone, there in ((others[:half], others[half:]), (others[half:], others[:half])):
        if gone and there and (yield from ask.finite(gone, *there)):
            return SearchResult(one, note=ONLY_WITH_OTHERS)
    return SearchResult(one, confirmed=True, note=WITHOUT)
