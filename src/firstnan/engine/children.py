"""Investigates a failure in forked children, one for each way to have the step again, while the program waits."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from firstnan.diagnose.rules import ONLY_COMPILED
from firstnan.engine import isolation
from firstnan.engine.conclude import (
    came_from_another_rank,
    came_from_outside,
    is_numeric,
    not_repeated,
    rows_at,
    without_guesses,
)
from firstnan.engine.loop_replay import LoopReplay, StepFailure
from firstnan.engine.policies import REPLAYING, SEARCHING, TRIPPED, WATCHING, Policy
from firstnan.engine.ranks import RECEIVED, world
from firstnan.engine.samples.cut import Maker
from firstnan.engine.samples.search import NO_SINGLE, NOT_ALONE, WHOEVER, SearchResult
from firstnan.engine.samples.variables import BY_CHANCE, DRAWN, Variables
from firstnan.engine.turn import LeftLoop, Turn, data_in, line_in, same_values, with_batch, with_batch_first
from firstnan.gate.gate import Trip
from firstnan.observe.forked import NotContinued, is_received
from firstnan.observe.observer import Decision
from firstnan.records import Batch, NaNEvent, Noticed, Report
from firstnan.tensors.finite import is_finite, readable, stat, tensors_in
from firstnan.tensors.models import drop_gradients, leaves_below, switch_on, zero_gradients
from firstnan.tensors.state import restart_scalers

if TYPE_CHECKING:
    from firstnan.engine.session import Session

HOW = "the loop's body was run again"
_CALLED = "the function {name} was called again"
_MOST_TURNS = 2
_MOST_IN_STEP = 256
_MOST_LATER = 12
"""Replays of calls from a later statement on."""
_WATCHED = 5.0
"""Seconds for which the lines of a body are watched: a child that takes much longer than the step is given up."""
_COMPARED = 1 << 22
"""Elements up to which a variable is compared."""
_LOOKED_AT = 256
"""Tensors of one variable up to which those are sought that were non-finite before: it may hold a whole data set."""
_SEARCH_SECONDS = 30.0
_PATIENCE = 20.0
"""Seconds without a message after which a child is given up; more where the program's steps take long."""


@dataclass(frozen=True)
class Answer:
    """What a child has found."""

    report: Report
    before_update: bool = True
    whole: bool = True
    """Whether all of the step was replayed, not only its last statements."""
    layers: tuple[NaNEvent, ...] = ()
    """What the layer watch has seen in the replay."""
    part: int | None = None
    """Which batch of a step with several is to blame; None if that is not known."""

    @property
    def worth(self) -> int:
        """3 if the origin is known and no other way would tell more; 2 if the same step was finite when replayed."""
        origin, replayed = self.report.origin, self.report.reproduced != "transient"
        explained = self.report.cause is not None and self.report.cause.slug in (RECEIVED, ONLY_COMPILED)
        same = replayed and self.report.reproduced != "similar"
        if explained or (origin is not None and same and (self.whole or not came_from_outside(origin))):
            return 3
        return 2 if not replayed else 1 if origin is not None else 0


class Answering(Policy):
    """The policy of a child: everything it learns is sent to the parent."""

    def __init__(self, policy: Policy, channel: isolation.Channel) -> None:
        self.searches, self._channel = policy.searches, channel
        self._parent = os.getpid()

    def known(self, session: Session, report: Report) -> None:
        self._channel.send(Answer(report, layers=session.layers_seen(), part=session.handouts.part))

    def working(self, session: Session) -> None:
        self._channel.send(None)

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        if session.microscope.tracer is not None:
            session.microscope.tracer.at(region="step")
        if session.microscope.lines is not None:
            session.microscope.lines.end()

    def loss_scaled(self, given: Any, scaled: Any) -> Any:
        return given  # with a scale another operator may overflow first, which is the scaler's to handle

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        self.answer(Answer(report, before_update, layers=session.layers_seen(), part=session.handouts.part))

    def answer(self, answer: Any) -> NoReturn:
        self.tell(answer)
        self._channel.leave()

    def tell(self, answer: Answer) -> None:
        """Sends what is known so far, which counts if nothing better follows."""
        self._channel.send(answer)

    def leave(self) -> NoReturn:
        """Ends the child; what it has sent so far is its answer."""
        if os.getpid() == self._parent:
            self._channel.leave()
        os._exit(0)  # a process that the program has forked meanwhile


def is_bad_unscaled(session: Session, loss: Any) -> bool:
    """Whether this loss has non-finite gradients without the scale of a gradient scaler; asks a child."""
    if not isinstance(loss, Tensor) or not loss.requires_grad or isolation.unavailable() or not world().is_alone:
        return False
    child = isolation.fork()
    if isinstance(child, isolation.Channel):
        session.continue_as_child(Answering(session.policy, child))
        leaves = [leaf for leaf in leaves_below([loss]) if leaf.is_floating_point()]
        gradients = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
        child.send(any(g is not None and not is_finite(g) for g in gradients))
        child.leave()
    return bool(child is not None and heard(child, session))


Way = Callable[[], None]
"""Begins a replay in the child: returns if the program's own loop continues it, otherwise never."""


def ask(session: Session, failure: StepFailure) -> Answer | None:
    """The best answer of the ways to have the step again; None if there is no isolation, or in the child."""
    best: Answer | None = None
    for way in _ways(session, failure):
        heard_of, forked = _asked(session, way)
        if not forked:
            return best
        if session.in_child:
            return None
        if heard_of is not None and (best is None or heard_of.worth > best.worth):
            best, replay = heard_of, getattr(way, "__self__", None)
            session.handouts.state.was_needed = isinstance(replay, TurnReplay) and replay.with_state
            session.maker_is_left_out = isinstance(replay, TurnReplay) and replay.made
        if best is not None and best.worth == 3:
            break
    outside = best is not None and best.report.origin is not None and came_from_outside(best.report.origin)
    begun = begun_in_step(session, failure) if outside else None
    if begun is not None:
        heard_of, _ = _asked(session, TurnReplay(session, failure, begun, state=True).run)
        if session.in_child:
            return None
        origin = heard_of.report.origin if heard_of is not None and heard_of.worth == 3 else None
        if heard_of is not None and origin is not None and not came_from_outside(origin):
            session.handouts.state.was_needed, session.maker_is_left_out, best = True, False, heard_of
    return best or Answer(failure.report, failure.trip.before_update)


def with_drawn(session: Session, failure: StepFailure, answer: Answer) -> Answer | None:
    """The answer; if no sample of the loader is responsible, with the rows of random numbers that the step has drawn.

    None in the child.
    """
    if not failure.turns or not _drawn_may_be_the_reason(answer.report):
        return answer
    again, _ = _asked(session, TurnReplay(session, failure, failure.turns[0], explained=answer).run)
    return None if session.in_child else again or answer


def _asked(session: Session, way: Way) -> tuple[Answer | None, bool]:
    """The answer of a child that goes this way, and whether there could be one; returns in the child too."""
    child = isolation.fork()
    if child is None:
        return None, False
    if isinstance(child, isolation.Channel):
        policy = Answering(session.policy, child)
        session.continue_as_child(policy)
        atexit.register(session.left_by_program)
        way()
        return None, True
    return heard(child, session), True


def _drawn_may_be_the_reason(report: Report) -> bool:
    """Whether the rows at the origin are few, but no sample that the loader gave is responsible."""
    origin, batch = report.origin, report.batch
    if origin is None or batch is None or batch.bad_samples or not batch.replays:
        return False
    read = origin.phase in ("forward", "backward") or origin.role == "buffer"  # rows of a table may be chosen by chance
    return read and batch.note in (WHOEVER, NO_SINGLE, NOT_ALONE)


def heard(child: isolation.Fork, session: Session) -> Any:
    """The last answer of a child; None if there was none."""
    last: Any = None
    for message in messages(child, session):
        last = message
    return last


def messages(
    child: isolation.Fork, session: Session, patience: float = _PATIENCE, until: float = math.inf
) -> Iterator[Any]:
    """What a child says until it ends, or until this time; it is ended when nobody listens any more."""
    steps = max(session.gate.steps.updates, 1)
    seconds = patience * max(1.0, 10 * (time.monotonic() - session.began) / steps)
    try:
        for message in child.receive(seconds, until):
            if message is not None:
                yield message
    finally:
        child.end()


def _ways(session: Session, failure: StepFailure) -> Iterator[Way]:
    trip = failure.trip
    ended = trip.noticed.what in ("exception", "value")  # the loop was left
    if trip.before_update and not ended and session.can_replay_loop(apart=True):
        yield lambda: session.replay_by_loop(failure)
    if trip.noticed.what == "gradient":
        yield from (way.run for way in session.accumulated(failure))
    if trip.noticed.what not in ("parameter", "state", "buffer"):  # the weights are those that the step began with
        calls = [TurnReplay(session, failure, c).run for c in with_batch_first(failure.calls, session.handouts.latest)]
        if session.handouts.is_ahead:  # the loop's body would take the next batch
            yield from calls
        begun = begun_in_step(session, failure)
        for turn in failure.turns[:_MOST_TURNS]:
            if trip.noticed.what == "gradient" and (step := whole_step(session, turn)) is not None:
                yield TurnReplay(session, failure, step).run
            for start in turn.starts:
                if start and session.handouts.has_drawn():  # maybe not in the statements that are left out
                    yield TurnReplay(session, failure, turn, start=start, random=True).run
                yield TurnReplay(session, failure, turn, start=start).run
                if turn is begun and not start:
                    yield TurnReplay(session, failure, turn, state=True).run
            yield TurnReplay(session, failure, turn, rehearsals=1).run
        if not session.handouts.is_ahead:
            yield from calls
        # What a call has fetched from an object that counts is still in its variables.
        later = ((call, start) for call in failure.calls for start in call.starts[1:])
        yield from (TurnReplay(session, failure, c, start=s).run for c, s in islice(later, _MOST_LATER))
        # What has made the value cannot be repeated, but the variable that holds it is known.
        for turn in failure.turns[:1]:
            after = (start for start in turn.starts[1:] if _holds_bad(turn, start, only_data=True))
            yield from (TurnReplay(session, failure, turn, start=s, made=True).run for s in islice(after, 1))
    if session.has_source(trip):
        yield lambda: session.settle(session.replayed_at_once(failure.report, trip), trip.before_update)


def _holds_bad(turn: Turn, start: int, *, only_data: bool = False) -> bool:
    """Whether the statements that are left out by `start` have assigned something non-finite, not computed by a model
    if `only_data`."""
    left_out = [turn.names.get(name) for name in turn.assigned_before(start)]
    bad = [t for value in left_out for _, t in tensors_in(value, depth=2) if not is_finite(t)]
    return bool(bad) and not (only_data and any(t.requires_grad for t in bad))


def begun_in_step(session: Session, failure: StepFailure) -> Turn | None:
    """The outermost loop whose turn began in the failing step, if that step has changed objects of the program."""
    state = session.handouts.state
    if session.handouts.latest is not None or not any(state.has_changed(t.code, t.names) for t in failure.turns):
        return None
    begun = [turn for turn in failure.turns if turn.has_begun_since(state.variables(turn.code))]
    return begun[-1] if begun else None


def restore_state(session: Session, failure: StepFailure, turn: Turn) -> None:
    """Gives objects and variables what they held when the step before had ended, and ends its turn from there."""
    given = {name: turn.names[name] for name in turn.given if name in turn.names}
    session.handouts.state.restore()
    turn.names.update(session.handouts.state.variables(turn.code))
    for one in (*failure.calls, turn):
        code = one.compiled(rest=True)
        # What the failing call would have returned is missing here, and its own line may have more statements.
        with contextlib.suppress(BaseException):
            if code is not None:
                one.run(code)
    turn.names.update(given)


def whole_step(session: Session, turn: Turn) -> Turn | None:
    """The turn with those before it that belong to the same step, if gradients are accumulated over several."""
    count = session.backwards.since_update
    if session.handouts.latest is not None or not 1 < count <= _MOST_IN_STEP:
        return None
    return turn.with_step(count)


class TurnReplay:
    """Runs one turn of the loop again, from its source.

    `start`: how many statements of the body to leave out at its beginning. `rehearsals`: how many turns to run before
    it, from the random state of as many steps earlier, for a loop that draws a batch in the turn before its use.
    `random`: from the random state of the step's beginning although statements are left out. `state`: the objects of
    the program, too, are as they were at the end of the step before. `made`: the statements that are left out may have
    made the value.
    """

    search = None

    def __init__(
        self,
        session: Session,
        failure: StepFailure,
        turn: Turn,
        *,
        start: int = 0,
        rehearsals: int = 0,
        random: bool = False,
        state: bool = False,
        made: bool = False,
        traced: bool = True,
        batch: Any = None,
        explained: Answer | None = None,
    ) -> None:
        """`batch`: the same batch with some samples replaced, to be used in place of it.

        `explained`: what is known; only the samples are searched for.
        """
        self.failure, self._traced, self._failed, self._asked = failure, traced, False, 0
        self._explained = explained
        self._searching = False
        self._began_with: dict[str, Any] = {}
        """The variables of the turn before it was run to search for samples."""
        self._known: list[Tensor] = []
        """Bad values that the variables hold from the failing step."""
        self._off: list[Tensor] = []
        """The parameters that could be trained when the step began, but not when it failed."""
        self._closes = False
        """Whether an update computes its loss through a closure, so it cannot be left out."""
        self.whole = not start and not turn.is_function
        self._is_step = bool(turn.of_step) or session.backwards.since_update <= 1
        """Whether the step has no backward call in turns before this one."""
        self._random, self.with_state, self.made = random or not start, state, made
        self._bad: list[tuple[tuple[int, ...], int]] = []
        self._settling = False
        self._read: dict[str, Tensor] = {}
        """The data in the variables of the body, as the failing step had them."""
        self._session, self._turn, self._start, self._rehearsals = session, turn, start, rehearsals
        self._code: CodeType | None = None
        self._rehearsing = False
        self._batch = batch
        self._batches = session.backwards.batches()
        """The batches of the step, in their order, if that is known."""
        self.error: BaseException | None = None
        """What has ended a turn that is not traced."""
        self._elsewhere = self._updates = False
        """Whether something else than the failing statement was not finite, and whether the turn came to an update."""

    def run(self) -> NoReturn:
        session, policy = self._session, self._session.policy
        assert isinstance(policy, Answering)
        try:
            self._run()
        except NotContinued:
            pass  # it needs a batch that cannot be had here
        except Exception as error:
            if os.environ.get("FIRSTNAN_DEBUG"):
                raise
            session.internal_error(error)
        policy.leave()

    def _run(self) -> None:
        session, turn = self._session, self._turn
        if self._explained is not None:
            session.turn_replayed_by(self)
            for phase in (WATCHING, TRIPPED, REPLAYING):
                session.enter(phase)
            self._search_samples(self._explained)
            return
        self._bad = _bad_elements(self.failure.trip)
        self._code = turn.compiled(start=self._start)
        if self._code is None or (not self.made and _holds_bad(turn, self._start)):
            return  # what made the value is left out
        session.turn_replayed_by(self)
        for phase in (WATCHING, TRIPPED, REPLAYING):
            session.enter(phase)
        self._read = self._data_of_step()
        self._restore()
        if self._batch is not None and session.handouts.latest is not None:
            for name in turn.assigned - turn.given:  # what the failing turn has left: it says nothing about this one
                if any(not is_finite(t) for _, t in tensors_in(turn.names.get(name), depth=2)):
                    del turn.names[name]
            turn.names.update(with_batch(turn, session.handouts.latest.batch, self._batch))
            self._read = self._data_of_step()
        self._rehearsing = True
        for _ in range(self._rehearsals):
            with contextlib.suppress(LeftLoop):
                turn.run(self._code)
        self._rehearsing = False
        if not self._traced:
            try:
                turn.run_step(self._code)
            except BaseException as error:
                self.error = error
            return
        self.begin_trace(session.handouts.latest.batch if session.handouts.latest is not None else None)
        try:
            turn.run_step(self._code)
        except LeftLoop:
            pass
        except BaseException as error:
            with contextlib.suppress(LeftLoop):
                self._raised(error)
        if self._explained is not None:
            self._search_samples(self._explained)

    def begin_trace(self, batch: Any) -> None:
        """Records every operator from now on; the batch and the variables of the turn are data."""
        microscope = self._session.microscope
        tracer = microscope.start(in_step=True)
        if batch is not None:
            microscope.mark_batch(batch, None)
        else:
            tracer.at(region="body")  # nobody knows where the batch ends and the step begins
            microscope.watch_lines(_WATCHED)  # the body makes its own data, often with numpy
        for name, value in list(self._turn.names.items()):
            if isinstance(value, Tensor) and not value.requires_grad and microscope.is_unnamed(value):
                microscope.mark_value(value, name)

    def _data_of_step(self) -> dict[str, Tensor]:
        """The data in the variables that the body assigns."""
        found = {name: self._turn.names.get(name) for name in self._turn.assigned}
        return {
            name: value.clone()
            for name, value in found.items()
            if isinstance(value, Tensor) and not value.requires_grad and value.numel() <= _COMPARED
        }

    def _search_samples(self, known: Answer) -> None:
        """Runs the body with samples replaced, to see which of them are bad; then answers."""
        session, policy, turn = self._session, self._session.policy, self._turn
        assert isinstance(policy, Answering)
        report, origin, batch = known.report, known.report.origin, known.report.batch
        policy.tell(known)
        variables = Variables(
            turn, self._start, batch.size if batch is not None else None, session.microscope.is_unnamed
        )
        listed = variables.lists() or (batch is None and variables.plain_lists())
        if origin is None or not (listed or (batch is not None and batch.size is not None)):
            policy.answer(known)  # its rows may be anything
        if report.reproduced == "similar":  # its rows are not those of the step
            policy.answer(known)
        if session.handouts.latest is not None and not (
            batch is not None and batch.replays
        ):  # the batch of the loader is searched first
            policy.answer(known)
        searches = policy.searches and known.before_update and not self._rehearsals and not self._closes
        searches = searches and not self.with_state  # what a rollout computes is no sample
        if not searches or origin.phase not in ("forward", "backward", "input"):
            policy.answer(known)
        session.microscope.stop()
        session.enter(SEARCHING)
        self._searching = True
        batch = batch or Batch(None)
        code = turn.compiled(start=self._start, pauses=variables.paused)
        if code is None or not self._fails(code) or variables.learned():
            policy.answer(known)
        asking = variables.searched(batch.bad_samples or (), rows_at(origin, batch.size) if batch.size else ())
        until, answer = time.monotonic() + _SEARCH_SECONDS, None
        while time.monotonic() < until:
            try:
                variables.asks = next(asking) if answer is None else asking.send(answer)
            except StopIteration as stop:
                told = self._told(batch, variables, stop.value)
                policy.answer(replace(known, report=without_guesses(replace(report, batch=told))))
            policy.working(session)
            answer = not self._fails(code)
        policy.answer(known)

    def _told(self, batch: Batch, variables: Variables, found: SearchResult) -> Batch:
        """The batch with the bad samples that were found among the rows of the variables."""
        handouts, pieces = self._session.handouts, variables.cut
        if found.repeated is False or pieces is None or not found.bad:
            return batch  # the rows at the origin are all that is known
        by_data = found.note != BY_CHANCE
        told = replace(
            batch,
            size=pieces.size,
            bad_samples=found.bad,
            confirmed=found.confirmed,
            features=variables.features(found.bad) if by_data else (),
            values=variables.contents(found.bad) if by_data else (),
            replays=batch.replays + found.replays,
            note=found.note,
            unit="sample" if variables.lists() else batch.unit,
        )
        latest = handouts.blamed
        several = len(handouts.of_this_step()) > 1  # whose rows these are is not known then
        if latest is not None and not several and not found.note.startswith((DRAWN, BY_CHANCE)):
            told = Maker.of(handouts.fetched_by(latest)).located(told, latest.indices)
        return told

    def _fails(self, code: CodeType) -> bool:
        """Runs the body from the state that the step began with; whether it fails."""
        session = self._session
        self._code, self._failed, self._asked = code, False, 0
        # A finite run goes on to the end of the body, which may empty the list that it takes its batch from.
        self._began_with = self._began_with or dict(self._turn.names)
        self._turn.names.update(self._began_with)
        self._restore()
        session.begin_turn()
        session.microscope.drop_gradients()
        try:
            self._turn.run(code)
        except LeftLoop:
            pass
        except Exception as error:
            if not self.failed_by(error):
                raise
            self._failed = True
        return self._failed

    def failed_by(self, error: BaseException | None) -> bool:
        """Whether an exception means that the numbers of the turn were bad."""
        return isinstance(error, Exception) and is_numeric(error, self._known)

    def _restore(self) -> None:
        """Restores what the step began with."""
        session = self._session
        values = list(self._turn.names.values())
        data = (t for value in values for t in islice(data_in(value, depth=2), _LOOKED_AT))
        self._known = [t for t in data if not is_finite(t)]
        session.handouts.restore_turn(self._rehearsals, random=self._random)
        if not self._start:
            self._turn.restore_given(session.handouts.latest)
            self._turn.take_back_counts()
        session.replay_begins()
        session.backwards.forget()
        if session.gate.scales:
            restart_scalers()
        session.gate.reads.forget()
        optimizers = list(session.gate.steps.done)
        self._off += switch_on(optimizers)
        for parameter in self._off:
            parameter.requires_grad_(True)
        zero_gradients(session.gate.leaves)
        for optimizer in optimizers:
            drop_gradients(optimizer)
        if self.with_state:
            self._rehearsing, rehearsing = True, self._rehearsing
            restore_state(session, self.failure, self._turn)
            self._rehearsing = rehearsing

    def _raised(self, error: BaseException) -> None:
        trip = self.failure.trip
        if trip.noticed.what == "exception" and type(error).__name__ == trip.noticed.name:
            events = self._session.microscope.raised(error)
            self._settle(Trip(trip.noticed, self._session.bad_values_of(error), before_update=True), events)

    # Called while the turn runs, as a LoopReplay's are.

    def next_batch(self, source: Any) -> tuple[Any] | None:
        """The batch of the step, once; a loop that asks for more goes beyond the step."""
        latest, asked = self._session.handouts.latest, self._asked
        self._asked += 1
        if latest is None or asked >= max(self._session.handouts.batches_of_step, 1) * (self._rehearsals + 1):
            raise LeftLoop
        if self._batch is not None:
            return (self._batch,)
        return (self._batches[asked % len(self._batches)].batch if self._batches else latest.batch,)

    def drops(self, optimizer: Any) -> bool:
        return self._rehearsing

    def decide(self, optimizer: Any, closure: bool) -> Decision:
        unchanged = self._batch is None and not (self._rehearsing or self._searching)
        if world().size > 1 and unchanged and self._reads_the_same():
            self._was_finite(optimizer)
        if self._batch is not None and not closure:
            raise SystemExit  # it was finite
        self._closes = self._closes or closure
        self._updates = True
        return Decision.RUN if closure else Decision.DROP

    def _was_finite(self, optimizer: Any) -> None:
        """The step has come to its update on this rank alone; there will be no second run to tell more."""
        failure, session = self.failure, self._session
        if failure.place == ("gradient update", id(optimizer)):
            if not self._is_step or not session.repeats.loss():
                return
            session.settle(came_from_another_rank(failure.report), before_update=True)
        elif failure.trip.noticed.what == "loss" and self.whole:
            own = failure.is_own(session.microscope)
            found = not_repeated(failure.report) if own else came_from_another_rank(failure.report)
            session.settle(found, before_update=True)

    def update_ended(self) -> None: ...

    def tripped(self, trip: Trip, place: tuple[str, int]) -> None:
        """Explains the failure if the same statement of the loop has failed in the same way."""
        if self._batch is not None or self._searching:
            self._failed = True
            raise LeftLoop if self._searching else SystemExit
        self._elsewhere = True
        if self._rehearsing or self._code is None or place[0] != self.failure.place[0]:
            return
        if line_in(self._code, sys._getframe()) == self._turn.at:
            self._settle(trip, [])

    def value_read(self, tensor: Tensor) -> None:
        if (self._batch is not None or self._searching) and is_finite(tensor):
            return  # with other samples, a check of the program's own has passed
        if self.failure.trip.noticed.what == "value" and not self._settling:
            self.tripped(Trip(Noticed("value"), [tensor], before_update=True), self.failure.place)

    def fails_again(self) -> bool:
        """Runs the turn; whether it fails as before."""
        self._run()
        return self._failed

    @property
    def was_finite(self) -> bool:
        """Whether the turn came to its update with the same data, and everything was finite."""
        return self._updates and not self._elsewhere and not self._failed and self._reads_the_same()

    def _settle(self, trip: Trip, events: list[int]) -> None:
        if not self._reads_the_same():
            return
        self._failed = True
        if not self._traced:
            raise SystemExit
        self._session.backwards.blame_first_bad(trip.noticed)
        how = HOW if not self._turn.is_function else _CALLED.format(name=self._turn.code.co_name)
        self._settling = True
        report = self._session.microscope.conclude(trip.noticed, trip.tensors, events, how)
        self._settling = report is not None
        if report is not None:
            if not self._session.repeats.draws() or not self._is_as_bad(trip):
                report = report.with_other_numbers()
            part = self._session.handouts.part
            self._explained = Answer(report, trip.before_update, self.whole, self._session.layers_seen(), part)
            raise LeftLoop

    def _reads_the_same(self) -> bool:
        """Whether the body computed with the same data as the step did; another batch may fail as well."""
        with self._session.microscope.unseen():
            now = ((before, self._turn.names.get(name)) for name, before in self._read.items())
            return all(is_received(value) or same_values(before, value) for before, value in now)

    def _is_as_bad(self, trip: Trip) -> bool:
        """Whether as many elements of the same tensors are non-finite; with another scale there may be more."""
        with self._session.microscope.unseen():
            bad = _bad_elements(trip)
        comparable = [shape for shape, _ in bad] == [shape for shape, _ in self._bad]
        return self._session.gate.scales or not comparable or bad == self._bad

    def left(self) -> Report:
        return self.failure.report

    def end(self) -> None: ...


def _bad_elements(trip: Trip) -> list[tuple[tuple[int, ...], int]]:
    """The shapes of the tensors that a trip is about, as far as they are here, and how many elements are non-finite."""
    found = [stat("", t) for t in map(readable, trip.tensors) if t is not None]
    return [(one.shape, one.nan + one.inf) for one in found]


def answer_left(session: Session, replay: Any) -> NoReturn:
    """The program has left its loop in the child, so no more can be learned this way."""
    policy = session.policy
    assert isinstance(policy, Answering)
    if isinstance(replay, LoopReplay) and session.phase in (SEARCHING, REPLAYING):
        report = replay.left()
        if report.origin is not None:
            policy.answer(Answer(report, layers=session.layers_seen(), part=session.handouts.part))
    policy.leave()
