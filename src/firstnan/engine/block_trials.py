"""Tries the fixes of a failure where there is no program to run from its start: in a block of one, such as a notebook's
cell, or in a process that the program has started."""

from __future__ import annotations

from collections.abc import Callable

from firstnan.engine import trials
from firstnan.engine.second_run import Start
from firstnan.engine.session import Session
from firstnan.engine.step_trial import StepTrials
from firstnan.observe.runner import Program
from firstnan.records import Report
from firstnan.report import Progress

_ONLY_HERE = "the change is outside the code that the failing step runs"


def try_fixes(report: Report, session: Session) -> None:
    """Tries them at the failing step, as `firstnan run` does, and shows how far that is."""
    progress = Progress(min(sum(1 for remedy in report.remedies if remedy.diff), trials.MOST))
    try:
        _tried(report, session, lambda tried: progress.tried(sum(1 for remedy in tried.remedies if remedy.tried)))
    finally:
        progress.end()


def try_fixes_in_worker(report: Report, session: Session, save: Callable[[Report], None]) -> None:
    """The same in another process, which saves what it learns; Ctrl-C is for its program."""
    if _tried(report, session, save):
        raise KeyboardInterrupt


def _tried(report: Report, session: Session, save: Callable[[Report], None]) -> bool:
    """Whether Ctrl-C was pressed; `save` gets the report after each trial."""
    report = session.complete(report)
    if session.failure is None or not any(remedy.diff for remedy in report.remedies):
        return False
    if report.reproduced == "transient":
        return False
    at_step = StepTrials(session, session.failure)

    def keep(tried: Report) -> None:
        session.report = tried
        save(tried)

    attempts = trials.Trials(
        Start(),
        Program("", ()),
        trials.STEPS,
        trials.Limits.after(0.0),
        at_step=at_step,
        from_start=_ONLY_HERE,
    )
    try:
        tried = attempts.run(report, keep)
    except KeyboardInterrupt:  # what was tried until now is in the report
        return True
    return at_step.interrupted or trials.were_skipped(tried)
