"""Tries remedies: runs the changed program in a child process up to some steps past the failing one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from firstnan.engine.second_run import Start
from firstnan.observe.runner import Program
from firstnan.records import Remedy, Report
from firstnan.repair.patch import PatchError, moved_line, new_contents
from firstnan.repair.verdict import (
    Reach,
    TrialOutcome,
    far_beyond,
    far_enough,
    judged,
    keeps_numbers,
    last_bad_step,
    makes_worse,
    ranked,
    repeats_first_loss,
    untried,
)

if TYPE_CHECKING:
    from firstnan.engine.step_trial import StepTrials

STEPS = 20
"""How many steps after the failing one have to be finite at least, if the program has so many."""
MOST = 8
PATIENCE = 300.0
"""The longest run in seconds after which a program is started again unasked."""
_ENOUGH = 3
"""After so many that help but change healthy losses, no others are tried."""
_LEFT_UNTRIED = 2
_QUICKLY = 30.0
"""Where a trial from the start may take no longer than this, it has the last word on a change that did not help."""
NO_START = "there is no program to run from its start"
RUN_AGAIN = "the program was run again"
"""The start of `Report.replay` if a second run has confirmed the failure."""
_HELPED = "an earlier fix already helps"
_SKIPPED = "skipped by Ctrl-C"
_BATCH_FIRST = "in a run whose first batch was the failing one"
_CHANCE = "the unchanged program does not always fail, so a trial would prove nothing"


@dataclass(frozen=True)
class Limits:
    """Seconds for one trial and for all of them, derived from the time the program took."""

    one: float
    all: float
    further: float = 0.0
    """For going on after the steps that are needed, until the change has held ten times as far as the program came."""
    end: float = 0.0
    """For going on after that, to the end of the program."""

    @staticmethod
    def after(seconds: float, steps: int | None = None) -> Limits:
        """`steps`: the program is asked for so many and no more."""
        further, end = (min(max(15.0, seconds), 300.0), 5.0) if steps is None else (0.0, 0.0)
        return Limits(max(20.0, 3 * seconds), max(120.0, 4 * seconds), further, end)


_ENOUGH_TO_REFUTE = 3


def left_out(report: Report, why: str = _SKIPPED) -> Report:
    """The report with a note on each remedy that is not tried any more."""
    return report.with_(
        remedies=tuple(replace(r, note=why) if not r.tried and r.note in ("", _SKIPPED) else r for r in report.remedies)
    )


def were_skipped(report: Report) -> bool:
    """Whether Ctrl-C has ended the trials."""
    return any(remedy.note == _SKIPPED for remedy in report.remedies)


class Trials:
    """Tests the remedies of one report, best first, until one helps or time is up."""

    def __init__(
        self,
        start: Start,
        program: Program,
        steps: int,
        limits: Limits,
        *,
        isolated: bool = True,
        at_step: StepTrials | None = None,
        from_start: str = "",
        first_batch: tuple[list[int], int] | None = None,
        reads_decide: bool = False,
    ) -> None:
        """`at_step` tries at the failing step; the program is run from its start where that is not possible.

        `from_start` is a reason not to do that. `first_batch` shows the failure in the first step of the program, so
        that it need not be run as far as it came. `reads_decide`: a bad loss that is read counts, even if the program
        skips it.
        """
        self._first_batch, self._reads_decide = first_batch, reads_decide
        self.start, self.program, self.steps, self.limits, self._isolated = start, program, steps, limits, isolated
        self._at_step, self._from_start = at_step, from_start
        self.until = time.monotonic() + limits.all
        self._fails_again: bool | None = None
        """Whether the unchanged program is known to fail again in the same step."""
        self._longest = 0.0
        self._made_worse: list[bool] = []

    @property
    def refute_divergence(self) -> bool:
        """Whether every smaller learning rate made the loss larger: then its rise is meant, or has another reason."""
        return len(self._made_worse) >= _ENOUGH_TO_REFUTE and all(self._made_worse)

    def run(self, report: Report, save: Callable[[Report], None]) -> Report:
        """The report with its remedies tried; `save` is called after each trial and at the end."""
        self._fails_again = True if report.replay.startswith(RUN_AGAIN) else None
        waiting, done, why = list(report.remedies), list[Remedy](), ""
        while waiting:
            remedy = waiting.pop(0)
            if why or not remedy.diff:
                done.append(replace(remedy, note=why) if remedy.diff else remedy)
                continue
            try:
                done.append(self._try(remedy, report))
            except KeyboardInterrupt:
                done.append(replace(remedy, note=_SKIPPED))
            why = self._reason_to_stop(done, report)
            save(report.with_(remedies=ranked([*done, *waiting], report)))
        if self._fails_again is False:
            done = [replace(untried(remedy), note=_CHANCE) for remedy in done]
        surplus = [remedy for remedy in done if remedy.note == _HELPED][_LEFT_UNTRIED:]
        report = report.with_(remedies=ranked([remedy for remedy in done if remedy not in surplus], report))
        save(report)
        return report

    def _reason_to_stop(self, done: list[Remedy], report: Report) -> str:
        """Why the other remedies are not tried; empty if they are."""
        last = done[-1]
        if self._fails_again is False:
            return _CHANCE
        if last.note == _SKIPPED or (self._at_step is not None and self._at_step.interrupted):
            return _SKIPPED
        if last.proven and (keeps_numbers(last, report) or sum(one.proven for one in done) >= _ENOUGH):
            return _HELPED
        if late := self._reason_of_time():
            return late
        return f"only {MOST} fixes are tried" if sum(1 for one in done if one.diff) >= MOST else ""

    def _reason_of_time(self) -> str:
        late = time.monotonic() + self._longest > self.until
        return f"the time limit of {self.limits.all:.0f} s was reached" if late else ""

    def _try(self, remedy: Remedy, report: Report) -> Remedy:
        try:
            changes = new_contents(remedy)
            for file, content in changes:
                compile(content, str(file.path), "exec", dont_inherit=True)
        except (PatchError, SyntaxError, ValueError) as error:
            return replace(remedy, note=f"the fix does not fit: {error}")
        contents = {os.path.realpath(file.path): content for file, content in changes}
        bad, reach, here = last_bad_step(report), self._reach(report, self.steps), None
        # A run that diverges is lost long before its failing step.
        lost = report.cause is not None and report.cause.slug == "divergence_lr"
        if self._at_step is not None and not lost:
            here = self._at_step.outcome(contents, remedy, step=bad, reach=reach)
        if here is not None:
            result = judged(remedy, here, report)
            is_short = bool(here.not_continued) and result.failing_step_finite is True and not here.noticed
            fails_again = here.same_before and bool(here.noticed)  # so it does from the start
            is_no_help = fails_again or bool(here.passed > bad and far_beyond(here, report))
            is_last_word = self.limits.one > _QUICKLY or bool(self._from_start) or is_no_help
            if is_last_word or result.fails_in or (result.proven and not is_short):
                return result
            if is_short:
                longer = self._tried_from_start(remedy, report, contents)
                return result if longer.failing_step_finite is None else longer
        if self._first_batch is not None and (self._from_start or self.limits.one > _QUICKLY):
            return self._tried_with_batch_first(remedy, report, contents)
        if self._from_start:
            why = self._at_step.why_not if self._at_step is not None and self._from_start == NO_START else ""
            return replace(remedy, note=self._reason_of_time() or why or self._from_start)
        return self._tried_from_start(remedy, report, contents)

    def _tried_with_batch_first(self, remedy: Remedy, report: Report, contents: dict[str, bytes]) -> Remedy:
        """The result of as many steps of the changed program as it came, the first of them with the failing batch."""
        bad, began = last_bad_step(report), time.monotonic()
        seconds = min(max(self.limits.one, _QUICKLY), max(self.until - began, 1.0))
        reach = Reach(self.steps, bad + 1, min(self.limits.further, seconds / 2))
        try:
            data, in_time = self.start.try_out(
                self.program,
                contents,
                step=0,
                reach=reach,
                seconds=seconds,
                first_batch=self._first_batch,
                isolated=self._isolated,
            )
        except OSError as error:
            return replace(remedy, note=f"the program cannot be run again: {error}")
        self._longest = max(self._longest, time.monotonic() - began)
        outcome = TrialOutcome.of(data) if data is not None else None
        if outcome is not None:  # in the steps of the run that failed
            later = None if outcome.bad_step is None else outcome.bad_step + bad
            passed = outcome.passed + bad
            outcome = replace(outcome, passed=passed, bad_step=later, at_step=True, losses=(), latest=())
        result = judged(remedy, outcome, report, "" if in_time else f"stopped after {seconds:.0f} s")
        return replace(result, note="; ".join(part for part in (_BATCH_FIRST, result.note) if part))

    def _tried_from_start(self, remedy: Remedy, report: Report, contents: dict[str, bytes]) -> Remedy:
        try:
            outcome, stopped = self._outcome(contents, report, self.steps, remedy)
            result = judged(remedy, outcome, report, stopped)
            if report.verdict == "diverged" and outcome is not None:
                self._made_worse.append(makes_worse(outcome, report))
            if result.failing_step_finite and outcome is not None and not self._is_repeatable(outcome, report):
                self._fails_again = False
        except OSError as error:
            return replace(remedy, note=f"the program cannot be run again: {error}")
        return result

    def _reach(self, report: Report, steps: int) -> Reach:
        left = max(self.until - time.monotonic(), 0.0) if steps else 0.0
        further, end = min(self.limits.further, left), min(self.limits.end, left)
        return Reach(last_bad_step(report) + steps, far_enough(report), further, end)

    def _outcome(
        self, contents: dict[str, bytes], report: Report, steps: int, remedy: Remedy | None = None
    ) -> tuple[TrialOutcome | None, str]:
        """The outcome of one run, and why it was stopped, if it was."""
        bad, site = last_bad_step(report), report.history.made_at
        made = None
        if site is not None:
            line = moved_line(remedy, site.file, site.line) if remedy else site.line
            made = site.file, line, site.column or 0
        began = time.monotonic()
        reach = self._reach(report, steps)
        seconds = min(self.limits.one + reach.further, max(self.until - began, 1.0))
        data, in_time = self.start.try_out(
            self.program,
            contents,
            step=bad,
            reach=reach,
            seconds=seconds,
            made=made,
            reads_decide=self._reads_decide,
            isolated=self._isolated,
        )
        self._longest = max(self._longest, time.monotonic() - began)
        return TrialOutcome.of(data) if data is not None else None, "" if in_time else f"stopped after {seconds:.0f} s"

    def _is_repeatable(self, outcome: TrialOutcome, report: Report) -> bool:
        """Whether the change helped, and not chance: a program without fixed seeds may not fail again anyway.

        The same first loss shows that; without a healthy loss the unchanged program has to fail once more.
        """
        if self._fails_again is None:
            if repeats_first_loss(outcome, report):
                self._fails_again = True
            else:
                unchanged, stopped = self._outcome({}, report, 0)
                # If it did not finish, the trial is the only evidence there is.
                again = unchanged is None or unchanged.noticed
                if report.verdict == "diverged" and unchanged is not None:
                    again = unchanged.noticed or unchanged.exploded
                self._fails_again = bool(stopped) or bool(again)
        return self._fails_again
