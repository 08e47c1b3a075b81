"""Watches a changed program in its process: do the failing step and some after it stay finite?"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from firstnan.engine.watch import Mode, Watch
from firstnan.gate.gate import Gate
from firstnan.observe.program_hooks import end_program
from firstnan.observe.sites import Ownership
from firstnan.repair.verdict import TrialOutcome, described


class _Counted:
    """Counts the steps of the optimizer that is made at a place; where there is but one, or no place, all of them."""

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
        """Those that are made there; a change of the source may have moved the line a little."""
        sites = [(o, self._gate.places.of(o, self._ownership)[0]) for o in optimizers]
        away = [
            (abs(s.line - line), o)
            for o, s in sites
            if s is not None and os.path.realpath(s.file) == os.path.realpath(file)
        ]
        least = min((distance for distance, _ in away), default=0)
        return [o for distance, o in away if distance == least]


class TrialWatch(Watch):
    """A watch that traces nothing, looks at every parameter after every update and ends the program in good time."""

    def __init__(
        self,
        *,
        ownership: Ownership,
        step: int,
        last: int,
        tell: Callable[[TrialOutcome], None],
        made: tuple[str, int] | None = None,
    ) -> None:
        super().__init__(
            ownership=ownership,
            tracing=False,
            trace_from=None,
            outputs_decide=False,
            may_replay=False,
            save=lambda _: tell(self.outcome()),
        )
        self.step, self.last, self.tell = step, last, tell
        self.gate.thorough = True
        self.gate.remember(last - step + 1)
        self._counted = _Counted(self.gate, ownership, made)
        self._parent = os.getppid()
        self._stopped = False

    def step_ended(self, by_hand: bool = False) -> None:
        super().step_ended(by_hand)
        self._counted.step_ended()
        if self.mode is not Mode.WATCHING:
            return
        if self._counted.passed > self.step:
            self.tell(self.outcome())  # if time runs out, so much is known
        if self._counted.passed > self.last or os.getppid() != self._parent:
            self.mode, self._stopped = Mode.DONE, True
            end_program()

    def outcome(self, fate: TrialOutcome | None = None) -> TrialOutcome:
        """What has been seen so far; `fate` is how the program ended."""
        found = self.report.verdict == "nonfinite"
        noticed = self.report.noticed if found else self.bad_output if self.unresolved else None
        alarm = self.gate.explosion
        return replace(
            TrialOutcome() if fate is None or found or self._stopped else fate,
            passed=self._counted.passed,
            noticed=described(noticed) if noticed or found else "",
            bad_step=self.report.step if found else None,
            trained=self.gate.trained,
            exploded=alarm.text if alarm is not None else "",
            losses=tuple((r.step, r.loss) for r in self.gate.past().steps if r.loss is not None),
        )
