"""`trace()`: every operator of a block, forward and backward, from its first line on."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from firstnan.engine.conclude import AS_IT_RAN
from firstnan.engine.handouts import Replayer
from firstnan.engine.microscope import Microscope
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm
from firstnan.observe.sites import Ownership, directories
from firstnan.observe.training_hooks import TrainingHooks
from firstnan.records import Noticed, Report
from firstnan.records.errors import InternalErrors, NonFiniteError
from firstnan.tensors.finite import tensors_in
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import parameters_of, reaches


@contextmanager
def trace() -> Iterator[Block]:
    """Records every operator of the block and raises NonFiniteError where a bad value reaches training.

        with firstnan.trace():
            loss = model(x).log().mean()
            loss.backward()

    That is at `backward()` for a bad loss, after it or at the optimizer's step for bad gradients, and at the end of
    the block for what is left in weights, buffers and gradients; where nothing was trained, for any NaN that is still
    in use there. The error says which line made it, from what, and why. Updates that are known to stay finite are left
    out, and so are overflows that a gradient scaler deals with.
    """
    block = Block(Ownership(tuple(directories(sys._getframe(2)))))
    block.begin()
    try:
        yield block
    except NonFiniteError:
        raise
    except Exception as error:
        block.explain(error)
        raise
    else:
        block.last_look()
    finally:
        block.end()


# The optimizers that made a step in the last block: in the next one, backward for them is not the step itself.
_expected: weakref.WeakSet[Any] = weakref.WeakSet()


class Block:
    """The block under way; `report` is what was found in it (a gate.Listener and a hooks.Audience)."""

    is_calm = False

    def __init__(self, ownership: Ownership, find_models: Callable[[], Models] = Models) -> None:
        self.report: Report | None = None
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.internal_error = InternalErrors(logging.getLogger("firstnan").error)
        self.replayer = Replayer()
        self.gate = Gate(self, thorough=True)
        self.gate.new_guard = None
        self.microscope = Microscope(ownership, self.gate, self.replayer, find_models)
        self.hooks = TrainingHooks(self.gate, self)

    def begin(self) -> None:
        self.hooks.install()
        # The names of weights are looked up when there is something to tell.
        self.microscope.start(in_step=False).region = "step"

    def end(self) -> None:
        self.microscope.stop()
        self.hooks.remove()
        _expected.clear()
        _expected.update(self._stepped)

    def last_look(self) -> None:
        """At the end of the block: what was born in it and is still there; where it trained, in what training keeps."""
        if self.report is None:
            self.hooks.guard(self._look_at_what_is_left)

    def _look_at_what_is_left(self) -> None:
        assert self.microscope.tracer is not None
        memory = self.microscope.tracer.memory
        events = memory.roots() & memory.bad()
        if events and (self.gate.trained or self.gate.scales):
            events &= {event for t in self._kept() for event in memory.bad_writers(memory.key(t), t)}
        self._conclude(Noticed("output"), [], sorted(events))

    def _kept(self) -> Iterator[Tensor]:
        """Weights, buffers, gradients and the state of optimizers (slow: every object is looked at)."""
        models = self.microscope.find_models()
        for t, _ in (*models.parameters.values(), *models.buffers.values()):
            yield t
        for optimizer in self._stepped:
            yield from (t for _, t in tensors_in(list(optimizer.state.values())))
        for leaf in find_live_objects(Tensor):
            if leaf.is_leaf and leaf.requires_grad:
                yield leaf
                if leaf.grad is not None and not self.gate.scales:
                    yield leaf.grad

    def explain(self, error: Exception) -> None:
        """The block ended by an error of its own: says in a note where a bad value came from, if there is one."""
        tracer = self.microscope.tracer
        with contextlib.suppress(Exception):
            if tracer is not None:
                events = sorted(tracer.memory.roots() & tracer.memory.bad()) + self.microscope.raised()
                self._conclude(Noticed("exception", type(error).__name__), [], events, told=error)

    def _conclude(
        self, noticed: Noticed, tensors: list[Tensor], events: list[int], told: Exception | None = None
    ) -> None:
        report = self.microscope.conclude(noticed, tensors, events, AS_IT_RAN) if events else None
        if report is None or report.origin is None:
            return
        self.report = report
        if told is None:
            raise NonFiniteError(report)
        told.add_note(str(NonFiniteError(report)))

    # What the gate says.

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        self.report = self.microscope.conclude(noticed, tensors, [], AS_IT_RAN)
        if self.report is not None:
            raise NonFiniteError(self.report)

    def suppresses(self, optimizer: Any) -> bool:
        return False

    def step_begins(self, optimizer: Any, closure: bool) -> None:
        tracer = self.microscope.tracer
        self._stepped.add(optimizer)
        if tracer is not None:
            self.gate.is_safe = tracer.update_begins(optimizer, closure, self.gate.norm)
            # Before its first step an optimizer from before the block is not known, and backward seemed to be the step.
            tracer.step = self.gate.steps.of(optimizer)

    def step_ended(self, by_hand: bool = False) -> None:
        tracer = self.microscope.tracer
        if tracer is not None:
            tracer.update_ended()
            tracer.forget_healthy()
            tracer.step = self.gate.steps.current

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        """There is no guard here."""

    # What torch says.

    def concerns(self, roots: list[Tensor]) -> bool:
        if self.gate.optimizers == 0 and _expected:
            self.hooks.guard(self._expect, roots)
        return True

    def _expect(self, roots: list[Tensor]) -> None:
        for optimizer in list(_expected):
            if reaches(roots, set(map(id, parameters_of(optimizer)))):
                self.gate.optimizer_made(optimizer)

    def backward_begins(self) -> None:
        if self.microscope.tracer is not None:
            self.microscope.tracer.goes_on()

    def optimizer_made(self) -> None:
        """Part of the block like everything else."""

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        return self.microscope.unseen()
