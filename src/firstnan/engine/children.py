"""Investigates a failure in forked children, one for each way to have the step again, while the program waits."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from firstnan.engine import isolation
from firstnan.engine.conclude import bad_values, came_from_outside
from firstnan.engine.loop_replay import Failure, LoopReplay
from firstnan.engine.policies import REPLAYING, SEARCHING, TRIPPED, WATCHING, Policy
from firstnan.engine.turn import LeftLoop, Turn, line_in, same_values
from firstnan.gate.gate import Trip
from firstnan.observe.observer import Decision
from firstnan.records import Noticed, Report
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tensors.models import drop_gradients

if TYPE_CHECKING:
    from firstnan.engine.session import Session

HOW = "the loop's body was run again"
_MOST_TURNS = 2
_COMPARED = 1 << 22
"""Elements up to which a variable is compared."""
_PATIENCE = 20.0
"""Seconds without a message after which a child is given up; more where the program's steps take long."""


@dataclass(frozen=True)
class Answer:
    """What a child has found."""

    report: Report
    before_update: bool = True
    whole: bool = True
    """Whether all of the step was replayed, not only its last statements."""

    @property
    def worth(self) -> int:
        """3 if the origin is known and no other way would tell more; 2 if the same step was finite when replayed."""
        origin, replayed = self.report.origin, self.report.reproduced != "transient"
        if origin is not None and replayed and (self.whole or not came_from_outside(origin)):
            return 3
        return 2 if not replayed else 1 if origin is not None else 0


class Answering(Policy):
    """The policy of a child: everything it learns is sent to the parent."""

    def __init__(self, policy: Policy, channel: isolation.Channel) -> None:
        self.searches, self._channel = policy.searches, channel
        self._parent = os.getpid()

    def known(self, session: Session, report: Report) -> None:
        self._channel.send(Answer(report))

    def working(self, session: Session) -> None:
        self._channel.send(None)

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        if session.microscope.tracer is not None:
            session.microscope.tracer.at(region="step")

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        self.answer(Answer(report, before_update))

    def answer(self, answer: Answer) -> NoReturn:
        self._channel.send(answer)
        self._channel.leave()

    def leave(self) -> NoReturn:
        """Ends the child; what it has sent so far is its answer."""
        if os.getpid() == self._parent:
            self._channel.leave()
        os._exit(0)  # a process that the program has forked meanwhile


Way = Callable[[], None]
"""Begins a replay in the child: returns if the program's own loop continues it, otherwise never."""


def ask(session: Session, failure: Failure) -> Answer | None:
    """The best answer of the ways to have the step again; None if there is no isolation, or in the child."""
    best: Answer | None = None
    for way in _ways(session, failure):
        child = isolation.fork()
        if child is None:
            return best
        if isinstance(child, isolation.Channel):
            policy = Answering(session.policy, child)
            session.continue_as_child(policy)
            atexit.register(session.left_by_program)
            way()
            return None
        answer = heard(child, session)
        if answer is not None and (best is None or answer.worth > best.worth):
            best = answer
        if best is not None and best.worth == 3:
            break
    return best or Answer(failure.report, failure.trip.before_update)


def heard(child: isolation.Fork, session: Session) -> Any:
    """The last answer of a child; None if there was none."""
    last: Any = None
    steps = max(session.gate.steps.updates, 1)
    seconds = max(_PATIENCE, 200 * (time.monotonic() - session.began) / steps)
    try:
        for message in child.receive(seconds):
            last = message if message is not None else last
    finally:
        child.end()
    return last


def _ways(session: Session, failure: Failure) -> Iterator[Way]:
    trip = failure.trip
    ended = trip.noticed.what in ("exception", "value")  # the loop was left
    if trip.before_update and not ended and session.can_replay_loop():
        yield lambda: session.replay_by_loop(failure)
    if trip.noticed.what not in ("parameter", "buffer"):  # the weights are those that the step began with
        for turn in failure.turns[:_MOST_TURNS]:
            for start in turn.starts:
                yield TurnReplay(session, failure, turn, start=start).run
            yield TurnReplay(session, failure, turn, rehearsals=1).run
    if session.has_sources:
        yield lambda: session.settle(session.replayed_at_once(failure.report, trip), trip.before_update)


class TurnReplay:
    """Runs one turn of the loop again, from its source.

    `start`: how many statements of the body to leave out at its beginning. `rehearsals`: how many turns to run before
    it, from the random state of as many steps earlier, for a loop that draws a batch in the turn before its use.
    """

    search = None

    def __init__(
        self,
        session: Session,
        failure: Failure,
        turn: Turn,
        *,
        start: int = 0,
        rehearsals: int = 0,
        traced: bool = True,
    ) -> None:
        self.failure, self._traced, self._failed, self._asked = failure, traced, False, 0
        self.whole = not start
        self._read: dict[str, Tensor] = {}
        """The data in the variables of the body, as the failing step had them."""
        self._session, self._turn, self._start, self._rehearsals = session, turn, start, rehearsals
        self._code: CodeType | None = None
        self._rehearsing = False

    def run(self) -> NoReturn:
        session, policy = self._session, self._session.policy
        assert isinstance(policy, Answering)
        try:
            self._run()
        except Exception as error:
            if os.environ.get("FIRSTNAN_DEBUG"):
                raise
            session.internal_error(error)
        policy.leave()

    def _run(self) -> None:
        session, microscope, turn = self._session, self._session.microscope, self._turn
        self._code = turn.compiled(start=self._start)
        left_out = [turn.names.get(name) for name in turn.assigned_before(self._start)]
        if self._code is None or any(not is_finite(t) for value in left_out for _, t in tensors_in(value, depth=2)):
            return  # what made the value is left out
        session.turn_replayed_by(self)
        for phase in (WATCHING, TRIPPED, REPLAYING):
            session.enter(phase)
        session.handouts.restore_turn(self._rehearsals, whole=not self._start)
        session.gate.reads.forget()
        for optimizer in list(session.gate.steps.done):
            drop_gradients(optimizer)
        self._read = {
            name: value.clone()
            for name in turn.assigned
            if isinstance(value := turn.names.get(name), Tensor)
            and not value.requires_grad
            and value.numel() <= _COMPARED
        }
        self._rehearsing = True
        for _ in range(self._rehearsals):
            with contextlib.suppress(LeftLoop):
                turn.run(self._code)
        self._rehearsing = False
        if not self._traced:
            with contextlib.suppress(BaseException):
                turn.run(self._code)
            return
        tracer = microscope.start(in_step=True)
        if session.handouts.latest is not None:
            microscope.mark_batch(session.handouts.latest.batch, None)
        else:
            tracer.at(region="between")  # nobody knows where the batch ends and the step begins
        for name, value in list(turn.names.items()):
            if isinstance(value, Tensor) and not value.requires_grad and microscope.is_unnamed(value):
                microscope.mark_value(value, name)
        try:
            turn.run(self._code)
        except LeftLoop:
            pass
        except BaseException as error:
            self._raised(error)

    def _raised(self, error: BaseException) -> None:
        trip = self.failure.trip
        if trip.noticed.what == "exception" and type(error).__name__ == trip.noticed.name:
            events = self._session.microscope.raised()
            self._settle(Trip(trip.noticed, bad_values(error), before_update=True), events)

    # Called while the turn runs, as a LoopReplay's are.

    def next_batch(self, source: Any) -> tuple[Any] | None:
        """The batch of the step, once; a loop that asks for more goes beyond the step."""
        latest, asked = self._session.handouts.latest, self._asked
        self._asked += 1
        if latest is None or asked >= max(self._session.handouts.batches_of_step, 1) * (self._rehearsals + 1):
            raise LeftLoop
        return (latest.batch,)

    def drops(self, optimizer: Any) -> bool:
        return self._rehearsing

    def decide(self, optimizer: Any, closure: bool) -> Decision:
        return Decision.RUN if closure else Decision.DROP

    def update_ended(self) -> None: ...

    def tripped(self, trip: Trip, place: tuple[str, int]) -> None:
        """Explains the failure if the same statement of the loop has failed in the same way."""
        if self._rehearsing or self._code is None or place[0] != self.failure.place[0]:
            return
        if line_in(self._code, sys._getframe()) == self._turn.at:
            self._settle(trip, [])

    def value_read(self, tensor: Tensor) -> None:
        if self.failure.trip.noticed.what == "value":
            self.tripped(Trip(Noticed("value"), [tensor], before_update=True), self.failure.place)

    def fails_again(self) -> bool:
        """Runs the turn; whether it fails as before."""
        self._run()
        return self._failed

    def _settle(self, trip: Trip, events: list[int]) -> None:
        if not self._reads_the_same():
            return
        self._failed = True
        if not self._traced:
            raise SystemExit
        report = self._session.microscope.conclude(trip.noticed, trip.tensors, events, HOW)
        if report is not None:
            self._session.settle(report, trip.before_update)

    def _reads_the_same(self) -> bool:
        """Whether the body computed with the same data as the step did; another batch may fail as well."""
        with self._session.microscope.unseen():
            return all(same_values(before, self._turn.names.get(name)) for name, before in self._read.items())

    def left(self) -> Report:
        return self.failure.report

    def end(self) -> None: ...


def answer_left(session: Session, replay: Any) -> NoReturn:
    """The program has left its loop in the child, so no more can be learned this way."""
    policy = session.policy
    assert isinstance(policy, Answering)
    if isinstance(replay, LoopReplay) and session.phase in (SEARCHING, REPLAYING):
        report = replay.left()
        if report.origin is not None:
            policy.answer(Answer(report))
    policy.leave()
