"""Searches for the bad samples of a failing step by having its loop replay it with samples replaced."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from textwrap import shorten
from time import monotonic
from typing import Any

from firstnan.engine.conclude import is_numeric, not_repeated
from firstnan.engine.handouts import Handouts
from firstnan.engine.samples.cut import Cut, cut
from firstnan.engine.samples.dataset import Maker
from firstnan.engine.samples.strategy import ENDED, Finding, Search, search
from firstnan.engine.world import world
from firstnan.records import Batch, Report
from firstnan.tensors.batches import Handout, copy_batch
from firstnan.tracing.compare import Difference

_SECONDS = 30.0


@dataclass
class _Subject:
    """One batch of the step: its samples, and the search in it."""

    handout: Handout
    maker: Maker
    cut: Cut | None
    why_not: str
    search: Search


def begin_search(report: Report, handouts: Handouts) -> SampleSearch | None:
    """The search for the bad samples of this step; None if its origin does not depend on samples."""
    given, origin = handouts.latest_first(), report.origin
    if origin is None or not given or origin.phase not in ("forward", "backward", "input") or not world().is_alone:
        return None
    makers = [Maker.of(handouts.iterator_of(handout)) for handout in given]
    return SampleSearch(given, makers, report.batch.bad_samples or () if report.batch else ())


class SampleSearch:
    """One search: hands out the batches of the step, one of them with samples replaced, and is told the outcome."""

    def __init__(self, handouts: list[Handout], makers: list[Maker], suspects: tuple[int, ...]) -> None:
        self.finding: Finding | None = None
        self._error: BaseException | None = None
        """What the program raised while it was replayed."""
        self.finite: bool | None = True
        """Whether the current replay was finite; None while unknown."""
        self._rest = list(zip(handouts, makers, strict=True))
        """The other batches of the step, searched if the first has no bad sample."""
        self._suspects = suspects
        self._subject = self._found_in = self._begun(*self._rest.pop(0))
        self._question: dict[int, int] | None = None
        self._replays = 0
        self._deadline = monotonic() + _SECONDS

    def _begun(self, handout: Handout, maker: Maker) -> _Subject:
        if handout.pristine is None:
            handout.pristine = copy_batch(handout.batch)
        try:
            pieces = cut(handout.pristine, handout.indices)
        except Exception as error:  # CutError, or whatever a container says that is made of other parts
            return _Subject(handout, maker, None, f"the batch cannot be split into samples: {error}", search(1))
        suspects = [i for i in self._suspects if i < pieces.size]
        return _Subject(handout, maker, pieces, "", search(pieces.size, suspects))

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

    def _ended(self, finding: Finding) -> bool:
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

    def told_in(self, report: Report, difference: Difference | None = None) -> Report:
        """The report with the result; `difference` is that between two traces of the step, if it did not fail again."""
        if not self.repeated:
            return not_repeated(report, difference)
        if report.batch is None:
            return report
        found = self.finding or Finding(report.batch.bad_samples, note=ENDED + self._why_ended())
        return replace(report, batch=self._told(report.batch, replace(found, replays=self._replays)))

    def _why_ended(self) -> str:
        if monotonic() >= self._deadline:
            return f"it exceeded {_SECONDS:.0f} seconds"
        how = "with samples replaced" if self._question else "replayed with the same batch"
        error = self._error or sys.exc_info()[1]  # whoever leaves a `with` does so by it
        if not isinstance(error, Exception):
            return f"{how}, the program left its loop"
        text = str(error).partition("\n")[0]
        return f"{how}, the program raised {type(error).__name__}" + (f": {shorten(text, 120)}" if text else "")

    def _told(self, batch: Batch, found: Finding) -> Batch:
        pieces, bad = self._found_in.cut, found.bad
        if pieces is None:
            return replace(batch, replays=found.replays, note=self._found_in.why_not)
        return Batch(
            self._found_in.handout.index, pieces.size, bad, found.confirmed, self._dataset(bad or (), pieces),
            pieces.features(bad) if bad else (), found.replays, found.note,
        )  # fmt: skip

    def _dataset(self, bad: tuple[int, ...], pieces: Cut) -> tuple[int, ...] | None:
        return self._found_in.maker.in_dataset(bad, pieces, self._found_in.handout.indices)
