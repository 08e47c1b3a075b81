"""Tries a changed program at the failing step itself, in forked children: seconds, however long the run was.

The turn of the loop that failed is run with the changed code, then the turns after it, then those of the loops around
it. That is possible where the change lies in the body of the loop or in functions that it calls.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from torch import Tensor
from torch.optim import LBFGS
from torch.utils.data import DataLoader

from firstnan.engine import isolation
from firstnan.engine.children import Answering, TurnReplay, begun_in_step, messages, restore_state, whole_step
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.policies import Policy
from firstnan.engine.ranks import world
from firstnan.engine.samples.cut import Collated, Maker
from firstnan.engine.turn import LeftLoop, Turn, is_suspended, names_in, parsed, same_values, unpacked, with_batch
from firstnan.gate.gate import Trip
from firstnan.observe.forked import NotContinued, when_called
from firstnan.observe.loop_iterator import running_iterator
from firstnan.observe.observer import Decision
from firstnan.observe.patches import Patches, as_written
from firstnan.observe.sites import real_path
from firstnan.records import Remedy
from firstnan.repair.patch import edits_of, located, moved_line
from firstnan.repair.verdict import Reach, TrialOutcome, change_of, described, far_below
from firstnan.tensors.models import calls_closure_first, drop_gradients, parameters_of, switch_on, zero_gradients
from firstnan.tensors.state import restart_scalers
from firstnan.tensors.step_function import is_step_call

if TYPE_CHECKING:
    from firstnan.engine.session import Session

_COMPARED = 3
"""How many healthy turns are run with and without the change, to compare their losses."""
_SAME = 1e-3
_KEPT = 1000
"""How many losses of a trial are kept."""
_NEWS = 1.0
"""Seconds after which a trial says how far it is."""
_SPREAD = "each rank holds a part of the weights, so the update needs all ranks"
_NOT_AGAIN = "the failing step could not be run again for a trial"
_AMID_UPDATE = "the optimizer was in the middle of its update, and that cannot begin again"
_OUTSIDE = "the change is outside the code that the failing step runs"
_NO_ANSWER = "its trial did not show whether the step is finite with it"
_NOT_REPEATED = ("__init__", "__new__", "__init_subclass__", "__post_init__", "setUp", "setup")


@dataclass
class StepTrials:
    """Tries remedies of one failure at its step."""

    session: Session
    failure: StepFailure
    _turn: tuple[Turn, int] | None = None
    """The turn that fails again, and how many of its statements are left out."""
    _state: bool = False
    """Whether it does so only with the objects of the program as they were at the end of the step before."""
    interrupted: bool = False
    """Whether Ctrl-C has ended a trial; what was seen until then counts."""
    until: float = math.inf
    """When the last trial has to end; what was seen until then counts."""
    why_not: str = ""
    """Why the last change could not be tried here."""
    _looked: bool = False
    _healthy: HealthyTurns | None = None

    def outcome(self, contents: dict[str, bytes], remedy: Remedy, *, step: int, reach: Reach) -> TrialOutcome | None:
        """The outcome of the changed program, which fails in `step`; None if it has to be run from its start."""
        if not self._looked:
            self._looked = True
            self._turn = self._failing_turn()
        change, self.why_not = None, self._reason_against()
        if self._turn is not None and not self.why_not:
            change, self.why_not = _Change.of(contents, remedy, *self._turn), _OUTSIDE
        if self._turn is None or change is None:
            return None
        steps = _Steps(self.session, self.failure, step, reach)
        trial = _Tried(self.session, *self._turn, change, steps, self._outer())
        trial.restored = self.failure if self._state else None
        seen: Any = self._ask(trial)
        if world().size > 1 and seen is not None and seen.noticed and not seen.called and change.functions:
            trial.fetches = True
            seen = self._ask(trial)
        if seen is None or (seen.noticed and not seen.called and change.functions):
            self.why_not = _NO_ANSWER
            return None
        passed, noticed = step + (seen.steps or seen.turns), seen.noticed
        # Where healthy batches were fetched before the change, they say nothing about it.
        healthy, compared = (HealthyTurns(), None) if trial.fetches else self._compared(change)
        after = list(seen.losses) if seen.one_loss_each() else []
        return TrialOutcome(
            passed=passed,
            noticed=noticed,
            bad_step=passed if noticed else None,
            error=seen.error,
            not_continued=seen.not_continued,
            trained=True,
            ended=seen.ended,
            exploded=seen.exploded,
            frozen=seen.frozen(),
            change=healthy.change_in(compared) if compared is not None and not noticed else None,
            at_step=True,
            same_before=bool(healthy.losses) and compared == healthy and not _changes_updates(remedy),
            losses=tuple((step, loss) for loss in after[:1]),
            latest=tuple((step + 1 + i, loss) for i, loss in enumerate(after[1:])),
        )

    def is_possible(self) -> bool:
        """Whether the failing step may begin again: not if its update has changed weights."""
        trip = self.failure.trip
        is_updated = not trip.before_update and trip.noticed.what in ("parameter", "state")
        return not is_updated and not _is_amid_update(self.session.gate.in_step)

    def _reason_against(self) -> str:
        """Why no change can be tried here; empty if it can."""
        if self._turn is None:
            return _NOT_AGAIN
        return _AMID_UPDATE if _is_amid_update(self.session.gate.in_step) else ""

    def _outer(self) -> Sequence[Turn]:
        """The loops around the turn's."""
        turns = self.failure.turns
        return turns[turns.index(self._turn[0]) + 1 if self._state and self._turn is not None else 1 :]

    def _failing_turn(self) -> tuple[Turn, int] | None:
        begun = begun_in_step(self.session, self.failure)
        if begun is not None and self.session.handouts.state.was_needed and self._fails_with_state(begun):
            return begun, 0
        for turn in self.failure.turns[:1]:
            for start in turn.starts:
                if self._ask(_FailsAgain(self.session, self.failure, turn, start)):
                    return turn, start
                if turn is begun and not start and self._fails_with_state(turn):
                    return turn, 0
            step = whole_step(self.session, turn)
            if step is not None and self._ask(_FailsAgain(self.session, self.failure, step, 0)):
                return step, 0
        return None

    def _fails_with_state(self, turn: Turn) -> bool:
        self._state = bool(self._ask(_FailsAgain(self.session, self.failure, turn, 0, state=True)))
        return self._state

    def _compared(self, change: _Change) -> tuple[HealthyTurns, HealthyTurns | None]:
        """What healthy turns compute without the change and with it, as far as there is time."""
        if self._turn is None or self.interrupted:
            return HealthyTurns(), None
        try:
            if self._healthy is None:
                unchanged = self._ask(_Compared(self.session, *self._turn, None, self._outer()))
                self._healthy = unchanged or HealthyTurns()
            return self._healthy, self._ask(_Compared(self.session, *self._turn, change, self._outer()))
        except KeyboardInterrupt:  # what the trial has shown counts
            self.interrupted = True
            return HealthyTurns(), None

    def _ask(self, work: _Work) -> Any:
        child = isolation.fork() if time.monotonic() < self.until else None
        if child is None:
            return None
        if isinstance(child, isolation.Channel):
            self.session.continue_as_child(Answering(self.session.policy, child))
            work.run(child)
        last: Any = None
        try:
            for message in messages(child, self.session, until=self.until):
                last = message
        except KeyboardInterrupt:
            if last is None:
                raise
            self.interrupted = True
        return last


def _is_amid_update(optimizer: Any) -> bool:
    """Whether this optimizer has changed weights or its own state in the step that it is in.

    One that calls a closure several times (LBFGS) may be anywhere in its search.
    """
    if optimizer is None or calls_closure_first(optimizer):
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer and isinstance(optimizer, LBFGS):
            return "orig_loss" in frame.f_locals  # the result of its first call
        frame = frame.f_back
    return True


def _changes_updates(remedy: Remedy) -> bool:
    """Whether a change acts on gradients or updates, and so possibly on earlier steps that look the same."""
    return remedy.kind != "code" or any("clip_grad" in edit.new for edit in remedy.edits)


@dataclass
class HealthyTurns:
    """What healthy turns compute, without their updates."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    """Of the gradients that each update would have used."""

    def change_in(self, other: HealthyTurns) -> float | None:
        """The largest relative change of a loss; None if only the gradients change, so that later losses would."""
        losses = change_of(self.losses, other.losses)
        norms = change_of([n or 0.0 for n in self.norms], [n or 0.0 for n in other.norms])
        return None if losses is not None and norms is not None and losses < _SAME < norms else losses


class _Work:
    """What a child does with a turn."""

    restored: StepFailure | None = None
    """The failure, if the objects of the program are restored too."""

    def __init__(self, session: Session, turn: Turn, start: int, change: _Change | None = None) -> None:
        self.session, self.turn, self.start, self.change = session, turn, start, change

    def run(self, channel: isolation.Channel) -> NoReturn:
        gate = self.session.gate
        switch_on(list(gate.steps.done))
        if gate.scales:
            restart_scalers()
        try:
            channel.send(self.answer(channel))
        except BaseException as error:
            if os.environ.get("FIRSTNAN_DEBUG"):
                sys.excepthook(type(error), error, error.__traceback__)
        channel.leave()

    def answer(self, channel: isolation.Channel) -> Any:
        raise NotImplementedError

    def code_of(self, turn: Turn, start: int = 0, *, rest: bool = False) -> CodeType | None:
        """The code of a turn or of its rest, with the change if there is one."""
        find = turn.compiled if self.change is None else partial(self.change.code_of, turn)
        return find(start=start, rest=rest)

    def rest_of_outer(self, outer: Sequence[Turn], *, returned: bool = False) -> bool:
        """Goes on with the loops around the turn's, whether it has returned or not; False if they did not end."""
        for one in outer:
            if returned and one.code is self.turn.code:
                continue  # it has been left as well
            rest, code = self.code_of(one, rest=True), self.code_of(one)
            if rest is None or code is None:
                return False
            try:
                # What the failing call would have returned may be missing here.
                with contextlib.suppress(Exception):
                    one.run(rest)
                for names in values_after(one):
                    one.names.update(names)
                    one.run(code)
            except LeftLoop:
                returned = one.returns
        return True

    def begin(self) -> None:
        """Restores what the step began with."""
        session = self.session
        latest = session.handouts.latest
        if latest is None or not is_step_call(latest.batch):  # otherwise the turn calls its function itself
            session.handouts.hand_out_again()
        session.handouts.restore_turn(0, random=not self.start)
        self.turn.restore_given(session.handouts.latest)
        if not self.start:
            self.turn.take_back_counts()
        session.gate.reads.forget()
        session.gate.look_at_everything()
        zero_gradients(session.gate.leaves)
        for optimizer in list(session.gate.steps.done):
            drop_gradients(optimizer)
        if self.restored is not None:
            policy = session.policy
            session.try_with(_Watching(updates=False))
            restore_state(session, self.restored, self.turn)
            session.try_with(policy)


class _FailsAgain(_Work):
    """Whether the unchanged turn fails again."""

    def __init__(self, session: Session, failure: StepFailure, turn: Turn, start: int, *, state: bool = False) -> None:
        super().__init__(session, turn, start)
        self._replay = TurnReplay(session, failure, turn, start=start, state=state, traced=False)

    def answer(self, channel: isolation.Channel) -> bool:
        return self._replay.fails_again()


class _Watching(Policy):
    """Lets the turns run, and keeps what is seen of them."""

    searches = False

    def __init__(self, *, updates: bool, step_ended: Callable[[], None] = lambda: None) -> None:
        self.losses: list[float] = []
        self.norms: list[float | None] = []
        self.updates = 0
        self.learns = False
        """Whether any update had a gradient other than 0."""
        self.noticed = ""
        self.most: int | None = None
        """After so many updates the turns have been run far enough."""
        self._updates, self._step_ended = updates, step_ended

    def tripped(self, session: Session, trip: Trip) -> bool:
        self.noticed = self.noticed or described(trip.noticed)
        raise TurnFailed

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        if self.most is not None and self.updates >= self.most:
            raise FarEnough
        if roots and roots[0].numel() == 1 and len(self.losses) < _KEPT:
            self.losses.append(float(roots[0].detach()))

    def before_update(self, session: Session, optimizer: Any, closure: bool) -> Decision:
        if not closure:
            self.updates += 1
            gradients = (p.grad for p in parameters_of(optimizer) if p.grad is not None)
            self.learns = self.learns or any(bool(g.any()) for g in gradients)
            if not self._updates:
                self.norms.append(session.gate.norm)
            if session.weights.are_here:
                raise NotContinued(_SPREAD)
        return Decision.RUN if self._updates or closure else Decision.DROP

    def step_ended(self, session: Session) -> None:
        self._step_ended()


class TurnFailed(BaseException):
    """Something in the turn is not finite."""


class FarEnough(BaseException):
    """The trial has gone as far as it should."""


class _Steps:
    """Counts the steps of the optimizer that failed, and says when there are enough."""

    def __init__(self, session: Session, failure: StepFailure, step: int, reach: Reach) -> None:
        self._session, self._step, self._reach = session, step, reach
        self._counter = session.gate.steps
        self._optimizer = self._counter.current_optimizer(not failure.trip.before_update)
        self._before = self._number()
        self._began: float | None = None

    def _number(self) -> int:
        return self._counter.of(self._optimizer) if self._optimizer is not None else self._counter.updates

    @property
    def made(self) -> int:
        return self._number() - self._before

    @property
    def are_as_asked(self) -> bool:
        """Whether there are as many as a trial has to make in any case."""
        return self._step + self.made > self._reach.last

    @property
    def are_enough(self) -> bool:
        if self.made and self._began is None:
            self._began = time.monotonic()
        seconds = time.monotonic() - self._began if self._began is not None else 0.0
        return self._reach.is_enough(self._step + self.made, seconds)


class _Compared(_Work):
    """Healthy turns after the failing one, without updates; with a change or without."""

    def __init__(self, session: Session, turn: Turn, start: int, change: _Change | None, outer: Sequence[Turn]) -> None:
        super().__init__(session, turn, start, change)
        self._outer = outer

    def answer(self, channel: isolation.Channel) -> HealthyTurns:
        watching = _Watching(updates=False)
        self.session.try_with(watching)
        if self.change is not None:
            self.change.make()
        code = self.code_of(self.turn)
        if code is None:
            return HealthyTurns()
        with contextlib.suppress(LeftLoop, TurnFailed, NotContinued, FarEnough):
            for names in islice(following(self.turn, self.session), _COMPARED):
                self.turn.names.update(names)
                self.turn.run(code)
            if not watching.losses:  # a framework's innermost loop may be over one batch only
                watching.most = _COMPARED
                self.rest_of_outer(self._outer)
        return HealthyTurns(watching.losses, watching.norms)


@dataclass
class TurnOutcome:
    """What came of a changed turn and those after it."""

    turns: int = 0
    """How many were finite, the failing one included."""
    steps: int = 0
    """How many steps the optimizer that failed has made in them; 0 if there is none."""
    ended: Literal["", "loop"] = ""
    noticed: str = ""
    error: str = ""
    not_continued: str = ""
    """Why the trial could not go on, although the program would have."""
    called: bool = False
    """Whether a changed function was called in the failing turn."""
    exploded: str = ""
    losses: list[float] = field(default_factory=list)
    updates: int = 0
    learns: bool = False
    """Whether any update had a gradient other than 0."""

    def changed_is_called(self) -> None:
        self.called = True

    def one_loss_each(self) -> bool:
        """Whether every step had one backward call, so that each loss has its step."""
        done = (self.steps or self.turns) + bool(self.noticed)
        return min(done, _KEPT) == len(self.losses)

    def frozen(self) -> str:
        """Why training does not learn any more, if it does not."""
        if self.updates and not self.learns and not (self.not_continued and self.updates == 1):
            return "all gradients are 0 with it"
        if len(self.losses) > 5 and len(set(self.losses)) == 1:
            return f"the loss is {self.losses[0]:.6g} in every step with it"
        return ""


class _Tried(_Work):
    """The changed turn, and those after it."""

    fetches = False
    """Whether the failing batch is fetched again by the changed program: one of several ranks has no other trial."""

    def __init__(
        self, session: Session, turn: Turn, start: int, change: _Change, steps: _Steps, outer: Sequence[Turn]
    ) -> None:
        super().__init__(session, turn, start, change)
        self._change, self._steps, self._outer = change, steps, outer
        self._seen, self._watching = TurnOutcome(), _Watching(updates=True, step_ended=self._step_ended)
        self._channel: isolation.Channel | None = None
        self._said = time.monotonic()
        self._asked = False

    def answer(self, channel: isolation.Channel) -> TurnOutcome:
        self._channel = channel
        self.session.try_with(self._watching)
        batch = self._elements() if self.fetches else None
        self._change.make()
        seen, watching = self._seen, self._watching
        try:
            self._run(batch)
        except TurnFailed:
            seen.noticed = watching.noticed
        except FarEnough:
            pass
        except NotContinued as reason:
            seen.not_continued = str(reason)
            seen.turns = seen.turns or int(self.session.weights.are_here)  # finite up to its update
        trip = self.session.gate.remaining_nonfinite()
        if trip is not None and not seen.noticed:
            seen.noticed = described(trip.noticed)
        return self._now()

    def _now(self) -> TurnOutcome:
        """What has been seen until now."""
        seen, watching = self._seen, self._watching
        alarm = self.session.gate.explosion
        seen.steps, seen.updates, seen.learns = self._steps.made, watching.updates, watching.learns
        seen.losses, seen.exploded = watching.losses, alarm.text if alarm is not None else ""
        return seen

    def _step_ended(self) -> None:
        if self._steps.are_enough or (self._steps.are_as_asked and self._is_refuted()):
            raise FarEnough
        if time.monotonic() - self._said > _NEWS and self._seen.turns and self._channel is not None:
            self._channel.send(self._now())  # known even if time runs out
            self._said = time.monotonic()

    def _is_refuted(self) -> bool:
        """Whether the failing step's loss is out of all proportion, so that more steps tell nothing. Asked once."""
        losses = self._watching.losses
        if self._asked or not losses or len(losses) != self._steps.made:
            return False
        self._asked = True
        first, *others = map(abs, losses)
        return bool(far_below(first, others))

    def _elements(self) -> Collated:
        """The failing batch as elements of its dataset, which are the same each time that they are fetched."""
        handouts = self.session.handouts
        latest = handouts.latest
        found = Maker.of(handouts.fetched_by(latest)).collated(latest.batch, latest.indices) if latest else None
        if found is None or handouts.batches_of_step > 1:
            raise ValueError("the batch cannot be fetched again")
        return found

    def _run(self, batch: Collated | None) -> None:
        """The failing turn, the rest of its loop, and the rest of the loops around it.

        `batch`: the failing one, if it is to be fetched again.
        """
        first, code = self.code_of(self.turn, self.start), self.code_of(self.turn)
        if first is None or code is None:
            raise ValueError("the loop is not in the changed file")
        latest = self.session.handouts.latest
        if batch is not None and latest is not None:
            with when_called(self._change.replaced, self._seen.changed_is_called):
                new = Maker.of(self.session.handouts.fetched_by(latest)).fetched(latest.indices)
            self.turn.names.update(with_batch(self.turn, latest.batch, new))
            latest.batch = new
        self.begin()
        seen, left = self._seen, False
        try:
            with when_called(self._change.replaced, seen.changed_is_called):
                self.turn.run_step(first)
            self.session.handouts.stop_again()
            seen.turns += 1
            for names in following(self.turn, self.session):
                self.turn.names.update(names)
                self.turn.run(code)
                seen.turns += 1
        except LeftLoop:
            if not self._watching.updates:
                raise ValueError("the program has left its loop without an update") from None
            seen.turns, left = seen.turns + 1, True
        except (Exception, SystemExit) as error:
            if self._steps.are_as_asked:
                return  # perhaps the program would not have come so far
            if isolation.is_of_isolation(error):
                raise NotContinued("there the program waits for a server, another process or a thread") from error
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            if self._watching.updates and isolation.is_cut_off():  # the program may have read the end of a pipe
                raise NotContinued(f"{said}, perhaps because no other process answers there") from error
            seen.error = said
            return
        # What an error means here is not known: perhaps the program would not have come so far.
        with contextlib.suppress(Exception, SystemExit):
            if self.rest_of_outer(self._outer, returned=left and self.turn.returns):
                seen.ended = "loop"


def following(turn: Turn, session: Session) -> Iterator[dict[str, Any]]:
    """The loop's variables in the turns after the failing one; raises NotContinued where they cannot be had."""
    latest = session.handouts.latest
    iterator = session.handouts.iterator_of(latest) if latest is not None else None
    loop = turn.loop
    # A loop inside that over the batches goes through something else: names, numbers.
    others = isinstance(loop, ast.For) and all(
        isinstance(turn.names.get(n), str | float) for n in names_in(loop.target)
    )
    own = _iterator_of(turn, loop) if isinstance(loop, ast.For) and not turn.counts else None
    if not isinstance(loop, ast.For) or turn.counts or own is not None:
        yield from values_after(turn, own)
    elif latest is not None and iterator is not None and not others:
        yield from _next_batches(turn, loop, iterator, latest.batch)
    else:
        yield from values_after(turn)


def _next_batches(turn: Turn, loop: ast.For, iterator: Any, before: Any) -> Iterator[dict[str, Any]]:
    """The batches that the loader hands out next, in the loop's variables as far as those show where a batch goes."""
    counters = {name: turn.names[name] for name in names_in(loop.target) if type(turn.names.get(name)) is int}
    for batch in iterator:
        found = unpacked(loop.target, batch, before, turn.names)
        if found is None:
            raise NotContinued("how the loop uses its next batch is not known")
        before = batch
        counters = {name: number + 1 for name, number in counters.items()}
        yield {**found, **counters}


def values_after(turn: Turn, iterator: Any = None) -> Iterator[dict[str, Any]]:
    """The loop's variables in the turns after this one, where the loop itself knows them. `iterator`: its own."""
    if isinstance(turn.loop, ast.For) and not turn.counts:
        iterator = iterator if iterator is not None else _iterator_of(turn, turn.loop)
        if iterator is not None:
            for _ in _taken(turn, turn.loop, iterator):
                yield {}
        else:
            yield from _rest_of(turn, turn.loop)
    else:
        yield from turn.following()


def _iterator_of(turn: Turn, loop: ast.For) -> Any:
    """What the loop itself goes through, as far as it has come; None if it is not running any more."""
    tree = parsed(_text(turn.file))
    return running_iterator(tree, loop, turn.code) if tree is not None else None


def _rest_of(turn: Turn, loop: ast.For) -> Iterator[dict[str, Any]]:
    """What the loop goes through after the value it has now: its source is asked again, up to there."""
    if is_suspended(loop.iter):
        raise NotContinued("what the loop would go through next is not known")
    names = names_in(loop.target)
    now = {name: turn.names.get(name) for name in names}
    values = eval(compile(ast.Expression(loop.iter), turn.file, "eval"), turn.names)
    begins = any(isinstance(node, ast.Call) for node in ast.walk(loop.iter))
    passed = iter(values) is values and not begins  # it goes on by itself
    # Another pass through what is shuffled, or has no order that shows, says nothing about this one.
    if isinstance(values, DataLoader) or not (passed or any(_shows_place(one) for one in now.values())):
        raise NotContinued("what the loop would go through next is not known")
    for _ in _taken(turn, loop, values):
        if passed:
            yield {}
        passed = passed or all(same_values(now[name], turn.names.get(name)) for name in names)
    if not passed:
        raise NotContinued("what the loop would go through next is not known")


def _shows_place(value: Any) -> bool:
    """Whether a value tells one turn of a loop from the others."""
    return isinstance(value, Tensor | int | float | str | bytes | tuple | list | dict)


def _taken(turn: Turn, loop: ast.For, values: Any) -> Iterator[Any]:
    """Assigns each value to the loop's variables, as the loop does."""
    value = ast.copy_location(ast.Name("__firstnan_next__", ast.Load()), loop.target)
    assign = ast.copy_location(ast.Assign([loop.target], value), loop.target)
    take = compile(ast.Module([assign], []), turn.file, "exec")
    for one in values:
        turn.names["__firstnan_next__"] = one
        exec(take, turn.names)
        yield one


@dataclass(frozen=True)
class _Change:
    """The changed sources, where all that has changed lies in the turn or in functions that can be replaced."""

    texts: dict[str, str]
    """Real path -> the changed source."""
    remedy: Remedy
    functions: bool
    """Whether something outside the body of the loop has changed."""
    changed: list[tuple[FunctionType, CodeType]]
    """The functions of this process that have changed, with their new code."""

    @staticmethod
    def of(contents: dict[str, bytes], remedy: Remedy, turn: Turn, start: int) -> _Change | None:
        functions, begins = False, turn.first_line(start)
        for name, edits in edits_of(remedy).items():
            path = os.path.realpath(located(name))
            tree = parsed(_text(path))
            if tree is None:
                return None
            loop = turn.loop if path == os.path.realpath(turn.file) else None
            for edit in edits:
                first, last = edit.line, max(edit.end_line - (edit.end_column == 0), edit.line)
                if loop is not None and loop.body[0].lineno <= first and last <= (loop.body[-1].end_lineno or 0):
                    if first < begins:
                        return None  # in what the failing turn leaves out
                    continue
                owner = _function_at(tree, first, last)
                if owner is None or owner.name in _NOT_REPEATED:
                    return None
                if path == os.path.realpath(turn.file) and owner.lineno <= turn.line <= (owner.end_lineno or 0):
                    return None  # it is running, and the change lies before or after the loop
                functions = True
        texts = {path: content.decode() for path, content in contents.items()}
        return _Change(texts, remedy, functions, [one for path in texts for one in _changed(path, texts[path])])

    def make(self) -> None:
        """Makes the change in the functions of this process."""
        as_written(Patches())  # what torch.jit has compiled is that of the old text
        for function, code in self.changed:
            function.__code__ = code

    @property
    def replaced(self) -> list[CodeType]:
        """The new code of the functions that have changed."""
        return [code for _, code in self.changed]

    def code_of(self, turn: Turn, start: int = 0, *, rest: bool = False) -> CodeType | None:
        """The code of the changed turn, or of its rest."""
        path = os.path.realpath(turn.file)
        if path not in self.texts:
            return turn.compiled(start=start, rest=rest)
        line, at = (moved_line(self.remedy, turn.file, one) for one in (turn.line, turn.at))
        return turn.compiled(self.texts[path], line, at, start, rest=rest)


def _changed(path: str, text: str) -> list[tuple[FunctionType, CodeType]]:
    """The functions of a file whose code is another one in this text. All objects are visited: not for a child."""
    old, new = _codes(compile(_text(path), path, "exec")), _codes(compile(text, path, "exec"))
    fresh = {
        (code.co_qualname, code.co_firstlineno): new[key]
        for key, code in old.items()
        if key in new and not _same(new[key], code)
    }
    found = list[tuple[FunctionType, CodeType]]()
    for function in _functions_of(path) if fresh else ():
        code = function.__code__
        other = fresh.get((code.co_qualname, code.co_firstlineno))
        if other is None or len(other.co_freevars) != len(code.co_freevars) or real_path(code.co_filename) != path:
            continue
        found.append((function, other.replace(co_filename=code.co_filename)))
    return found


def _functions_of(path: str) -> list[FunctionType]:
    """All functions, those of this file at least."""
    found = {id(one): one for one in gc.get_objects() if type(one) is FunctionType}
    if gc.get_freeze_count():  # the collector does not show what the program has frozen
        for module in list(sys.modules.values()):
            if real_path(getattr(module, "__file__", None) or "") == path:
                found |= {id(one): one for one in _functions_in(vars(module), module.__name__)}
    return list(found.values())


def _functions_in(names: Mapping[str, Any], module: str) -> Iterator[FunctionType]:
    """The functions of a module, and of the classes in it."""
    classes, waiting = set[type](), list(names.values())
    while waiting:
        value = waiting.pop()
        if isinstance(value, type) and value.__module__ == module and value not in classes:
            classes.add(value)
            waiting += vars(value).values()
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        if type(value) is FunctionType:
            yield value


def _text(path: str) -> str:
    name = os.path.basename(path)  # a cell of IPython has a name instead of a path: `<ipython-input-3-...>`
    return "".join(linecache.getlines(name if name.startswith("<") else path))


def _function_at(tree: ast.Module, first: int, last: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The innermost function whose body contains these lines."""
    found: ast.FunctionDef | ast.AsyncFunctionDef | None = None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = node.body[0].lineno <= first and last <= (node.end_lineno or 0)
            if inside and (found is None or node.lineno > found.lineno):
                found = node
    return found


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Every function in a module's code: by its name, and how many of that name came before it."""
    found: dict[tuple[str, int], CodeType] = {}
    counts: dict[str, int] = {}
    waiting = [code]
    while waiting:
        one = waiting.pop(0)
        number = counts[one.co_qualname] = counts.get(one.co_qualname, -1) + 1
        found[one.co_qualname, number] = one
        waiting += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return found


def _same(one: CodeType, other: CodeType) -> bool:
    return (one.co_code, one.co_consts, one.co_names) == (other.co_code, other.co_consts, other.co_names)
