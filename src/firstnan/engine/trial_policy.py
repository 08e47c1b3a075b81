"""Watches a changed program in its process: do the failing step and some after it stay finite?"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from firstnan.engine.policies import EndProgram, end_program
from firstnan.engine.session import Session
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership
from firstnan.repair.verdict import Reach, TrialOutcome, described

_NEWS = 0.5
"""Seconds after which a trial that has gone far says again how far it is."""

_LAST_LOSSES = 5
_LAST_RATES = 5


class Trial(EndProgram):
    """Ends the program at a failure, or where `reach` ends; calls `tell` with the outcome from step `step` on.

    Steps are those of the optimizer that is made at `made` (file, line and column), where there are several.
    """

    searches = False

    def __init__(
        self,
        gate: Gate,
        ownership: Ownership,
        *,
        step: int,
        reach: Reach,
        tell: Callable[[TrialOutcome], None],
        made: tuple[str, int, int] | None = None,
    ) -> None:
        super().__init__(lambda report: tell(self.outcome()))
        self._gate, self._step, self._reach, self._tell = gate, step, reach, tell
        self._counted = _CountedSteps(gate, ownership, made)
        self._parent = os.getppid()
        self._session: Session | None = None
        self._stopped = False
        self._losses: tuple[tuple[int, float], ...] | None = None
        """Those up to the failing step, once it has passed."""
        self._latest: tuple[tuple[int, float], ...] = ()
        self._began = self._told = 0.0

    def watch(self, session: Session) -> None:
        self._session = session

    def step_ended(self, session: Session) -> None:
        self._counted.step_ended()
        passed, now = self._counted.passed, time.monotonic()
        self._latest = self._losses_now()[-_LAST_LOSSES:]
        if passed > self._step:
            if self._losses is None:
                self._losses, self._began = self._losses_now(), now
            if passed <= self._reach.last or now - self._told > _NEWS:
                self._tell(self.outcome())  # known even if time runs out
                self._told = now
        enough = self._reach.is_enough(passed, now - self._began if self._losses is not None else 0.0)
        if enough or os.getppid() != self._parent:
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
        over = fate is not None and not found and not self._stopped
        return replace(
            fate if fate is not None and over else TrialOutcome(),
            ended="program" if over else "",
            passed=self._counted.passed,
            noticed=described(noticed) if noticed or found else "",
            bad_step=report.step if report is not None and found else None,
            trained=self._gate.trained,
            exploded=alarm.text if alarm is not None else "",
            frozen=_without_rate(self._gate, self._counted.optimizers),
            losses=self._losses if self._losses is not None else self._losses_now(),
            latest=self._latest,
        )

    def _losses_now(self) -> tuple[tuple[int, float], ...]:
        return tuple((r.step, r.loss) for r in self._gate.steps_of(self._counted.optimizers) if r.loss is not None)


def _without_rate(gate: Gate, optimizers: list[Any]) -> str:
    """Why training learns nothing: the last updates had a learning rate of 0."""
    rates = [r.lr for r in gate.steps_of(optimizers) if r.lr is not None][-_LAST_RATES:]
    return "the learning rate is 0 with it" if len(rates) == _LAST_RATES and not any(rates) else ""


class _CountedSteps:
    """Counts the steps of the optimizer created at a place; all steps if there is only one, or no place."""

    def __init__(self, gate: Gate, ownership: Ownership, made: tuple[str, int, int] | None) -> None:
        self._gate, self._ownership, self._made = gate, ownership, made
        self._ours: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known = 0
        self._several = False
        self._passed = 0

    @property
    def optimizers(self) -> list[Any]:
        """Those whose steps are counted, where there are others."""
        return list(self._ours) if self._several else []

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

    def _nearest(self, optimizers: list[Any], file: str, line: int, column: int) -> list[Any]:
        """The optimizers created there; a change of the source may have moved the place."""
        sites = [(o, self._gate.call_sites.of(o, self._ownership)[0]) for o in optimizers]
        away = [
            ((abs(s.line - line), abs((s.column or 0) - column)), o)
            for o, s in sites
            if s is not None and os.path.realpath(s.file) == os.path.realpath(file)
        ]
        least = min((distance for distance, _ in away), default=None)
        return [o for distance, o in away if distance == least]
