"""The phases of a session, and what it does about a non-finite step once the investigation is over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch import Tensor

from firstnan.diagnose.rules import ONLY_COMPILED
from firstnan.engine.conclude import came_from_outside, infinite_number
from firstnan.engine.handouts import FirstBatch
from firstnan.engine.journal import one_line
from firstnan.engine.ranks import world
from firstnan.gate.gate import Trip
from firstnan.observe.ending import stop_begins
from firstnan.observe.observer import Decision
from firstnan.records import Report
from firstnan.records.words import came_with_numbers
from firstnan.report import nonfinite_error

if TYPE_CHECKING:
    from firstnan.engine.session import Session


log = logging.getLogger("firstnan")


class Stop(SystemExit):
    """Ends the watched program after a finding; its own `finally` blocks and exit handlers still run."""

    def __init__(self) -> None:
        super().__init__(3)


def end_program() -> NoReturn:
    """Stops the training thread; outside the main thread, only a plain SystemExit ends it silently."""
    stop_begins()
    raise Stop if threading.current_thread() is threading.main_thread() else SystemExit(Stop().code)


class Policy:
    """The base: investigates every trip and lets healthy updates run."""

    searches = True
    """Whether bad samples are searched for."""
    investigates: int | None = None
    """How many failures are investigated; None for all."""
    undoes = False
    """Whether a bad update is undone."""
    continues = False
    """Whether training continues after a failure."""
    drops = False
    """Whether it does so without the bad step."""
    judges_outputs = True
    """Whether a non-finite result of a model that is only called is a failure; otherwise it is an event."""

    def tripped(self, session: Session, trip: Trip) -> bool:
        """Whether to investigate this trip."""
        return True

    def known(self, session: Session, report: Report) -> None:
        """Called with the first report of a failure, before any replay."""

    def working(self, session: Session) -> None:
        """Called when a replay begins."""

    def before_backward(self, session: Session, roots: list[Tensor]) -> None: ...

    def before_update(self, session: Session, optimizer: Any, closure: bool) -> Decision:
        """Decides on an update with finite gradients, in a healthy step."""
        return Decision.RUN

    def loss_scaled(self, given: Any, scaled: Any) -> Any:
        """The loss that the program gets from a gradient scaler."""
        return scaled

    def step_ended(self, session: Session) -> None:
        """Called after a healthy step."""

    def holds(self, session: Session, report: Report) -> bool:
        """Called when the investigation is over, but other ranks wait for this one: whether it goes on with them."""
        return True

    def released(self) -> None:
        """Called when they have come, or the program has ended."""

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        """Called when the investigation of a failure is over."""
        raise NotImplementedError

    def step_dropped(self, session: Session) -> None:
        """Called after an update that belongs to a dropped step."""

    def resume(self, session: Session) -> None:
        """Called when a dropped step is over."""


class EndProgram(Policy):
    """Ends the program; findings are saved as soon as they are known."""

    def __init__(
        self,
        save: Callable[[Report], None],
        explained: Callable[[Report, Session], None] = lambda report, session: None,
        *,
        always: bool = False,
        held: Callable[[Report], bool] = lambda report: True,
        released: Callable[[], None] = lambda: None,
    ) -> None:
        """`explained` is called with a complete report, while the program still stands at its failing step.

        `always`: also a program with a detector of its own, which is otherwise left to that. `held` is called with the
        report of a rank that others wait for, and says whether it goes on with them; `released` when that is over.
        """
        self.save, self._explained, self._always = save, explained, always
        self._held, self._released = held, released
        self.ended = False
        """Whether the program was told to end; if it trains on, it has caught that."""
        self._ended_in: int | None = None
        """The thread that was told so."""
        self.interrupted = False
        """Whether Ctrl-C has ended the investigation; then no fix is tried either."""
        self.unresolved = False
        """Whether the program has to be run again for a complete answer."""
        self.first_batch: FirstBatch | None = None
        """The failing batch, if that alone shows a second run where its bad values were created."""

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        if session.in_worker:  # it may owe its parent a result, so it is not ended
            session.report = report
            self.save(report)
            self.ended = True
            if self.interrupted:
                raise KeyboardInterrupt
            self._explained(report, session)
            session.let_go(in_other_thread=False)  # the update is made as well: nobody is told of one that is missing
            return
        self.explain(session, report)
        if not self._always and session.leave_to_detector():
            return
        self.ended, self._ended_in = True, threading.get_ident()
        end_program()

    def holds(self, session: Session, report: Report) -> bool:
        return session.in_worker or self._held(report)

    def released(self) -> None:
        self._released()

    def interrupt(self) -> None:
        """Ctrl-C has ended the investigation."""
        self.interrupted = True

    def goes_on(self, session: Session) -> None:
        """The program has caught the stop and trains on, or another of its threads does: it is left alone from here."""
        session.let_go(in_other_thread=self._ended_in != threading.get_ident())

    def explain(self, session: Session, report: Report) -> None:
        """Nothing more can be learned while the program is there."""
        self.known(session, report)
        try:
            if not self.unresolved and not self.interrupted:
                self._explained(report, session)
        finally:
            session.scatter_weights()

    def known(self, session: Session, report: Report) -> None:
        """Saves it, and notes whether a second run would tell more."""
        session.report = report
        origin = report.origin
        outside = origin is not None and (came_from_outside(origin) or infinite_number(origin) is not None)
        if origin is not None and came_with_numbers(origin) and session.handouts.state.bad():
            outside = True  # an object of the program has held it, perhaps since an earlier step
        # One of several ranks cannot be run again alone.
        self.unresolved = (
            world().size == 1
            and not (session.live.on or self.interrupted)
            and not (report.cause is not None and report.cause.slug == ONLY_COMPILED)
            and (
                origin is None
                or report.reproduced == "similar"
                or (outside and report.reproduced != "transient")
                or session.lacks_capsule(report)
            )
        )
        # Which rows of a table are read depends on more than the batch.
        from_batch = origin is not None and origin.phase == "input" and origin.role != "buffer"
        self.first_batch = session.handouts.first_batch() if from_batch else None
        self.save(report)


class RaiseInProgram(EndProgram):
    """Raises NonFiniteError where the program fails, and watches no further."""

    def __init__(self, explained: Callable[[Report, Session], None] = lambda report, session: None) -> None:
        super().__init__(lambda report: None, explained)

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        self.explain(session, report)
        self.ended = True
        raise nonfinite_error(session.report or report)


class Raise(Policy):
    """Ends training with NonFiniteError, in the state from before the bad step."""

    undoes = True

    def __init__(self, explained: Callable[[Report, Session], Report] = lambda report, session: report) -> None:
        """`explained` may add to the report of the first failure, while the program stands at its failing step."""
        self._explained = explained
        self._raised = False

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        if not self._raised:
            self._raised = True
            report = session.add_to_report(self._explained(report, session))
        origin = report.origin
        kept = origin is not None and (origin.phase == "parameter" or origin.role == "buffer")
        if origin is None or not kept or not came_from_outside(origin):
            session.stop()
        program = "-m pytest" if report.environment.get("runner") == "pytest" else "script.py"
        name = origin.label or "it"
        session.stop(f"what wrote {name} is not recorded here; firstnan run {program} looks for the line")


class RaiseInSteps(Raise):
    """For a model that is only called: a bad result is an event. Without an optimizer no step can be dropped."""

    judges_outputs = False


class RaiseAsItRuns(Policy):
    """Raises NonFiniteError where the value reaches training; nothing is undone."""

    searches = False

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        session.resume()
        raise nonfinite_error(report)


class Warn(Policy):
    """Keeps the update and warns, less and less often once the weights are bad and every step fails."""

    searches = False
    continues = True
    investigates = 3

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        if session.streak.bit_count() == 1:
            told = report.origin is not None or report.notes
            when = "" if report.step is None else f"step {report.step}: "
            log.warning("%s", nonfinite_error(report) if told else f"firstnan: {when}{one_line(report)}")
        session.resume()


class Skip(Policy):
    """Drops the step; more than `streak` bad steps in a row end training."""

    searches = False
    investigates = 3
    undoes = continues = drops = True
    judges_outputs = False  # there is no step to drop

    def __init__(self, streak: int) -> None:
        self.streak = streak

    def settle(self, session: Session, report: Report, before_update: bool) -> None:
        if session.streak > self.streak:
            session.stop(f"training ends: {session.streak} steps in a row were non-finite (streak={self.streak})")
        self.tell(session, report, session.updates_with_this_batch if before_update else 0)
        session.drop_rest_of_step(updated=not before_update)

    def tell(self, session: Session, report: Report, kept: int) -> None:
        """`kept`: how many updates were made before with the same batch."""
        session.journal.skipped(report, kept)

    def step_dropped(self, session: Session) -> None:
        session.undo()

    def resume(self, session: Session) -> None:
        session.clean_up(session.buffers_before())


class Rollback(Skip):
    """Restores the last good snapshot of weights and optimizer."""

    def tell(self, session: Session, report: Report, kept: int) -> None:
        assert session.recovery is not None
        session.journal.rolled_back(report, session.recovery.good_step)

    def resume(self, session: Session) -> None:
        session.undo()
        session.clean_up([])


class Phase(Enum):
    WATCHING = "every step passes the gate"
    TRIPPED = "something is non-finite; the step is replayed when the loop asks for its next batch"
    REPLAYING = "the failing step runs again, traced"
    COMPARING = "the replay was finite; the step is traced once more, to compare the two"
    SEARCHING = "explained; the step runs again with samples replaced, to see which of them are bad"
    SETTLED = "all is known that will be; nothing of this step is written"


# Looking up a member of a class takes ten times as long as a name of a module, and every step asks.
WATCHING: Final = Phase.WATCHING
TRIPPED: Final = Phase.TRIPPED
REPLAYING: Final = Phase.REPLAYING
COMPARING: Final = Phase.COMPARING
SEARCHING: Final = Phase.SEARCHING
SETTLED: Final = Phase.SETTLED

REPLAYS: Final = frozenset({REPLAYING, COMPARING, SEARCHING})
"""The program's own loop runs a step again."""

TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    WATCHING: frozenset({TRIPPED, SEARCHING, SETTLED}),
    TRIPPED: frozenset({REPLAYING, SETTLED}),
    REPLAYING: frozenset({COMPARING, SEARCHING, SETTLED}),
    COMPARING: frozenset({SETTLED}),
    SEARCHING: frozenset({COMPARING, SETTLED}),
    SETTLED: frozenset({WATCHING}),
}
