"""Tries remedies: the changed program is run in a child up to some steps behind the failing one, and judged."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from firstnan.engine.second_run import Start
from firstnan.observe.runner import Program
from firstnan.records import Noticed, Remedy, Report
from firstnan.repair.patch import PatchError, moved, new_contents

STEPS = 20
"""How many steps behind the failing one have to be finite, where nobody says otherwise."""
MOST = 8
PATIENCE = 300.0
"""Seconds of running time up to which a program is started again without being asked for."""
_ENOUGH = 3
"""So many that help, though they change healthy numbers, end the search for one that does not."""
_LEFT_UNTRIED = 2
RUN_AGAIN = "the program was run again"
"""How the replay of a report begins that a second run has confirmed."""
_HELPED = "an earlier one already helps"
_SKIPPED = "skipped by Ctrl-C"
_CHANCE = "the unchanged program does not fail in every run, so that a trial proves nothing"
_ROUNDING = {"float16": 5e-2, "bfloat16": 5e-2}
_ROUNDING_ELSE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """What the child saw of the changed program; travels as a small JSON file."""

    passed: int = 0
    """Steps gone through, their updates included; of several optimizers that one's whose step failed."""
    noticed: str = ""
    """What was not finite: the loss, a gradient, an output..."""
    bad_step: int | None = None
    error: str = ""
    """How the program failed, where it did so for another reason."""
    exit: str = ""
    """With what it ended by its own will, where that is not a 0."""
    trained: bool = False
    exploded: str = ""
    losses: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def of(data: Any) -> Outcome:
        return Outcome(**{**data, "losses": tuple((step, float(loss)) for step, loss in data["losses"])})


@dataclass(frozen=True)
class Limits:
    """Seconds for one trial and for all, from the time that the program itself took."""

    one: float
    all: float

    @staticmethod
    def after(seconds: float) -> Limits:
        return Limits(max(20.0, 3 * seconds), max(120.0, 4 * seconds))


def last_bad_step(report: Report) -> int:
    """The step in which the value was noticed: that of its birth, or one soon after it."""
    seen = [record.step for record in report.history.steps[-1:]]
    return max([report.step or 0, *seen])


class Trials:
    """Tries the remedies of one report, best first, until one helps or time is up."""

    def __init__(self, start: Start, program: Program, steps: int, limits: Limits) -> None:
        self.start, self.program, self.steps, self.limits = start, program, steps, limits
        self.until = time.monotonic() + limits.all
        self._fails_again: bool | None = None
        """Whether the unchanged program is known to fail again in the same step."""
        self._longest = 0.0

    def run(self, report: Report, save: Callable[[Report], None]) -> Report:
        """The report with its remedies tried; `save` gets it after each of them, and at the end."""
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
        """Why the rest is not tried; empty where it is."""
        last = done[-1]
        if self._fails_again is False:
            return _CHANCE
        if last.note == _SKIPPED:
            return _SKIPPED
        if last.proven and (keeps_numbers(last, report) or sum(one.proven for one in done) >= _ENOUGH):
            return _HELPED
        if time.monotonic() + self._longest > self.until:
            return f"{self.limits.all:.0f} s are enough"
        return f"{MOST} others were tried before it" if sum(1 for one in done if one.diff) >= MOST else ""

    def _try(self, remedy: Remedy, report: Report) -> Remedy:
        try:
            changes = new_contents(remedy.diff)
            for source, content in changes:
                compile(content, str(source.path), "exec", dont_inherit=True)
        except (PatchError, SyntaxError, ValueError) as error:
            return replace(remedy, note=f"the change does not fit: {error}")
        contents = {os.path.realpath(source.path): content for source, content in changes}
        try:
            outcome, stopped = self._outcome(contents, report, self.steps, remedy.diff)
            result = judged(remedy, outcome, report, stopped)
            if result.failing_step_finite and outcome is not None and not self._is_repeatable(outcome, report):
                self._fails_again = False
        except OSError as error:
            return replace(remedy, note=f"the program cannot be run again: {error}")
        return result

    def _outcome(
        self, contents: dict[str, bytes], report: Report, steps: int, diff: str = ""
    ) -> tuple[Outcome | None, str]:
        """What came of one run, and why it was stopped, if it was."""
        bad, site = last_bad_step(report), report.history.made_at
        made = (site.file, moved(diff, site.file, site.line) if diff else site.line) if site is not None else None
        began = time.monotonic()
        seconds = min(self.limits.one, max(self.until - began, 1.0))
        data, in_time = self.start.try_out(
            self.program, contents, step=bad, last=bad + steps, seconds=seconds, made=made
        )
        self._longest = max(self._longest, time.monotonic() - began)
        return Outcome.of(data) if data is not None else None, "" if in_time else f"stopped after {seconds:.0f} s"

    def _is_repeatable(self, outcome: Outcome, report: Report) -> bool:
        """Whether it is the change that helped: a program that rolls new dice in every run may just be lucky.

        Healthy losses that come again show it; where there are none the unchanged program has to fail once more.
        """
        if self._fails_again is None:
            first = _pairs(outcome, report)[:1]
            if first and _change(first) <= _ROUNDING_ELSE:
                self._fails_again = True
            else:
                unchanged, stopped = self._outcome({}, report, 0)
                # Not finished means not known: then the trial is all there is.
                self._fails_again = bool(stopped) or unchanged is None or bool(unchanged.noticed)
        return self._fails_again


def untried(remedy: Remedy) -> Remedy:
    """The remedy as if nobody had run it."""
    return replace(remedy, tried=False, failing_step_finite=None, steps_finite_after=None, loss_change=None, note="")


# --- what came of it ----------------------------------------------------------------------------------------------


def judged(remedy: Remedy, outcome: Outcome | None, report: Report, stopped: str = "") -> Remedy:
    """The remedy with what the trial showed; `stopped` says that it was not finished, and why."""
    bad = last_bad_step(report)
    if outcome is None or (stopped and outcome.passed <= bad and not outcome.noticed):
        return replace(remedy, note=f"{stopped}, before step {bad} was over" if stopped else "the trial was lost")
    change = loss_change(outcome, report) if remedy.kind == "code" else None
    finite, after, note = _verdict(remedy, outcome, report)
    note = "; ".join(part for part in (note, "" if outcome.noticed else stopped) if part)
    return replace(
        remedy, tried=True, failing_step_finite=finite, steps_finite_after=after, loss_change=change, note=note
    )


def _verdict(remedy: Remedy, outcome: Outcome, report: Report) -> tuple[bool | None, int | None, str]:
    """Whether the failing step is finite (None: it never came), how many after it (None: not all), and a remark."""
    bad, passed = last_bad_step(report), outcome.passed
    reached, steps = passed > bad, f"{passed} step{'s' * (passed != 1)}"
    if outcome.noticed:
        when = outcome.bad_step if outcome.bad_step is not None else bad
        where = f"in step {when}"
        if when > bad and reached:
            return True, None, f"{outcome.noticed} is not finite {where}"
        return False, None, outcome.noticed + ("" if when == report.step else f" {where}")
    if outcome.error:
        return reached or None, None, f"the program stopped in step {passed}: {outcome.error}"
    if outcome.exploded and reached:
        return True, None, outcome.exploded[:1].lower() + outcome.exploded[1:].rstrip(".")
    if reached:
        return True, passed - 1 - bad, f"then the program ended with {outcome.exit}" if outcome.exit else ""
    outside = report.noticed is not None and report.noticed.what in ("output", "value", "exception")
    if outside and not outcome.trained and not outcome.exit:
        return True, 0, ""
    if remedy.kind == "data" and passed:
        return True, 0, f"with less data the program ends after {steps}, all of them finite"
    how = f" with {outcome.exit}" if outcome.exit else ""
    return None, None, f"the program ended{how} after {steps}, before the failing one"


def loss_change(outcome: Outcome, report: Report) -> float | None:
    """The largest relative change of the loss before the failing step; None where there is nothing to compare."""
    pairs = _pairs(outcome, report)
    return _change(pairs) if pairs else None


def _pairs(outcome: Outcome, report: Report) -> list[tuple[float, float]]:
    """The healthy losses of the program as it is and of the changed one, oldest first."""
    first = report.step or 0
    before = _by_step([(r.step, r.loss) for r in report.history.steps if r.step < first and r.loss is not None])
    now = _by_step([(step, loss) for step, loss in outcome.losses if step < first])
    pairs = [(a, b) for step in before for a, b in zip(before[step], now.get(step, []), strict=False)]
    return [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]


def _change(pairs: list[tuple[float, float]]) -> float:
    # A loss that crosses 0 changes by any factor there.
    least = 1e-6 * max(abs(a) for a, _ in pairs)
    return max(abs(a - b) / (max(abs(a), abs(b), least) or 1.0) for a, b in pairs)


def _by_step(losses: list[tuple[int, float]]) -> dict[int, list[float]]:
    """Optimizers that take turns have one loss each in every step."""
    found: dict[int, list[float]] = {}
    for step, loss in losses:
        found.setdefault(step, []).append(loss)
    return found


def keeps_numbers(remedy: Remedy, report: Report) -> bool:
    """Whether the healthy losses changed by no more than rounding does over some steps."""
    made = report.origin.produced if report.origin else None
    rounding = _ROUNDING.get((made.dtype if made else "").removeprefix("torch."), _ROUNDING_ELSE)
    return remedy.loss_change is None or remedy.loss_change <= rounding


def ranked(remedies: list[Remedy], report: Report) -> tuple[Remedy, ...]:
    """Proven ones first, those that leave healthy numbers alone before the others; failed ones last."""

    def rank(remedy: Remedy) -> int:
        if remedy.proven:
            return 0 if keeps_numbers(remedy, report) else 1
        return 2 if not remedy.tried else 3 if remedy.failing_step_finite else 4

    return tuple(sorted(remedies, key=rank))


def described(noticed: Noticed | None) -> str:
    """What was not finite, in two words."""
    what = noticed.what if noticed else "value"
    return {"loss": "the loss", "value": "a value that the program reads"}.get(what, f"a {what}")


def ended_by(error: BaseException) -> Outcome:
    """The outcome of a program of which only this is known: what ended it."""
    if isinstance(error, SystemExit):
        code = " ".join(str(error.code).split())[:100]
        return Outcome(exit=f"exit code {code}") if error.code not in (0, None) else Outcome()
    return Outcome(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])
