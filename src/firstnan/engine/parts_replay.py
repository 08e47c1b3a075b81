"""Finds the batch whose gradients were bad, in a step that accumulates those of several batches.

When the update comes, only the sum is left, and the loop has the last batch in its variables. So a turn of the loop, or
a function that was called with the batch, is run again with each batch of the step, up to its backward call.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from firstnan.engine.children import Answer, Answering, TurnReplay
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.policies import REPLAYING, TRIPPED, WATCHING
from firstnan.engine.turn import LeftLoop, Turn, holds_batch, with_batch
from firstnan.records import Noticed

if TYPE_CHECKING:
    from firstnan.engine.session import Session

HOW = "the {} batches of this step were run again one by one"
_MOST = 4
"""How many turns and calls are tried."""


def ways(session: Session, failure: StepFailure) -> Iterator[PartsReplay]:
    """The turns and calls with which the batches of the step can be told apart; none if it had only one."""
    latest = session.handouts.latest
    if latest is None or len(session.backwards.batches()) < 2:
        return
    inside = [call for call in failure.calls if holds_batch(call, latest)]
    for turn in islice((*inside, *failure.turns), _MOST):
        yield PartsReplay(session, failure, turn)


class PartsReplay(TurnReplay):
    """Runs a turn again with one batch of the step after the other, until the gradients are bad."""

    def __init__(
        self, session: Session, failure: StepFailure, turn: Turn, *, start: int = 0, batch: Any = None
    ) -> None:
        """`batch`: the batch that is to blame with some samples replaced; only this one is used then."""
        super().__init__(session, failure, turn, start=start, traced=batch is None, batch=batch)
        self._backwards_of_step = session.backwards.count
        self._parts = session.backwards.batches()
        self._number = self._made = 0
        self._given: Any = None
        """What the turn gets as its batch."""
        self._is_given = False
        """Whether it is in the variables that the turn begins with."""

    def _run(self) -> None:
        session, turn, policy = self._session, self._turn, self._session.policy
        assert isinstance(policy, Answering)
        code, held = turn.compiled(), session.handouts.latest
        if code is None or held is None:
            return
        session.turn_replayed_by(self)
        for phase in (WATCHING, TRIPPED, REPLAYING):
            session.enter(phase)
        names, only = dict(turn.names), session.handouts.part
        for number in range(len(self._parts)) if only is None else (only,):
            self._number = number
            policy.working(session)
            turn.names.update(names)
            session.handouts.blame(self._number, self._backwards_of_step)
            self._given = self._parts[self._number].batch if self._batch is None else self._batch
            self._asked = self._made = 0
            self._restore()
            self._is_given = bool(holds_batch(turn, held))
            try:
                turn.names.update(with_batch(turn, held.batch, self._given))
            except ValueError:  # it has other parts than the last one
                return
            if self._traced:
                self.begin_trace(self._given)
            try:
                turn.run(code)
            except LeftLoop:
                pass
            except BaseException as error:
                self.error = error
                return
            session.microscope.stop()
            if self._explained is not None:
                policy.answer(self._explained)

    def next_batch(self, source: Any) -> tuple[Any] | None:
        self._asked += 1
        if self._asked > 1:
            raise LeftLoop
        return (self._given,)

    def tripped(self, trip: Any, place: tuple[str, int]) -> None:
        """What is bad is told by the gradients alone."""

    def backward_ended(self, bad: list[Tensor]) -> None:
        """A backward call of the turn is over; ends the turn when no other is to come."""
        session, failure = self._session, self.failure
        self._made += 1
        if not self._is_given and not self._asked:
            raise LeftLoop  # it runs with the last batch, whichever was meant
        if bad and not self._traced:
            self._failed = True
        elif bad:
            how = HOW.format(len(self._parts))
            report = session.microscope.conclude(Noticed("gradient"), bad, [], how)
            if report is not None and len(bad) > len(failure.trip.tensors):
                report = report.with_other_numbers()
            if report is not None:
                before = failure.trip.before_update
                self._explained = Answer(report, before, True, session.layers_seen(), self._number)
        if bad or self._made * len(self._parts) >= self._backwards_of_step:
            raise LeftLoop
