"""Plays a captured step again: in a program that lands in it, or in one's own loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from firstnan.api.detector import models_given, optimizers_given
from firstnan.api.trace import Block
from firstnan.capsule.content import Capsule, load
from firstnan.capsule.training_objects import TrainingObjects
from firstnan.engine.conclude import came_from_outside
from firstnan.engine.restart import Restart, changed_sources
from firstnan.engine.watch import Mode, Watch
from firstnan.observe.program_hooks import end_program
from firstnan.observe.sites import Ownership, directories
from firstnan.records import Report
from firstnan.records.errors import NonFiniteError
from firstnan.tensors.batches import NamelessSource
from firstnan.tensors.names import Models

HOW = "the captured step was played again"
_WITH_BATCH, _WITHOUT_BATCH = 2, 20
"""So many steps are waited for the failure: what an update wrote shows in the next one. More of them where only the
state could be put in."""


class Rerun(Watch):
    """Watches a program that is to land in a captured step, traces it from there, and ends it after that step."""

    def __init__(self, capsule: Capsule, **options: Any) -> None:
        self.capsule = capsule
        self.was_finite = False
        """The captured step was played, and nothing happened."""
        self._steps = 0
        # Nothing has to be put in before the very first step, and without a batch nothing can be.
        self._from_the_start = first = not capsule.batches and capsule.steps.current == 0
        super().__init__(
            tracing=first, trace_from=0 if first else None, outputs_decide=False, may_replay=False, **options
        )
        self.landing = Restart(capsule, self.gate, self._living, self._landed)

    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        if self.mode is Mode.DONE or not torch.is_grad_enabled():
            return super().next_batch(iterator, fetch)
        return super().next_batch(iterator, lambda one: self._batch(one, fetch))

    def _batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        with self.unseen():
            return self.landing.batch(iterator, fetch)

    def _handed_out(self, iterator: Any, batch: Any) -> None:
        super()._handed_out(iterator, batch)
        self.landing.label(self.replayer.latest)

    def _landed(self) -> None:
        """Every operator is recorded from here on."""
        self.microscope.stop()
        self._learned = False
        self._learn_buffers()
        self.microscope.drop_gradients()
        self.mode, self.gate.thorough = Mode.TRACING, True
        self.microscope.start(in_step=True)

    def suppresses(self, optimizer: Any) -> bool:
        if self.landing.to_suppress > 0:
            self.landing.to_suppress -= 1
            return True
        return super().suppresses(optimizer)

    def backward_begins(self) -> None:
        self.landing.backward_begins()
        super().backward_begins()

    def step_ended(self, by_hand: bool = False) -> None:
        super().step_ended(by_hand)
        if self.mode is Mode.DONE:
            return
        if self.landing.restorer is None and not self._from_the_start:
            self.landing.step_ended(by_hand)
            return
        self._steps += 1
        if self._steps >= (_WITH_BATCH if self.landing.handed_out else _WITHOUT_BATCH):
            self.was_finite, self.mode = True, Mode.DONE
            self.microscope.stop()
            end_program()

    @property
    def outcome(self) -> str:
        """What became of the captured step, in words."""
        step = self.capsule.steps.current
        if self.landing.restorer is None and not self._steps:
            return f"the program came to no training step: step {step} of the capsule was not played"
        if not self.was_finite:
            return f"the program ended before step {step} of the capsule was done"
        return f"step {step} of the capsule was finite here: what was captured did not happen again"

    def told(self, report: Report, program: str) -> Report:
        return told(self.landing, report, program)


class _Play(Block):
    """The captured step in one's own loop, every operator of it recorded."""

    def __init__(self, capsule: Capsule, roots: dict[str, Module], optimizers: list[Any], ownership: Ownership) -> None:
        super().__init__(ownership, lambda: Models(roots))
        for optimizer in optimizers:
            self.gate.optimizer_made(optimizer)
        self.landing = Restart(capsule, self.gate, lambda: TrainingObjects.find(optimizers, roots), self.begin)

    def suppresses(self, optimizer: Any) -> bool:
        self.landing.to_suppress -= 1
        return self.landing.to_suppress >= 0

    def play(self, step: Callable[[Any], Any]) -> None:
        source = NamelessSource()
        for batch in self.landing.batches():
            self.replayer.fetched(source, batch, self.gate.steps.total)
            self.landing.label(self.replayer.latest)
            self.microscope.mark_batch(batch, sys._getframe(2))
            step(batch)


def replay(
    capsule: str | os.PathLike[str],
    *,
    step: Callable[[Any], Any],
    model: Module | Iterable[Module] | Mapping[str, Module],
    optimizer: Any = None,
) -> Report:
    """Plays the captured step again in one's own loop: puts its state in and calls `step(batch)`, traced.

        report = firstnan.replay("firstnan-step000011.capsule", step=train_step, model=model, optimizer=optimizer)

    `step` is called once for each batch of the step (with None where no batch was captured). The report's verdict is
    "clean" where everything was finite. Model and optimizer are left as the step leaves them.
    """
    caller = sys._getframe(1)
    ownership = Ownership(tuple(directories(caller)))
    block = _Play(load(capsule), models_given(model), optimizers_given(optimizer), ownership)
    try:
        block.play(step)
    except NonFiniteError as error:
        if error.report is not block.report:
            raise
    finally:
        block.end()
    return told(block.landing, block.report or Report("clean"), caller.f_code.co_filename)


def told(landing: Restart, report: Report, program: str) -> Report:
    """The report with what was not as it had been, and whether it says the same as the captured one."""
    notes = [*report.notes, *landing.notes, *changed_sources(landing.capsule, program)]
    before = landing.capsule.report
    if _made_before(before, report):
        # It is in the capsule as it was; what made it is known from there.
        same = {name: getattr(before, name) for name in ("origin", "cause", "other_causes", "path", "remedies")}
        report = replace(report, **same)
    differences = _differences(before, report)
    if not differences and before.batch is not None and report.batch is not None:
        # The same value of the same batch: which samples it takes was found out when it was captured.
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
    return [] if one == other else [f"when it was captured the value was born by {one}"]
