"""Watches a changed program in its process: do the failing step and some after it stay finite?"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from firstnan.engine.policies import EndProgram, end_program
from firstnan.engine.session import Session
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership
from firstnan.repair.verdict import TrialOutcome, described


class Trial(EndProgram):
    """Ends the program at a failure, or after step `last`; calls `tell` with the outcome from step `step` on.

    Steps are those of the optimizer that is made at `made` (file and line), where there are several.
    """

    searches = False

    def __init__(
        self,
        gate: Gate,
        ownership: Ownership,
        *,
        step: int,
        last: int,
        tell: Callable[[TrialOutcome], None],
        made: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(lambda report: tell(self.outcome()))
        gate.remember(last - step + 1)
        self._gate, self._step, self._last, self._tell = gate, step, last, tell
        self._counted = _CountedSteps(gate, ownership, made)
        self._parent = os.getppid()
        self._session: Session | None = None
        self._stopped = False

    def watch(self, session: Session) -> None:
        self._session = session

    def step_ended(self, session: Session) -> None:
        self._counted.step_ended()
        if self._counted.passed > self._step:
            self._tell(self.outcome())  # known even if time runs out
        if self._counted.passed > self._last or os.getppid() != self._parent:
            self._stopped = True
            session.close()
            end_program()

    def outcome(self, fate: TrialOutcome | None = None) -> TrialOutcome:
        """What has been seen so far; `fate` is how the program ended."""
        session = self._session
        assert session is not None
        report = session.report
        found = report is not None and report.verdict == "nonfinite"
        output = session.values.bad_output if session.values is not None and self.unresolved else None
        noticed = report.noticed if report is not None and found else output
        alarm = self._gate.explosion
        return replace(
            TrialOutcome() if fate is None or found or self._stopped else fate,
            passed=self._counted.passed,
            noticed=described(noticed) if noticed or found else "",
            bad_step=report.step if report is not None and found else None,
            trained=self._gate.trained,
            exploded=alarm.text if alarm is not None else "",
            losses=tuple((r.step, r.loss) for r in self._gate.past().steps if r.loss is not None),
        )


class _CountedSteps:
    """Counts the steps of the optimizer created at a place; all steps if there is only one, or no place."""

    def __init__(self, gate: Gate, ownership: Ownership, made: tuple[str, int] | None) -> None:
        self._gate, self._ownership, self._made = gate, ownership, made
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known = 0
        self._several = False
        self._passed = 0

    @property
    def passed(self) -> int:
        return self._passed if self._several else self._gate.steps.current

    def step_ended(self) -> None:
        steps = self._gate.steps
        if self._made is not None and self._known != self._gate.optimizers:
            self._known = self._gate.optimizers
            self._ours = weakref.WeakSet(self._nearest(list(steps.done), *self._made))
            self._several = self._several or len(steps.done) > len(self._ours) > 0
        for optimizer in self._ours:
            self._passed = max(self._passed, steps.of(optimizer))

    def _nearest(self, optimizers: list[Any], file: str, line: int) -> list[Any]:
        """The optimizers created there; a change of the source may have moved the line."""
        sites = [(o, self._gate.call_sites.of(o, self._ownership)[0]) for o in optimizers]
        away = [
            (abs(s.line - line), o)
            for o, s in sites
            if s is not None and os.path.realpath(s.file) == os.path.realpath(file)
        ]
        least = min((distance for distance, _ in away), default=0)
        return [o for distance, o in away if distance == least]
