"""Tries the fixes of a failure in a block that is watched in the program's own process, such as a notebook's cell."""

from __future__ import annotations

from firstnan.engine import trials
from firstnan.engine.second_run import Start
from firstnan.engine.session import Session
from firstnan.engine.step_trial import StepTrials
from firstnan.observe.runner import Program
from firstnan.records import Report
from firstnan.report import Progress

_ONLY_HERE = "it is outside of what the failing step runs"


def try_fixes(report: Report, session: Session) -> None:
    """Tries them at the failing step, as `firstnan run` does; there is no program to run from its start."""
    report = session.complete(report)
    wanted = min(sum(1 for remedy in report.remedies if remedy.diff), trials.MOST)
    if session.failure is None or not wanted or report.reproduced == "transient":
        return
    progress = Progress(wanted)

    def keep(tried: Report) -> None:
        session.report = tried
        progress.tried(sum(1 for remedy in tried.remedies if remedy.tried))

    attempts = trials.Trials(
        Start(),
        Program("", ()),
        trials.STEPS,
        trials.Limits.after(0.0),
        at_step=StepTrials(session, session.failure),
        from_start=_ONLY_HERE,
    )
    try:
        attempts.run(report, keep)
    except KeyboardInterrupt:
        pass  # what was tried until now is in the report
    finally:
        progress.end()
