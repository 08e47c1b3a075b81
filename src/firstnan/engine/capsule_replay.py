"""A program that is started again in a captured step: traced from there, ended after that step, and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from firstnan.capsule.content import Capsule
from firstnan.engine.conclude import came_from_outside
from firstnan.engine.policies import EndProgram, end_program
from firstnan.engine.restart import Restart, changed_sources
from firstnan.engine.session import Session
from firstnan.records import Report

HOW = "the captured step was replayed"
_WITH_BATCH, _WITHOUT_BATCH = 2, 20
"""So many steps are waited for the failure: what an update wrote shows in the next one. More of them where only the
state could be put in."""


class CapsuleReplay(EndProgram):
    """Ends the program after the captured step, whatever becomes of it."""

    searches = False

    def __init__(self, restart: Restart, save: Callable[[Report], None]) -> None:
        super().__init__(save)
        self._restart = restart
        self.was_finite = False
        """The captured step was replayed, and nothing happened."""
        self._steps = 0

    def step_ended(self, session: Session) -> None:
        if self._restart.restorer is None and not from_the_start(self._restart.capsule):
            return
        self._steps += 1
        if self._steps >= (_WITH_BATCH if self._restart.handed_out else _WITHOUT_BATCH):
            self.was_finite = True
            session.close()
            session.microscope.stop()
            end_program()

    @property
    def outcome(self) -> str:
        """What became of the captured step, in words."""
        step = self._restart.capsule.steps.current
        if self._restart.restorer is None and not self._steps:
            return f"the program reached no training step, so step {step} of the capsule was not replayed"
        if not self.was_finite:
            return f"the program ended before step {step} of the capsule was done"
        return f"step {step} of the capsule was finite here: the captured failure did not happen again"

    def told(self, report: Report, program: str) -> Report:
        return told_by(self._restart, report, program)


def from_the_start(capsule: Capsule) -> bool:
    """Nothing has to be put in before the very first step, and without a batch nothing can be."""
    return not capsule.batches and capsule.steps.current == 0


def told_by(restart: Restart, report: Report, program: str) -> Report:
    """The report with what was not as it had been, and whether it says the same as the captured one."""
    notes = [*report.notes, *restart.notes, *changed_sources(restart.capsule, program)]
    before = restart.capsule.report
    if _made_before(before, report):
        # It is in the capsule as it was; what made it is known from there.
        same = {name: getattr(before, name) for name in ("origin", "cause", "other_causes", "path", "remedies")}
        report = replace(report, **same)
    differences = _differences(before, report)
    if not differences and before.batch is not None and report.batch is not None:
        # The same value of the same batch: which samples are bad was found out when it was captured.
        report = replace(report, batch=before.batch if before.batch.size == report.batch.size else report.batch)
    notes += differences
    return replace(report, notes=tuple(notes), replay=HOW)


def _made_before(before: Report, now: Report) -> bool:
    """Whether the bad value was there when the step began, and the captured report knows where it came from."""
    if before.origin is None or now.origin is None or before.origin.phase != now.origin.phase:
        return False
    return came_from_outside(now.origin) and before.origin.site is not None and bool(before.origin.op)


def _differences(before: Report, now: Report) -> list[str]:
    if before.origin is None or now.origin is None:
        return []
    one, other = (f"{o.op} in line {o.site.line}" if o.site else o.op for o in (before.origin, now.origin))
    return [] if one == other else [f"in the captured run the value was created by {one}"]
