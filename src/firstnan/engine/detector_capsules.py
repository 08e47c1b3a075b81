"""Capsules of the steps that a detector finds bad."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from firstnan.capsule.training_objects import TrainingObjects
from firstnan.engine.capsule_writer import CapsuleWriter
from firstnan.engine.handouts import Replayer
from firstnan.engine.model_calls import LastCalls
from firstnan.engine.policy import Settings
from firstnan.engine.recovery import Recovery
from firstnan.gate.gate import Gate
from firstnan.records import Report

_MOST = 3
"""Where training goes on, so many failures are worth a file."""


class Function:
    """The function of one step, among the arguments that it was called with."""

    __slots__ = ("call",)

    def __init__(self, function: Any) -> None:
        self.call = function


class Capsules:
    """Writes one when a failure is known as well as it will be; the state is then as it was before the step."""

    def __init__(
        self,
        told: Settings,
        roots: dict[str, Module],
        gate: Gate,
        replayer: Replayer,
        recovery: Recovery,
        calls: LastCalls,
    ) -> None:
        self._gate, self._recovery, self._calls = gate, recovery, calls
        self._left = _MOST if told.capsules is not None else 0
        self._may_undo = told.policy != "warn"
        if told.capsules is not None:
            optimizers = recovery.optimizers
            self._keeper = CapsuleWriter(
                told.capsules, gate, replayer, lambda: TrainingObjects.find(optimizers, roots), _arguments
            )

    def kept(self, report: Report, before_update: bool, buffers: list[Any]) -> Report:
        """The report with the place of its capsule, where one is wanted; a bad update is taken back for it."""
        if self._left <= 0:
            return report
        self._left -= 1
        inside, late = self._gate.in_step is not None, self._gate.reads.late
        updated = not before_update or inside
        back = updated and self._may_undo and not late and self._recovery.undo_update()
        optimizer = self._gate.steps.last() if self._gate.steps.last else None
        counted = back and not inside and optimizer is not None
        if counted:
            self._gate.steps.take_back(optimizer)
        first = self._calls.first
        written = late or (updated and not back)
        self._keeper.tripped(report, written=written, buffers=buffers, random=first.random if first else None)
        if counted:
            self._gate.steps.add(optimizer)
        return self._keeper.placed(report)


def _arguments(batch: Any) -> Any:
    """What the function of a step was called with: its only argument, or all of them."""
    if not (type(batch) is list and batch and isinstance(batch[0], Function)):
        return batch
    _, given, named = batch
    if named:
        return (*given, named)
    return given[0] if len(given) == 1 else given
