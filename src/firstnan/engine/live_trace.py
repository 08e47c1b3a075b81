"""Tracing a program as it runs: which part of it an operator belongs to, and which steps are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from firstnan.engine.microscope import Microscope
from firstnan.tracing.tracer import Tracer


class LiveTrace:
    """Tells the microscope's tracer where the program is.

    `from_step` where only the steps from one before it on are recorded, after what came before the first step; None
    where everything is. In a `block` of `trace()` all of it is one step, whatever is trained in it.
    """

    def __init__(self, microscope: Microscope, *, from_step: int | None = None, block: bool = False) -> None:
        self._microscope, self._from_step, self._block = microscope, from_step, block
        self.on = False

    @property
    def tracer(self) -> Tracer | None:
        return self._microscope.tracer if self.on else None

    def begin(self, *, in_step: bool = False) -> None:
        self.on = True
        tracer = self._microscope.start(in_step=in_step)
        if self._block:
            tracer.region = "step"  # The names of weights are looked up when there is something to tell.

    def fetched(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetches a batch; what runs meanwhile makes data."""
        tracer = self.tracer
        if tracer is None:
            return fetch(iterator)
        before, tracer.region = tracer.region, "data"
        try:
            return fetch(iterator)
        finally:
            tracer.region = before

    def handed_out(self, batch: Any) -> None:
        tracer = self.tracer
        if tracer is not None and tracer.running:
            tracer.follow()
            tracer.region = "step"
            self._microscope.mark_batch(batch, sys._getframe())

    def backward_begins(self) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        if self._block:
            tracer.goes_on()
        else:
            tracer.follow()
            tracer.region = "step"

    def optimizer_made(self) -> None:
        if self.tracer is not None and not self._block:
            # Another stage of training: what was done since the last update prepared it.
            self.tracer.relabel("between", "setup")

    def update_begins(self, optimizer: Any, closure: bool, norm: float | None, step: int) -> bool:
        """Returns whether the update is known to keep finite parameters finite."""
        tracer = self.tracer
        if tracer is None:
            return False
        safe = tracer.update_begins(optimizer, closure, norm)
        if self._block:
            # Before its first step an optimizer from before the block is not known, and backward seemed to be the step.
            tracer.step = step
            return safe
        self._microscope.name_tensors()
        return False

    def step_ended(self, by_hand: bool, current: int) -> None:
        tracer = self.tracer
        if tracer is None:
            return
        tracer.update_ended()
        if not self._block:
            # Without an optimizer object it is now that the program updates its weights.
            tracer.region = "update" if by_hand else "between"
        tracer.forget_healthy()
        tracer.step = current
        if self._block:
            return
        if self._from_step is None or current >= self._from_step - 1:
            tracer.start()
            tracer.follow()
            tracer.marks = bool(self._from_step)  # A step that was asked for may be replayed, to compare.
        else:
            tracer.stop()
