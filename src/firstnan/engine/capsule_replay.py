"""Runs a program from a captured step: traces it from there, ends it after that step, and compares the reports."""

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
"""How many steps to wait for the failure, because a bad update shows in the next step; more if only the state could be
restored."""


class CapsuleReplay(EndProgram):
    """Ends the program after the captured step, whatever becomes of it."""

    searches = False

    def __init__(self, restart: Restart, save: Callable[[Report], None]) -> None:
        super().__init__(save)
        self._restart = restart
        self.was_finite = False
        """Whether the captured step was replayed and stayed finite."""
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
    def mismatch(self) -> str:
        """Why the program is not the one that the step was captured in; empty if it is."""
        return self._restart.restorer.mismatch if self._restart.restorer is not None else ""

    @property
    def outcome(self) -> str:
        """What became of the captured step, in words."""
        step = self._restart.capsule.steps.current
        if self._restart.restorer is None and not self._steps:
            return f"the program reached no training step, so step {step} of the capsule was not replayed"
        if self.mismatch:
            why = f"the model does not match the capsule's ({self.mismatch})"
            return f"step {step} was not replayed as it was captured: {why}"
        if not self.was_finite:
            return f"the program ended before step {step} of the capsule was done"
        return f"step {step} of the capsule was finite here: the captured failure did not happen again"

    def told(self, report: Report, program: str) -> Report:
        return told_by(self._restart, report, program)


def from_the_start(capsule: Capsule) -> bool:
    """Whether the capsule holds the very first step without a batch, so there is nothing to restore."""
    return not capsule.batches and capsule.steps.current == 0


def told_by(restart: Restart, report: Report, program: str) -> Report:
    """The report with notes on what differs from the captured step and its report."""
    notes = [*report.notes, *restart.notes, *changed_sources(restart.capsule, program)]
    before = restart.capsule.report
    if _made_before(before, report):
        # The captured report knows what produced it.
        same = {name: getattr(before, name) for name in ("origin", "cause", "other_causes", "path", "remedies")}
        report = replace(report, **same)
    differences = _differences(before, report)
    if not differences and before.batch is not None and report.batch is not None:
        # The same value in the same batch: the captured report knows the bad samples.
        report = replace(report, batch=before.batch if before.batch.size == report.batch.size else report.batch)
    matches = restart.restorer is None or not restart.restorer.mismatch
    if matches and before.origin is not None and report.origin is not None and not differences:
        report = replace(report, reproduced="deterministic")
    notes += differences
    return replace(report, notes=tuple(notes), replay=HOW)


def _made_before(before: Report, now: Report) -> bool:
    """Whether the bad value existed before the step, and the captured report knows its source."""
    if before.origin is None or now.origin is None or before.origin.phase != now.origin.phase:
        return False
    return came_from_outside(now.origin) and before.origin.site is not None and bool(before.origin.op)


def _differences(before: Report, now: Report) -> list[str]:
    if before.origin is None or now.origin is None:
        return []
    one, other = (f"{o.op} in line {o.site.line}" if o.site else o.op for o in (before.origin, now.origin))
    return [] if one == other else [f"in the captured run the value was created by {one}"]
