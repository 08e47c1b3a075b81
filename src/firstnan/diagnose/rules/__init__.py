"""From an origin to its causes: each rule is a small pure function, the best fit comes first."""

from __future__ import annotations

from dataclasses import replace

from firstnan.diagnose.causes import catalogue
from firstnan.diagnose.rules import data, operators, overflow
from firstnan.diagnose.rules.base import RULES, Failure, growth, nonfinite, rate_rise
from firstnan.diagnose.rules.user_rules import rule
from firstnan.records import Cause, History, Origin, StepRecord, TensorStat, Trace
from firstnan.records.words import number

__all__ = ["ONLY_COMPILED", "divergence", "explain", "from_history", "only_compiled", "rule", "transient"]

RULE_MODULES = (data, operators, overflow)
"""Imported for the rules that they register."""

SECOND = 0.6
CLEAR_GROWTH = 1e6
WORTH_SHOWING = 0.5
"""A cause less than half as likely as the best is not shown."""
_MACHINE = "faulty hardware, a race, uninitialised memory, or a non-deterministic kernel"
_PROGRAM = "a counter, a cache, its own random generator, the clock, or files"


def explain(origin: Origin, trace: Trace, history: History) -> list[Cause]:
    """The causes that fit, best first, each slug once; never empty, the last resort is `unexplained`."""
    failure = Failure(origin, trace, history)
    causes = _all(failure)
    forward = origin.forward_event
    if origin.phase == "backward" and forward is not None and forward.bad:
        # The forward value was non-finite too (hidden from the loss, or intended): its own cause comes second.
        before = replace(origin, phase="forward", event=forward, forward_event=None, produced=None, inputs=())
        causes += [replace(c, confidence=SECOND * c.confidence) for c in _all(Failure(before, trace, history))]
    best: dict[str, Cause] = {}
    for cause in sorted(causes, key=lambda c: -c.confidence):
        if cause.confidence:
            best.setdefault(cause.slug, cause)
    found = list(best.values()) or [_unexplained(failure)]
    failed = dict.fromkeys(c.why for c in causes if not c.confidence)
    first = replace(found[0], evidence=(*found[0].evidence, *failed))
    return [first, *(c for c in found[1:] if c.confidence >= WORTH_SHOWING * first.confidence)]


def from_history(history: History) -> Cause | None:
    """The cause that the steps before show where no operator was traced: divergence, if the growth is clear."""
    rise = growth(history)
    if rise is None or rise.factor < CLEAR_GROWTH:
        return None
    why = f"{rise.sentences()} The operator that failed was not traced."
    entry = catalogue()["divergence_lr"]
    return Cause(entry.slug, entry.title, why, rise.lines(), SECOND, entry.link)


def divergence(history: History, left: int, before: float | None, weights: str, last: StepRecord) -> Cause:
    """The cause of a divergence that stayed finite: from step `left` on the loss was outside its healthy band.

    `before` is the largest of the first losses, `weights` says what has become of the weights, and `last` is the last
    step of the run.
    """
    losses = [(s.step, s.loss) for s in history.steps if s.loss is not None]
    highest = max((loss for _, loss in losses), default=None)
    end = f", and in step {last.step}, the last one, it is {number(last.loss)}"
    why = f"The loss left its healthy range in step {left}: it was at most {number(before)} in the first steps, "
    why += f"rose to {number(highest)} by step {losses[-1][0]}{end}." if losses else f"and has stayed above since{end}."
    lr, risen = dict(history.settings).get("lr"), rate_rise(history)
    if risen is not None:
        why += f" {risen.sentence()}"
    elif isinstance(lr, int | float):
        why += f" The learning rate is {number(lr)}."
    why += f" {overflow.rate_set_by(history)}".rstrip()
    why += " No number overflowed, but training did not recover."
    rise = growth(history)
    evidence = list(rise.lines()) if rise is not None else []
    if weights:
        evidence.append(weights)
    entry = catalogue()["divergence_lr"]
    return Cause(entry.slug, entry.title, why, tuple(evidence), 0.9, entry.link)


def transient(replay: str, difference: str = "", *, programs_own: bool | None = None) -> Cause:
    """The cause if `replay` (in words) gave another result; `difference` is the first operator that differed.

    `programs_own` says whether the program itself did something else (True) or got another result for the same (False).
    """
    if programs_own is None:
        rest = f"Possible reasons are {_MACHINE}, or other program state such as a counter or a cache."
    elif programs_own:
        rest = f"So the step depends on other program state, such as {_PROGRAM}."
    else:
        rest = f"The program did the same, so the reason is {_MACHINE}."
    evidence = (f"the first difference: {difference}",) if difference else ()
    entry = catalogue()["transient"]
    return Cause(entry.slug, entry.title, f"{replay}. {rest}", evidence, 0.6 if difference else 0.5, entry.link)


def received(rank: int, size: int) -> Cause:
    """The cause if all that this rank computes itself is finite."""
    entry = catalogue()["collective"]
    why = f"What rank {rank} computes itself is finite, so the value came from another of the {size} ranks."
    return Cause(entry.slug, entry.title, why, (), 0.9, entry.link)


def on_no_rank(size: int, rank: int | None) -> Cause:
    """The cause if no rank has created the value when it replayed its own part of the step.

    `rank`: the one whose own loss was bad, if it is known.
    """
    entry = catalogue()["transient"]
    which = "which one is not known" if rank is None else f"the first bad loss was that of rank {rank}"
    why = (
        f"Each of the {size} ranks has replayed its own part of the step, and all of them were finite. So their values "
    )
    why += (
        "are non-finite only together, as a sum that overflows, or one of them computed something else the first time; "
    )
    why += f"{which}. Possible reasons for that are {_MACHINE}, or other program state such as a counter or a cache."
    return Cause(entry.slug, entry.title, why, (), 0.5, entry.link)


ONLY_COMPILED = "compile_only"


def only_compiled(
    backend: str, origin: Origin | None, uncompiled: TensorStat | None, earlier: str, *, times: int
) -> Cause:
    """The cause if a step fails each of several `times` that it is compiled, and is finite otherwise.

    `uncompiled`: what the operator at the origin returns uncompiled. `earlier`: an operator before it that differs.
    """
    entry = catalogue()[ONLY_COMPILED]
    by = f" by {backend}" if backend else ""
    why = f"The step fails whenever it is compiled{by}, and is finite when the same operators run one by one."
    evidence = [
        f"compiled, it failed {times} times of {times}; uncompiled, it was finite {times - 1} times of {times - 1}"
    ]
    if origin is not None and origin.produced is not None:
        what = "derivative" if origin.phase == "backward" else "result"
        why += f" The first {what} that is finite only uncompiled is that of `{origin.op}`."
        if uncompiled is not None and uncompiled.min is not None:
            ends = f"{number(uncompiled.min)} to {number(uncompiled.max)}"
            evidence.append(f"`{origin.op}` uncompiled: {ends}; compiled: {nonfinite(origin.produced)}")
    evidence += [earlier] if earlier else []
    return Cause(entry.slug, entry.title, why, tuple(evidence), 0.95, entry.link)


def _all(failure: Failure) -> list[Cause]:
    return [cause for cause in (rule.apply(failure) for rule in RULES) if cause is not None]


def _unexplained(failure: Failure) -> Cause:
    """What can be said when no rule fits: where it is and what was read."""
    try:
        evidence = failure.raised_lines() + failure.input_lines() + failure.witness_lines()
        code, made = failure.code, nonfinite(failure.made)
    except Exception:  # as in a rule: an odd record must not cost the user the report
        evidence, code, made = (), failure.origin.op or failure.origin.aten or "the operator", "a non-finite value"
    did = "raised an error instead of returning a value" if failure.raised else f"produced {made}"
    why = f"`{code}` {did}. No known cause fits what it read."
    entry = catalogue()["unexplained"]
    return Cause(entry.slug, entry.title, why, evidence, 0.1, entry.link)
