"""Has the step that failed played again and again, by whoever owns its loop, until the bad samples are known."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

from firstnan.compare import Difference
from firstnan.conclude import not_repeated
from firstnan.cut import Cut, CutError, cut
from firstnan.records import Batch, Report
from firstnan.replay import Handout, copied
from firstnan.samples import ENDED, Finding, search

_SECONDS = 30.0


class Sift:
    """One search: hands out the batch with samples replaced and is told what became of it."""

    def __init__(self, handout: Handout, suspects: tuple[int, ...]) -> None:
        self.handout = handout
        self.suspects = suspects
        self.finding: Finding | None = None
        self.finite: bool | None = True
        """What the replay under way came to; None while that is open."""
        self._cut: Cut | None = None
        self._why_not = ""
        try:
            self._cut = cut(handout.pristine, handout.indices)
        except CutError as error:
            self._why_not = f"the batch cannot be cut into samples: {error}"
        self._search = search(self._cut.size if self._cut else 1, suspects)
        self._question: dict[int, int] | None = None
        self._deadline = monotonic() + _SECONDS

    @property
    def decided(self) -> bool:
        return self.finite is not None

    def failed(self) -> None:
        if self.finite is None:
            self.finite = False

    def passed(self) -> None:
        if self.finite is None:
            self.finite = True

    def goes_on(self) -> bool:
        """Hands the last answer to the search; False where it is over."""
        try:
            if self._question is None:
                self._question = next(self._search)
            else:
                # A body that ended without a failure was finite, whether or not it came to an update.
                self._question = self._search.send(self.finite is not False)
        except StopIteration as stop:
            self.finding = stop.value
            return False
        if monotonic() > self._deadline:
            return False
        self.finite = None
        return True

    def batch(self) -> Any:
        """The batch as the search wants it now, made anew each time: a loop may write into what it is given."""
        assert self._question is not None
        return self._cut.replaced(self._question) if self._cut is not None else copied(self.handout.pristine)

    @property
    def repeated(self) -> bool:
        """Whether the same batch failed again, as far as that is known."""
        return self.finding is None or self.finding.repeated is not False

    def told_in(self, report: Report, difference: Difference | None = None) -> Report:
        """The report with what was found; `difference` is between two traces of the step, where it was not repeated."""
        found = self.finding
        if not self.repeated:
            return not_repeated(report, difference)
        if report.batch is None:
            return report
        found = found or Finding(report.batch.bad_samples, note=ENDED)
        return replace(report, batch=self._told(report.batch, found))

    def _told(self, batch: Batch, found: Finding) -> Batch:
        if self._cut is None:
            return replace(batch, replays=found.replays, note=self._why_not)
        bad = found.bad
        return replace(
            batch, size=self._cut.size, bad_samples=bad, confirmed=found.confirmed, replays=found.replays,
            note=found.note, features=self._cut.features(bad) if bad else (), dataset_indices=self._dataset(bad),
        )  # fmt: skip

    def _dataset(self, bad: tuple[int, ...] | None) -> tuple[int, ...] | None:
        chosen = self.handout.indices
        if not bad or not isinstance(chosen, list | tuple) or self._cut is None or len(chosen) != self._cut.size:
            return None
        return tuple(int(chosen[i]) for i in bad) if all(isinstance(chosen[i], int) for i in bad) else None
