"""Tries the fixes of a failure where there is no program to run from its start: in a block of one, such as a notebook's
cell, in a loop with a detector, or in a process that the program has started."""

from __future__ import annotations

import logging
from collections.abc import Callable

from firstnan.engine import isolation, trials
from firstnan.engine.ranks import world
from firstnan.engine.second_run import Start
from firstnan.engine.session import Session
from firstnan.engine.step_trial import StepTrials
from firstnan.observe.runner import Program
from firstnan.records import Report
from firstnan.records.words import headline
from firstnan.report import Progress

_REPORTED = "see the report of firstnan run"
_BRIEFLY = trials.Limits(one=20.0, all=60.0)
"""Somebody waits for the error of a detector, perhaps to restart the training."""
log = logging.getLogger("firstnan")


def try_fixes(report: Report, session: Session) -> None:
    """Tries them at the failing step, as `firstnan run` does, and shows how far that is."""
    progress = Progress(min(sum(1 for remedy in report.remedies if remedy.diff), trials.MOST))

    def keep(tried: Report) -> None:
        session.report = tried
        progress.tried(sum(1 for remedy in tried.remedies if remedy.tried))

    try:
        _try(session.complete(report), session, keep)
    finally:
        progress.end()


def try_fixes_in_worker(report: Report, session: Session, save: Callable[[Report], None]) -> None:
    """The same in another process, which saves what it learns; Ctrl-C is for its program."""

    def keep(tried: Report) -> None:
        session.report = tried
        save(tried)

    if _try(session.complete(report), session, keep):
        raise KeyboardInterrupt


def with_fixes_tried(report: Report, session: Session) -> Report:
    """The report of a detector that is about to raise, with its fixes tried; Ctrl-C skips that."""
    if session.is_reported:
        return trials.left_out(report, _REPORTED)
    if not world().is_alone or isolation.unavailable() or not _can_try(report, session):
        return report
    log.warning("firstnan: %s; trying fixes before the error is raised (Ctrl-C skips this)", headline(report))
    found = [report]
    try:
        _try(report, session, found.append, _BRIEFLY)
    except Exception as error:  # a trial is not part of the program, so its errors must not reach the program
        session.internal_error(error)
    return found[-1]


def _can_try(report: Report, session: Session) -> bool:
    if session.failure is None or report.reproduced == "transient":
        return False
    return any(remedy.diff for remedy in report.remedies)


def _try(report: Report, session: Session, save: Callable[[Report], None], limits: trials.Limits | None = None) -> bool:
    """Whether Ctrl-C was pressed; `save` gets the report after each trial."""
    if session.failure is None or not _can_try(report, session):
        return False
    at_step = StepTrials(session, session.failure)
    attempts = trials.Trials(
        Start(),
        Program("", ()),
        trials.STEPS,
        limits or trials.Limits.after(0.0),
        at_step=at_step,
        from_start=trials.NO_START,
    )
    if limits is not None:
        at_step.until = attempts.until
    try:
        tried = attempts.run(report, save)
    except KeyboardInterrupt:  # what was tried until now is saved
        return True
    return at_step.interrupted or trials.were_skipped(tried)
