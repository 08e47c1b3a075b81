"""Investigates one failure with the program's own loop: hands out its batches again, with the state restored."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firstnan.engine import isolation
from firstnan.engine.conclude import came_from_another_rank, not_repeated
from firstnan.engine.handouts import ReplayError
from firstnan.engine.policies import COMPARING, REPLAYING, REPLAYS, SEARCHING, TRIPPED, WATCHING, Phase
from firstnan.engine.ranks import world
from firstnan.engine.samples.search import SampleSearch, begin_search
from firstnan.gate.gate import Trip
from firstnan.observe.observer import Decision
from firstnan.observe.runner import MutedOutput
from firstnan.observe.write_guard import WriteGuard, unguarded
from firstnan.records import Report
from firstnan.records.errors import NonFiniteError
from firstnan.tensors.state import Handout, RandomState, Schedules, copy_batch
from firstnan.tracing.recording import Raw, first_difference

if TYPE_CHECKING:
    from firstnan.engine.handouts import Handouts
    from firstnan.engine.microscope import Microscope
    from firstnan.engine.session import Session
    from firstnan.engine.turn import Turn
    from firstnan.gate.gate import Gate

HOW = "the failing batch was handed out again"
_SAME_LOSS = 1e-5
_NO_LOOP = "the training loop could not be replayed for this step"
_NOT_HARMLESS = (
    "the training loop was not replayed: the process cannot be forked ({}), and {}. "
    "With --isolation off, or FIRSTNAN_ISOLATION=off, it is replayed anyway, and writes its output a second time"
)


@dataclass(frozen=True)
class StepFailure:
    """The trip under investigation, and its place in the step."""

    trip: Trip
    place: tuple[str, int]
    report: Report
    """What is known so far."""
    turns: Sequence[Turn] = ()
    """The loops around it, innermost first."""
    calls: Sequence[Turn] = ()
    """The functions running inside the innermost loop, innermost first."""

    def is_own(self, microscope: Microscope) -> bool:
        """Whether all of it was computed on this rank: then it did not come from another one, even if it is gone."""
        return self.trip.noticed.what == "loss" and not microscope.has_received()


class RepeatedStep:
    """In a child: whether a replay has done what the failing step did, by its random numbers and its loss."""

    def __init__(self, handouts: Handouts, gate: Gate) -> None:
        self._handouts, self._gate = handouts, gate
        self._random_at_trip: RandomState | None = None
        self._random_at_start: RandomState | None = None
        self._loss_at_trip: float | None = None

    def step_failed(self) -> None:
        self._random_at_trip, self._loss_at_trip = self._handouts.random_now(), self._gate.last_loss

    def replay_begins(self) -> None:
        self._random_at_start = self._handouts.random_now() if self._random_at_trip is not None else None

    def draws(self) -> bool:
        """Whether a replay that fails now has drawn the random numbers of the failing step, or none at all."""
        known = (self._random_at_trip, self._random_at_start)
        return self._random_at_trip is None or self._handouts.random_now() in known

    def loss(self) -> bool:
        """Whether the last loss of the replay is that of the failing step; another one comes of other data."""
        then, now = self._loss_at_trip, self._gate.last_loss
        return then is None or (now is not None and math.isclose(then, now, rel_tol=_SAME_LOSS))


def can_replay(session: Session, *, apart: bool = False) -> bool:
    """Whether the batches of the current step are still available, and none of its updates is irreversible.

    `apart`: in a forked child, where collectives lead to nobody.
    """
    gate, recovery = session.gate, session.recovery
    undone = gate.in_step is None or (recovery is not None and recovery.backup is not None)
    alone = apart or world().is_alone
    return alone and not gate.is_by_hand and undone and session.handouts.possible(gate.steps.total)


def harm_of_replay() -> str:
    """Why the loop must not be replayed in the program's own process; empty if it may."""
    if isolation.is_off() or isolation.is_child():
        return ""
    what = unguarded()
    return _NOT_HARMLESS.format(isolation.unavailable(), what) if what else ""


class LoopReplay:
    """Replays the step as often as needed, and keeps its updates away from the weights.

    The session's phase says what the loop is run for: the trace, a second trace to compare, the search for bad samples.
    """

    def __init__(self, session: Session, failure: StepFailure, schedules: Schedules) -> None:
        """`schedules`: learning rates, their schedules and the scales of gradient scalers, as they are at the trip."""
        self.failure = failure
        self.search: SampleSearch | None = None
        self._session, self._schedules = session, schedules
        self._handouts, self._microscope = session.handouts, session.microscope
        self._updates, self._to_drop = session.gate.steps.total, 0
        self._dropped: dict[int, int] = {}
        """How many updates each optimizer attempted since the loop last got a batch."""
        self._finite = False
        """Whether the current replay reached an update."""
        self._elsewhere: set[tuple[str, int]] = set()
        """Places where replays of the same batch failed, but the original step did not."""
        self._first_trace: list[Raw] | None = None
        self._output = MutedOutput()
        guarded = not isolation.is_off() and not isolation.is_child()
        self._writes = WriteGuard(session.microscope.ownership.owns) if guarded else None

    # Called while the loop runs.

    def next_batch(self, source: Any) -> tuple[Any] | None:
        """The next batch of this replay, or the first of the next one; None after the last replay."""
        session = self._session
        try:
            with session.unseen():
                if session.phase is TRIPPED:
                    self._begin(REPLAYING, source)
                handout = self._next(source)
                if handout is None:
                    self._body_ended(source)
                    handout = self._next(source) if session.phase in REPLAYS else None
                if handout is not None:
                    return (self._handed_out(handout),)
        except NonFiniteError:
            raise
        except Exception as error:  # The replay is not part of the program, so its errors must not reach the program.
            if not isinstance(error, ReplayError):
                session.internal_error(error)
            session.hooks.guarded(self._give_up)
            session.forget_replay()
        return None

    def _begin(self, phase: Phase, source: Any) -> None:
        """Restores the state from the start of the step; raises ReplayError if its batches are gone."""
        session = self._session
        self._to_drop, self._dropped = self._handouts.begin(source, self._updates), {}
        session.replay_begins()
        self._schedules.restore()
        session.gate.reads.forget()
        self._microscope.drop_gradients()
        session.enter(phase)
        session.backwards.forget()
        self._finite = False
        self._hide()
        session.policy.working(session)
        if phase is not SEARCHING:
            self._microscope.start(in_step=True)

    def _next(self, source: Any) -> Handout | None:
        """None after this loader's last batch of the step; raises ReplayError if it has none of them."""
        if self._handouts.has_more(source):
            return self._handouts.again(source)
        if self._handouts.knows(source):
            return None
        raise ReplayError

    def _handed_out(self, handout: Handout) -> Any:
        handout.random.restore()  # making the batch may have drawn random numbers, and it is not made again
        if self.search is not None:
            return self.search.batch(handout)
        with self._microscope.unseen():
            batch = handout.batch if self._session.phase is REPLAYING else copy_batch(handout.pristine)
        if self._microscope.running:
            self._microscope.mark_batch(batch, sys._getframe())
        return batch

    def drops(self, optimizer: Any) -> bool:
        """Whether to drop an update before its gradients are checked."""
        session = self._session
        if session.phase in REPLAYS:
            if self._handouts.more_to_come:
                return True  # A loop that counts its batches counts these too, and updates its weights too early.
            if self._to_drop > 0:
                self._to_drop -= 1  # The weights already contain it.
                return True
        if self.search is not None:
            return self.search.decided
        if session.phase is not TRIPPED and not self._finite:
            return False
        if self._is_stuck(optimizer):
            session.left_without_asking()
            self._give_up()
        return True

    def _is_stuck(self, optimizer: Any) -> bool:
        """Counts an update; True if the loop makes more than it does per batch, so it will not ask for one."""
        count = self._dropped[id(optimizer)] = self._dropped.get(id(optimizer), 0) + 1
        return count > self._handouts.updates_per_batch

    def decide(self, optimizer: Any, closure: bool) -> Decision:
        """Decides on an update after its gradients were checked, which may have tripped."""
        session = self._session
        if session.phase is TRIPPED:
            self._is_stuck(optimizer)
        elif self.search is not None:
            self.search.passed()
        elif closure and session.recovery is not None and session.recovery.undoes_closures:
            session.recovery.before_update(optimizer, closure, session.gate.norm)
            return Decision.RUN
        elif closure:
            self._give_up()  # A closure computes its gradients inside the update, which then has to be undone.
        else:
            self._was_finite()
            self._is_stuck(optimizer)
        # If training continues, a second finite replay counts as the step.
        return Decision.RUN if session.phase is WATCHING else Decision.DROP

    def update_ended(self) -> None:
        """Undoes an update that went bad inside, or that a replay made."""
        session = self._session
        if self.search is not None:
            return
        if session.recovery is not None and session.recovery.undo_update():
            session.gate.undo_update()
        if session.phase in REPLAYS:
            self._was_finite()

    def tripped(self, trip: Trip, place: tuple[str, int]) -> None:
        """A replay failed; it explains the step only if it failed in the same place."""
        session = self._session
        if session.phase not in REPLAYS:
            return
        if self.search is not None:
            # With other samples it may fail elsewhere; a place where it fails with the same ones is due to the replay.
            if place not in self._elsewhere:
                self.search.failed()
        elif place != self.failure.place:
            self._elsewhere.add(place)
        elif session.phase is COMPARING:
            self._compared(trip)
        else:
            same = session.repeats.draws()
            session.backwards.blame_first_bad(trip.noticed)
            report = self._microscope.conclude(trip.noticed, trip.tensors, [], HOW) or self.failure.report
            if not same:
                self._settle(report.with_other_numbers(), trip.before_update)
                return
            searches = session.policy.searches and trip.before_update and session.gate.in_step is None
            if not searches or not self.searches(report):
                self._settle(report, trip.before_update)

    # Results.

    def _body_ended(self, source: Any) -> None:
        """The loop asks for more batches than the step had, so this replay is over."""
        if self.search is not None:
            self._after_question(self.search, source)
        elif self._elsewhere and not self._finite:
            self._give_up()
        else:
            self._was_finite()
            if self._session.phase is REPLAYING:
                self._begin(COMPARING, source)

    def _was_finite(self) -> None:
        """The same step from the same state was finite this time."""
        self._finite = True
        self._microscope.stop()
        if self._session.had_errors:  # it may only not have been seen
            self._settle(self.failure.report, before_update=True)
            return
        if world().size > 1 and self._session.phase is REPLAYING and not self.failure.is_own(self._microscope):
            self._settle(came_from_another_rank(self.failure.report), before_update=True)
            return
        if self._session.phase is COMPARING:
            self._compared(None)
        elif self._first_trace is None and self._microscope.tracer is not None:
            self._first_trace = self._microscope.tracer.raws

    def _compared(self, trip: Trip | None) -> None:
        """Compares the two traces of the step; `trip` if the second one failed."""
        report, first, tracer = self.failure.report, self._first_trace, self._microscope.tracer
        if trip is not None and report.origin is None:
            report = self._microscope.conclude(trip.noticed, trip.tensors, [], HOW) or report
        self._microscope.stop()
        difference = first_difference(first, tracer.raws) if first is not None and tracer is not None else None
        self._settle(not_repeated(report, difference), before_update=True, finite=trip is None)

    def searches(self, report: Report) -> bool:
        """Begins the search for bad samples; False if there is nothing to search."""
        session = self._session
        self._microscope.stop()
        try:
            search = begin_search(report, self._handouts)
        except Exception as error:
            session.internal_error(error)
            return False
        if search is None:
            return False
        self._first_trace = self._microscope.tracer.raws if self._microscope.tracer is not None else None
        self.search, self.failure = search, replace(self.failure, report=report)
        session.enter(SEARCHING)
        self._handouts.stop_again()
        self._hide()
        session.policy.known(session, report)
        return True

    def _after_question(self, search: SampleSearch, source: Any) -> None:
        if search.goes_on():
            self._begin(SEARCHING, source)
        elif search.repeated or self._first_trace is None:
            self._settle(search.told_in(self.failure.report), before_update=True)
        else:  # The same batch was finite: a second trace shows what differs.
            self.search = None
            self._begin(COMPARING, source)

    def _give_up(self) -> None:
        """The loop cannot run the step again."""
        session, failure = self._session, self.failure
        self._handouts.stop_again()
        if self.search is not None:
            self._settle(self.search.told_in(failure.report), before_update=True)
        elif session.phase is COMPARING:
            self._settle(not_repeated(failure.report), before_update=True)
        else:
            self._microscope.stop()
            report = replace(failure.report, notes=(*failure.report.notes, _NO_LOOP))
            self._settle(session.replayed_at_once(report, failure.trip), before_update=True)
        session.step_is_over()

    def left(self) -> Report:
        """What is known when the loop was left, so no replay will follow."""
        self._show()
        if self.search is not None:
            return self.search.told_in(self.failure.report)
        if self._session.phase in REPLAYS:
            raised = self._microscope.raised()
            return self._microscope.conclude(self.failure.trip.noticed, [], raised, HOW) or self.failure.report
        return self._session.replayed_at_once(self.failure.report, self.failure.trip)

    def _hide(self) -> None:
        """From now on nobody sees what the program writes."""
        self._output.begin()
        if self._writes is not None:
            self._writes.begin()

    def _show(self) -> None:
        if self._writes is not None:
            self._writes.end()
        self._output.end()

    def end(self) -> None:
        """Restores the program's output and stops the replay."""
        self._show()
        self._handouts.stop_again()
        self._microscope.stop()

    def _settle(self, report: Report, before_update: bool, *, finite: bool = False) -> None:
        self._show()
        self._session.settle(report, before_update, finite=finite)
