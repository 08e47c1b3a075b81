"""Watches a changed program in its process: do the failing step and some after it stay finite?"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from firstnan.program_hooks import end_program
from firstnan.site import Ownership
from firstnan.trial.trials import Outcome, described
from firstnan.watch import Mode, Watch


class TrialWatch(Watch):
    """A watch that traces nothing, looks at every parameter after every update and ends the program in good time."""

    def __init__(self, *, ownership: Ownership, step: int, last: int, tell: Callable[[Outcome], None]) -> None:
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
        self._parent = os.getppid()
        self._stopped = False

    def step_ended(self, by_hand: bool = False) -> None:
        super().step_ended(by_hand)
        if self.mode is not Mode.WATCHING:
            return
        if self.gate.steps.current > self.step:
            self.tell(self.outcome())  # if time runs out, so much is known
        if self.gate.steps.current > self.last or os.getppid() != self._parent:
            self.mode, self._stopped = Mode.DONE, True
            end_program()

    def outcome(self, fate: Outcome | None = None) -> Outcome:
        """What has been seen so far; `fate` is how the program ended."""
        found = self.report.verdict == "nonfinite"
        noticed = self.report.noticed if found else self.bad_output if self.unresolved else None
        alarm = self.gate.explosion
        return replace(
            Outcome() if fate is None or found or self._stopped else fate,
            passed=self.gate.steps.current,
            noticed=described(noticed) if noticed or found else "",
            bad_step=self.report.step if found else None,
            trained=self.gate.trained,
            exploded=alarm.text if alarm is not None else "",
            losses=tuple((r.step, r.loss) for r in self.gate.past().steps if r.loss is not None),
        )
