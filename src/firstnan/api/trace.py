"""`trace()`: records every operator of a block, forward and backward."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from firstnan.engine.conclude import AS_IT_RAN
from firstnan.engine.handouts import Handouts
from firstnan.engine.policies import RaiseAsItRuns
from firstnan.engine.session import Session
from firstnan.gate.gate import Gate
from firstnan.observe.observer import Decision
from firstnan.observe.sites import Ownership, directories
from firstnan.records import Noticed, Report
from firstnan.records.errors import NonFiniteError
from firstnan.report import nonfinite_error
from firstnan.tensors.finite import tensors_in
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import parameters_of, reaches


@contextmanager
def trace() -> Iterator[Block]:
    """Records every operator of the block and raises NonFiniteError when a non-finite value reaches training.

        with firstnan.trace():
            loss = model(x).log().mean()
            loss.backward()

    A bad loss raises at `backward()`, bad gradients after it or at the optimizer's step, and bad weights, buffers or
    gradients at the end of the block. If nothing was trained, any NaN that is still in use raises there. The error
    names the line that created the value, its inputs and the cause. Updates that are certain to stay finite are not
    recorded, and overflows that a gradient scaler handles are ignored.
    """
    __tracebackhide__ = True
    block = Block(Ownership(tuple(directories(sys._getframe(2)))))
    with block.session.running():
        block.session.live.begin()
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


# The optimizers that made a step in the last block: in the next block, backward alone is not their step.
_expected: weakref.WeakSet[Any] = weakref.WeakSet()


class Block(RaiseAsItRuns):
    """The block under way; `report` is what was found in it."""

    def __init__(self, ownership: Ownership) -> None:
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        gate = Gate(thorough=True, guard=None)
        handouts = Handouts(replays=False)
        self.session = Session(self, ownership=ownership, gate=gate, handouts=handouts, trace_block=True)

    @property
    def report(self) -> Report | None:
        return self.session.report

    def __repr__(self) -> str:
        return f"<trace: {self.report!r}>" if self.report is not None else "<trace: nothing found>"

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        if session.gate.optimizers or not _expected:
            return
        for optimizer in list(_expected):
            if reaches(roots, set(map(id, parameters_of(optimizer)))):
                session.gate.optimizer_made(optimizer)

    def before_update(self, session: Session, optimizer: Any, closure: bool) -> Decision:
        self._stepped.add(optimizer)
        return Decision.RUN

    def end(self) -> None:
        _expected.clear()
        _expected.update(self._stepped)

    def last_look(self) -> None:
        """Checks at the end of the block for bad values created in it; if it trained, only in what training keeps."""
        __tracebackhide__ = True
        if self.report is None:
            self.session.hooks.guarded(self._look_at_what_is_left)

    def _look_at_what_is_left(self) -> None:
        session = self.session
        tracer = session.microscope.tracer
        assert tracer is not None
        memory = tracer.memory
        last, bad = tracer.last_event(), memory.bad()  # before what is freed is forgotten
        events = (memory.roots() & memory.bad()) - tracer.of_helpers  # what the block does not use is another thread's
        if events and (session.gate.trained or session.gate.scales):
            events &= {event for t in self._kept() for event in memory.bad_writers(memory.key(t), t)}
        elif last in bad and not session.gate.trained:
            events.add(last)  # its result may be dropped, as in a block that only calls a model
        report = self._concluded(Noticed("output"), sorted(events))
        if report is not None:
            raise nonfinite_error(report)

    def _kept(self) -> Iterator[Tensor]:
        """Weights, buffers, gradients and optimizer states (slow: it visits every object)."""
        models = self.session.scope.models()
        for t, _ in (*models.parameters.values(), *models.buffers.values()):
            yield t
        for optimizer in self._stepped:
            yield from (t for _, t in tensors_in(list(optimizer.state.values())))
        for leaf in find_live_objects(Tensor):
            if leaf.is_leaf and leaf.requires_grad:
                yield leaf
                if leaf.grad is not None and not self.session.gate.scales:
                    yield leaf.grad

    def explain(self, error: Exception) -> None:
        """The block raised an exception: adds a note to it that explains a bad value, if there is one."""
        microscope = self.session.microscope
        with contextlib.suppress(Exception):
            if microscope.tracer is not None:
                memory = microscope.tracer.memory
                events = sorted(memory.roots() & memory.bad()) + microscope.raised()
                report = self._concluded(Noticed("exception", type(error).__name__), events)
                if report is not None:
                    error.add_note(str(nonfinite_error(report)))

    def _concluded(self, noticed: Noticed, events: list[int]) -> Report | None:
        report = self.session.microscope.conclude(noticed, [], events, AS_IT_RAN) if events else None
        if report is None or report.origin is None:
            return None
        self.session.found(report)
        return report
