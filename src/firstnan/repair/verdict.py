"""What a trial of a remedy showed: whether the failing step and the steps after it are finite, and at what cost."""

from __future__ import annotations

import math
import statistics
from bisect import insort
from dataclasses import dataclass, replace
from typing import Any, Literal

from firstnan.records import LossRecord, Noticed, Remedy, Report

_MOST_LOSSES = 200
_ROUNDING = 1e-3
_ROUNDING_OF_HALF = {"float16": 5e-2, "bfloat16": 5e-2}


DIVERGES = "training diverges"
BEYOND = "not tried beyond step"
OUT_OF_PROPORTION = 1e6
"""A loss that is so many times larger than any other was computed from a guard's epsilon, not from the data."""
LEAP = 100.0
"""If all later losses are so many times larger than every one before them, what was learned is lost."""
LEAST_OF_LEAP = 10
"""The fewest losses before and after a leap."""


@dataclass(frozen=True)
class Reach:
    """How far a changed program is run: to its end, as far as time allows."""

    last: int
    """The step that is reached in any case, if the program has so many."""
    far: int = 0
    """Ten times as far as the unchanged program came."""
    further: float = 0.0
    """Seconds after the failing step in which `far` should be reached; 0 to stop after `last`."""
    end: float = 0.0
    """Seconds after the failing step in which the end of the program should be reached."""

    def is_enough(self, passed: int, seconds: float) -> bool:
        """Whether so many completed steps, so long after the failing one, are enough."""
        if passed <= self.last:
            return False
        return seconds >= (self.further if passed < self.far else min(self.further, self.end))


@dataclass(frozen=True)
class TrialOutcome:
    """How a run of the changed program went; a child process writes it as a small JSON file."""

    passed: int = 0
    """Completed steps with their updates, of the optimizer whose step failed."""
    noticed: str = ""
    """What was non-finite: the loss, a gradient, an output..."""
    bad_step: int | None = None
    error: str = ""
    """The error that ended the program, if that was another one."""
    not_continued: str = ""
    """Why the trial could not go on, although the program would have."""
    exit: str = ""
    """The exit code, if the program ended itself with one other than 0."""
    trained: bool = False
    ended: Literal["", "loop", "program"] = ""
    """What came to its own end."""
    exploded: str = ""
    frozen: str = ""
    """Why training learns nothing any more, if it does not."""
    change: float | None = None
    """The largest relative change of a healthy loss, where that was measured at the failing step."""
    at_step: bool = False
    """Whether the run began with the failing step, which the unchanged program fails again."""
    same_before: bool = False
    """Whether healthy steps are exactly what they were: a run from the start comes to the failing step as before."""
    losses: tuple[tuple[int, float], ...] = ()
    latest: tuple[tuple[int, float], ...] = ()
    """The last losses of the run."""

    @staticmethod
    def of(data: Any) -> TrialOutcome:
        pairs = {name: tuple((step, float(loss)) for step, loss in data.get(name, ())) for name in ("losses", "latest")}
        return TrialOutcome(**{**data, **pairs})


def last_bad_step(report: Report) -> int:
    """The step in which the value was noticed: the one in which it originated, or a later one."""
    seen = [record.step for record in report.history.steps[-1:]]
    return max([report.step or 0, *seen])


def untried(remedy: Remedy) -> Remedy:
    """The remedy without the result of any trial."""
    return replace(
        remedy,
        tried=False,
        failing_step_finite=None,
        steps_finite_after=None,
        up_to="",
        fails_in=None,
        loss_change=None,
        note="",
        losses=(),
    )


def judged(remedy: Remedy, outcome: TrialOutcome | None, report: Report, stopped: str = "") -> Remedy:
    """The remedy with the result of its trial; `stopped` says why the trial was not finished, if it was not."""
    bad = last_bad_step(report)
    if outcome is None or (stopped and outcome.passed <= bad and not outcome.noticed):
        why = f"{stopped}, before step {bad} finished" if stopped else "the trial wrote no result"
        return replace(remedy, note=why)
    change = outcome.change if outcome.at_step else loss_change(outcome, report)
    if remedy.kind != "code":
        change = None
    finite, after, note = _verdict(remedy, outcome, report)
    beyond = f"{BEYOND} {outcome.passed - 1}: {outcome.not_continued}" if outcome.not_continued and finite else ""
    note = "; ".join(part for part in (note, "" if outcome.noticed else stopped or beyond) if part)
    return replace(
        remedy,
        tried=True,
        failing_step_finite=finite,
        steps_finite_after=after,
        up_to=outcome.ended if after is not None and not stopped else "",
        fails_in=outcome.bad_step if finite and outcome.noticed else None,
        loss_change=change,
        note=note,
        losses=_kept([*outcome.losses, *outcome.latest]),
    )


def _kept(losses: list[tuple[int, float]]) -> tuple[LossRecord, ...]:
    """At most 200 of the losses of a trial, evenly spaced, the last one of each step."""
    by_step = sorted(dict(losses).items())
    return tuple(LossRecord(*pair) for pair in by_step[:: -(-len(by_step) // _MOST_LOSSES) or 1])


def _verdict(remedy: Remedy, outcome: TrialOutcome, report: Report) -> tuple[bool | None, int | None, str]:
    """Whether the failing step is finite (None: not reached), how many are after it (None: not all), and a note."""
    bad, passed = last_bad_step(report), outcome.passed
    reached, steps = passed > bad, f"{passed} step{'s' * (passed != 1)}"
    if outcome.noticed:
        when = outcome.bad_step if outcome.bad_step is not None else bad
        where = f"in step {when}"
        if when > bad and reached:
            return True, None, f"{outcome.noticed} is non-finite {where}"
        if when < (report.step or 0):
            raised = outcome.noticed == described(Noticed("exception"))
            what = "the program ends with an exception" if raised else f"{outcome.noticed} is non-finite"
            return None, None, f"{what} {where} already"
        return False, None, outcome.noticed + ("" if when == report.step else f" {where}")
    if outcome.not_continued and not reached:
        return None, None, f"step {bad} cannot be run to its end: {outcome.not_continued}"
    if outcome.error and not outcome.not_continued:
        return reached or None, None, f"the program stopped in step {passed}: {outcome.error}"
    if report.verdict == "diverged" and not outcome.exploded and reached and outcome.latest:
        return _verdict_on_loss(outcome, report)
    if outcome.frozen and reached and not _was_frozen(report):
        return True, None, f"training stops learning: {outcome.frozen}"
    if outcome.exploded and reached:
        return True, None, f"{DIVERGES} ({outcome.exploded[:1].lower()}{outcome.exploded[1:].rstrip('.')})"
    if reached and (far := far_beyond(outcome, report) or _leap(outcome, report)):
        return True, None, far
    if reached:
        return True, passed - 1 - bad, f"then the program ended with {outcome.exit}" if outcome.exit else ""
    outside = report.noticed is not None and report.noticed.what in ("output", "value", "exception")
    if outside and not outcome.trained and not outcome.exit:
        return True, 0, ""
    if remedy.kind == "data" and passed:
        return True, 0, f"with less data the program ends after {steps}, all of them finite"
    how = f" with {outcome.exit}" if outcome.exit else ""
    return None, None, f"the program ended{how} after {steps}, before the failing one"


def _was_frozen(report: Report) -> bool:
    """Whether training has learned nothing before it failed either."""
    norms = [r.grad_norm for r in report.history.steps if r.step < last_bad_step(report) and r.grad_norm is not None]
    return bool(norms) and not any(norms)


def far_beyond(outcome: TrialOutcome, report: Report) -> str:
    """How large the loss of the failing step is with the change, if it is out of all proportion to that of others."""
    bad = last_bad_step(report)
    there = max((abs(loss) for step, loss in outcome.losses if step == bad), default=0.0)
    seen = [(r.step, abs(r.loss)) for r in report.history.steps if r.loss is not None and math.isfinite(r.loss)]
    if any(step == bad and there <= OUT_OF_PROPORTION * loss for step, loss in seen):
        return ""  # it was as large without the change
    usual = [loss for step, loss in seen if step < bad] + [abs(loss) for step, loss in outcome.latest if step > bad]
    low = far_below(there, usual)
    if not low:
        return ""
    others = "most other steps" if any(loss * OUT_OF_PROPORTION >= there for loss in usual) else "other steps"
    return f"its loss is {there:.3g} there, in {others} about {statistics.median(low):.3g}"


def far_below(loss: float, others: list[float]) -> list[float]:
    """Those of the other losses to which this one is out of all proportion, if that is most of them."""
    others = [one for one in others if one > 0]  # a hinge that is satisfied says nothing about the size of others
    # The guard may be in use in other steps too: most are below a gap that no training closes in one step.
    low = [one for one in others if one * OUT_OF_PROPORTION < loss]
    high = [loss, *(one for one in others if one * OUT_OF_PROPORTION >= loss)]
    is_out = len(low) >= max(3, len(others) / 2) and min(high) > OUT_OF_PROPORTION * max(low)
    return low if is_out else []


def _leap(outcome: TrialOutcome, report: Report) -> str:
    """Where the loss becomes many times larger at once and stays so, which no limit of a dtype shows."""
    bad = last_bad_step(report)
    seen = {r.step: r.loss for r in report.history.steps if r.loss is not None and r.step < bad}
    series = [(s, abs(v)) for s, v in sorted({**seen, **dict(outcome.losses), **dict(outcome.latest)}.items())]
    series = [(step, loss) for step, loss in series if math.isfinite(loss)]
    before, after = (sorted(v for _, v in part) for part in (series[:LEAST_OF_LEAP], series[LEAST_OF_LEAP:]))
    for step, loss in series[LEAST_OF_LEAP : len(series) - LEAST_OF_LEAP + 1]:
        high, low = before[-1 - len(before) // 20], after[len(after) // 20]  # without single spikes
        if step > bad and min(loss, low) > LEAP * high > 0:
            was, now = statistics.median(before), statistics.median(after)
            return f"from step {step} on the loss is about {now:.3g}, before it about {was:.3g}"
        insort(before, loss)
        after.remove(loss)
    return ""


def _verdict_on_loss(outcome: TrialOutcome, report: Report) -> tuple[bool, int | None, str]:
    """Whether the loss of a training that diverged stays in its healthy range with the change."""
    first = max((r.loss for r in report.history.steps if r.loss is not None and r.step < (report.step or 0)), default=0)
    last = statistics.median(loss for _, loss in outcome.latest)
    step = outcome.latest[-1][0]
    if last > first:
        return True, None, f"the loss is still {last:.4g} in step {step}, at first at most {first:.4g}"
    return True, outcome.passed - 1 - last_bad_step(report), f"the loss stays in its range, {last:.4g} in step {step}"


def makes_worse(outcome: TrialOutcome, report: Report) -> bool:
    """Whether a training that seems to have diverged ends above every loss it ever had, with the change as well."""
    highest = max((r.loss for r in report.history.steps if r.loss is not None), default=math.inf)
    return bool(outcome.latest) and statistics.median(loss for _, loss in outcome.latest) > highest


def loss_change(outcome: TrialOutcome, report: Report) -> float | None:
    """The largest relative change of the loss before the failing step; None if there is nothing to compare."""
    pairs = _healthy_losses(outcome, report)
    return _largest_change(pairs) if pairs else None


def repeats_first_loss(outcome: TrialOutcome, report: Report) -> bool:
    """Whether the first healthy loss came out as in the first run."""
    first = _healthy_losses(outcome, report)[:1]
    return bool(first) and _largest_change(first) <= _ROUNDING


def _healthy_losses(outcome: TrialOutcome, report: Report) -> list[tuple[float, float]]:
    """The healthy losses of the unchanged and of the changed program, oldest first."""
    first = report.step or 0
    before = _by_step([(r.step, r.loss) for r in report.history.steps if r.step < first and r.loss is not None])
    now = _by_step([(step, loss) for step, loss in outcome.losses if step < first])
    # A step may have other losses than before (two optimizers made in one place): these are not compared.
    same = [step for step in before if len(before[step]) == len(now.get(step, []))]
    pairs = [(a, b) for step in same for a, b in zip(before[step], now[step], strict=True)]
    return [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]


def change_of(before: list[float], after: list[float]) -> float | None:
    """The largest relative change between losses of the same steps; None if there are none to compare."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if math.isfinite(a) and math.isfinite(b)]
    return _largest_change(pairs) if pairs else None


def _largest_change(pairs: list[tuple[float, float]]) -> float:
    # Near 0 a relative change means nothing.
    least = 1e-6 * max(abs(a) for a, _ in pairs)
    return max(abs(a - b) / (max(abs(a), abs(b), least) or 1.0) for a, b in pairs)


def _by_step(losses: list[tuple[int, float]]) -> dict[int, list[float]]:
    """The losses of each step: one for every optimizer."""
    found: dict[int, list[float]] = {}
    for step, loss in losses:
        found.setdefault(step, []).append(loss)
    return found


def keeps_numbers(remedy: Remedy, report: Report) -> bool:
    """Whether the healthy losses changed by no more than rounding errors do over some steps."""
    made = report.origin.produced if report.origin else None
    rounding = _ROUNDING_OF_HALF.get((made.dtype if made else "").removeprefix("torch."), _ROUNDING)
    return remedy.loss_change is None or remedy.loss_change <= rounding


def far_enough(report: Report) -> int:
    """The step up to which a change has to hold where the program does not end before: ten times as far as it came."""
    return 10 * (last_bad_step(report) + 1)


def ranked(remedies: list[Remedy], report: Report) -> tuple[Remedy, ...]:
    """Proven ones first, those that keep the healthy losses before the others; failed ones last.

    One that holds for long, until something fails much later, comes before those that were not tried.
    """

    def rank(remedy: Remedy) -> int:
        if remedy.proven:
            return 0 if keeps_numbers(remedy, report) else 1
        if not remedy.tried:
            return 3
        return 2 if (remedy.fails_in or 0) >= far_enough(report) else 4 if remedy.failing_step_finite else 5

    return tuple(sorted(remedies, key=rank))


def described(noticed: Noticed | None) -> str:
    """What was non-finite, in a few words."""
    what = noticed.what if noticed else "value"
    told = {
        "loss": "the loss",
        "state": "the optimizer's state",
        "value": "a value that the program reads",
        "exception": "an exception",
    }
    return told.get(what, f"an {what}" if what == "output" else f"a {what}")


def ended_by(error: BaseException) -> TrialOutcome:
    """The outcome of a program of which only the exception that ended it is known."""
    if isinstance(error, SystemExit):
        code = " ".join(str(error.code).split())[:100]
        return TrialOutcome(exit=f"exit code {code}") if error.code not in (0, None) else TrialOutcome()
    return TrialOutcome(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])
