"""A session over a whole program: what it reads, how it ends; to find a failure, try a change, replay a capsule."""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import time
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from firstnan.capsule import Wanted
from firstnan.capsule.content import Capsule
from firstnan.engine.bad_losses import MOST_BAD, leaves_out_update
from firstnan.engine.block_trials import try_fixes_in_worker
from firstnan.engine.capsule_replay import CapsuleReplay, from_the_start
from firstnan.engine.capsule_writer import CapsuleWriter
from firstnan.engine.conclude import AS_IT_RAN, event_of, is_of_anomaly_mode
from firstnan.engine.handouts import FirstBatch, Handouts
from firstnan.engine.journal import event_of_forecast
from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.model_calls import UpdateReplay
from firstnan.engine.policies import SETTLED, WATCHING, EndProgram, RaiseInProgram, Stop, end_program
from firstnan.engine.recovery import Recovery
from firstnan.engine.restart import Restart
from firstnan.engine.sampling import StepSamples
from firstnan.engine.session import Session
from firstnan.engine.trial_policy import Trial
from firstnan.engine.turn import Turn, turns_around, turns_in_traceback
from firstnan.engine.workers import announce
from firstnan.gate.gate import Gate, Trip
from firstnan.observe.runner import when_imported
from firstnan.observe.sites import Ownership, resolve
from firstnan.observe.standstill import timers_stopped
from firstnan.records import Forecast, NaNEvent, Noticed, Report
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import kind, place
from firstnan.repair.verdict import Reach, TrialOutcome
from firstnan.report import nonfinite_error
from firstnan.tensors.finite import has_nan, is_finite, stat, tensors_in
from firstnan.tensors.models import TrainingObjects, parameters_of
from firstnan.tensors.program_state import BadSince

if TYPE_CHECKING:
    from firstnan.engine.replicas import Replicas
    from firstnan.engine.session import Session


P = TypeVar("P", bound=EndProgram)
_GIVEN_UP = "the program ended this training itself and began another, which was not watched"
_MOST_SKIPPED, _MOST_READS = 1000, 32
_TRUSTED = 3
"""So many times it is tried whether the program leaves out the update of a bad loss; an update is seen anyway."""


class ProgramWatch(Generic[P]):
    """A session with what `firstnan run` needs."""

    def __init__(
        self,
        policy: P,
        ownership: Ownership,
        gate: Gate,
        *,
        trace_from: int | None = None,
        may_replay: bool = False,
        outputs_decide: bool = False,
        wanted: Wanted | None = None,
        restart: Restart | None = None,
        in_worker: bool = False,
        replicas: Replicas | None = None,
        tell: Callable[[NaNEvent], None] = lambda event: None,
        samples: StepSamples | None = None,
        first_batch: FirstBatch | None = None,
        on_step: Callable[[Session], None] | None = None,
        reads_decide: bool = False,
    ) -> None:
        self.policy, handouts = policy, Handouts()
        self.bad_since: BadSince | None = None
        self.capsules: CapsuleWriter | None = None
        if wanted is not None:
            self.capsules = CapsuleWriter(wanted, gate, handouts, lambda: _training_objects(gate))
        self.values, recovery = ProgramValues(ownership, outputs_decide, reads_decide, tell), Recovery()
        self.session = Session(
            policy,
            ownership=ownership,
            gate=gate,
            handouts=handouts,
            values=self.values,
            capsules=self.capsules,
            recovery=recovery if may_replay else None,
            sources=lambda session: (UpdateReplay(session.microscope, recovery, session.hooks),),
            restart=restart,
            replicas=replicas,
            trace_from=trace_from,
            through_loop=True,
            may_replay=may_replay,
            in_worker=in_worker,
            samples=samples,
            first_batch=first_batch,
            on_step=on_step,
            say=lambda text: print(text, file=sys.stderr),
        )
        self.values.watch(self.session)
        self.internal_error = self.session.internal_error

    def end(self) -> Report:
        """Ends the watch: returns the findings and restores torch."""
        try:
            return self.values.program_ended()
        except Exception as error:  # Findings so far still have to be reported.
            self.internal_error(error)
            return self.session.report or Report("clean")
        finally:
            self.session.end()


def watch(
    ownership: Ownership,
    save: Callable[[Report], None],
    explained: Callable[[Report, Session], None],
    *,
    tracing: bool,
    trace_from: int | None,
    outputs_decide: bool,
    reads_decide: bool = False,
    may_replay: bool,
    wanted: Wanted | None,
    again: bool = False,
    lines: tuple[int, int] | None = None,
    first_batch: tuple[Sequence[int], int] | None = None,
    replicas: Replicas | None = None,
    tell: Callable[[NaNEvent], None] = lambda event: None,
    on_step: Callable[[Session], None] | None = None,
    held: Callable[[Report], bool] = lambda report: True,
    released: Callable[[], None] = lambda: None,
) -> ProgramWatch[EndProgram]:
    """Watches for a failure; `tracing` records every operator from the first line on, or from a step on.

    `again`: this is a second run, in which the lines of the program are watched until its first step, or between these
    two updates; `first_batch` is given to the program first, and one step of it is enough. `tell`
    gets forecasts as events, `on_step` is called after each step. `held` and `released`: see EndProgram.
    """
    since = BadSince()

    def look(session: Session) -> None:
        with session.microscope.unseen():
            since.look(session.handouts.state, session.gate.steps.updates)

    if again:
        on_step = look if first_batch is None else _end_after_first_step
    found = ProgramWatch(
        EndProgram(save, explained, always=again, held=held, released=released),
        ownership,
        Gate(thorough=tracing),
        trace_from=trace_from,
        may_replay=may_replay,
        outputs_decide=outputs_decide,
        reads_decide=reads_decide,
        wanted=wanted,
        replicas=replicas,
        tell=tell,
        samples=StepSamples(ownership) if not (tracing or again) else None,
        first_batch=_first_batch(first_batch),
        on_step=on_step,
    )
    found.bad_since = since
    found.session.begin()
    if tracing:
        found.session.live.begin()
    if again:  # the first run could not tell where the value comes from
        if lines is None:
            found.session.microscope.watch_lines()
        else:
            found.session.live.lines_in = range(*lines)
        found.session.microscope.watch_threads()
        when_imported("datasets", _prepare_again)
    return found


def _prepare_again() -> None:
    """What the library has prepared and kept in files would not be prepared again. A program may have such a module."""
    getattr(sys.modules["datasets"], "disable_caching", lambda: None)()


def _first_batch(given: tuple[Sequence[int], int] | None) -> FirstBatch | None:
    return FirstBatch(tuple(given[0]), given[1]) if given is not None else None


def _end_after_first_step(session: Session) -> None:
    end_program()


@contextlib.contextmanager
def raising(
    directories: tuple[str, ...], explained: Callable[[Report, Session], None] = lambda report, session: None
) -> Iterator[ProgramWatch[RaiseInProgram]]:
    """Watches a block of the program and raises NonFiniteError at its first failure, or at its end.

    `explained` is called with a complete report, while the program still stands at its failing step.
    """
    watch = ProgramWatch(RaiseInProgram(explained), Ownership(directories), Gate(), may_replay=True)
    try:
        watch.session.begin()
        yield watch
    except BaseException as error:
        if not isinstance(error, NonFiniteError):
            watch.values.program_failed(error)
        report = watch.end()
        if report.origin is not None and not isinstance(error, NonFiniteError):
            error.add_note(str(nonfinite_error(report)))
        raise
    report = watch.end()
    if report.verdict == "nonfinite" and not watch.policy.ended:
        raise nonfinite_error(report)


def watch_worker(ownership: Ownership, save: Callable[[Report], None], *, tries: bool) -> None:
    """Watches a process that the program has spawned, to its end; `tries`: fixes are tried there."""

    def explained(report: Report, session: Session) -> None:
        announce(report)
        if tries:
            try_fixes_in_worker(report, session, save)

    ProgramWatch(EndProgram(save, explained), ownership, Gate(), may_replay=True, in_worker=True).session.begin()


def watch_trial(
    ownership: Ownership,
    tell: Callable[[TrialOutcome], None],
    *,
    step: int,
    reach: Reach,
    made: tuple[str, int, int] | None,
    first_batch: tuple[Sequence[int], int] | None = None,
    reads_decide: bool = False,
) -> ProgramWatch[Trial]:
    """Watches a changed program: every parameter after every update, as far as `reach` says."""
    gate = Gate(thorough=True)
    trial = Trial(gate, ownership, step=step, reach=reach, tell=tell, made=made)
    found = ProgramWatch(trial, ownership, gate, first_batch=_first_batch(first_batch), reads_decide=reads_decide)
    found.policy.watch(found.session)
    found.session.begin()
    return found


def watch_capsule(
    ownership: Ownership, save: Callable[[Report], None], capsule: Capsule
) -> ProgramWatch[CapsuleReplay]:
    """Watches a program whose first step is to be a captured one."""
    gate = Gate(thorough=from_the_start(capsule))
    restart = Restart(capsule, gate, lambda: _training_objects(gate), lambda: found.session.restored())
    first = from_the_start(capsule)
    found = ProgramWatch(CapsuleReplay(restart, save), ownership, gate, restart=None if first else restart)
    found.session.begin()
    if first:
        found.session.live.begin()
    return found


def _training_objects(gate: Gate) -> TrainingObjects:
    return TrainingObjects.find(list(gate.steps.done), leaves=gate.leaves)


def _refresh(code: CodeType) -> None:
    """Makes python forget the former values of a running function's variables, which it keeps once they were read."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            _ = frame.f_locals
        frame = frame.f_back


class ProgramValues:
    """Checks what the program reads, what its modules return before it trains, and how it ends."""

    def __init__(
        self,
        ownership: Ownership,
        outputs_decide: bool,
        reads_decide: bool,
        tell: Callable[[NaNEvent], None],
    ) -> None:
        """`reads_decide`: a bad loss that the program reads is a failure, whatever the program does about it."""
        self.bad_output: Noticed | None = None
        """A non-finite output of an outermost module, before the program trained."""
        self._ownership, self._outputs_decide, self._reads_decide = ownership, outputs_decide, reads_decide
        self._suspect: tuple[Noticed, int | None, Sequence[Turn]] | None = None
        """The last bad value that the program read: if it stops now, that is the reason."""
        self._read_in: FrameType | None = None
        """The function that has read it."""
        self._handles_nan_itself = False
        self._gave_up = False
        """Whether the program handles such values, but has ended with an error in the loop that read the last one."""
        self._reads: list[tuple[weakref.ref[Tensor], int, str, CodeType]] = []
        """The bad losses read since the last backward: each with its step, its place, and the function there."""
        self._skipped: dict[int, str] = {}
        """What is to be said of the bad losses that the program has skipped itself, by step."""
        self._left_out = self._left_out_in_a_row = 0
        """How often it has left out the update of a bad loss that it has called backward on; and since its last one."""
        self._left_by_program = False
        """Whether the program has ended itself at the failure."""
        self._output_event: int | None = None
        self._forecasts: list[NaNEvent] = []
        self._tell = tell
        self._session: Session

    def watch(self, session: Session) -> None:
        self._session = session

    @property
    def _policy(self) -> EndProgram:
        policy = self._session.policy
        assert isinstance(policy, EndProgram)
        return policy

    # While it runs.

    def forget(self) -> None:
        """The program made a step in spite of it."""
        self._suspect, self._read_in, self._left_out_in_a_row = None, None, 0

    def trains_on(self) -> None:
        """The program read a non-finite value and trains on, so it handles such values itself."""
        if self._suspect is not None:
            self._handles_nan_itself, self._suspect, self._read_in = True, None, None
        reads, self._reads = self._reads, []
        for loss, step, site, code in reads:
            _refresh(code)
            # A loss that was skipped has given way to the next one; a metric of the same turn is still there.
            if loss() is None and len(self._skipped) < _MOST_SKIPPED:
                self._skipped.setdefault(step, f"read a non-finite loss at {site} and skipped it")

    def leaves_out(self, trip: Trip) -> bool:
        """Whether the program leaves out the update of this bad loss itself: then it is an event, not a failure."""
        session = self._session
        if session.live.on or trip.noticed.what != "loss":
            return False
        known = self._left_out >= _TRUSTED and (self._left_out_in_a_row + 1) % MOST_BAD
        if not known and not leaves_out_update(session, trip):
            return False
        self._left_out += 1
        self._left_out_in_a_row += 1
        if len(self._skipped) < _MOST_SKIPPED:
            text = "called backward on a non-finite loss and made no update with it"
            self._skipped.setdefault(session.gate.steps.current, text)
        return True

    def foreseen(self, forecast: Forecast) -> None:
        """A forecast, or one that is withdrawn."""
        event = replace(event_of_forecast(forecast), time=time())
        if len(self._forecasts) < _MOST_READS:
            self._forecasts.append(event)
        self._tell(event)

    def read(self, tensor: Tensor, frame: FrameType) -> list[Tensor]:
        """The program reads a value; what it learns by that of non-finite numbers."""
        seen = [tensor]
        if not tensor.requires_grad and self._ownership.owns(frame.f_code):
            # Detached, or the result of a test: usually about a number in the same frame.
            held = [t for t in frame.f_locals.values() if isinstance(t, Tensor)]
            seen = [t for t in held if t.numel() == 1]
            if not seen and tensor.dtype is torch.bool:  # as of `isnan(output).any()`, in a layer
                seen = [t for t in held if t.requires_grad and has_nan(t)]
        tracer = self._session.microscope.tracer
        bad = [t for t in seen if t.requires_grad and not is_finite(t)]
        for t in bad:
            site = place(resolve((frame.f_code, frame.f_lasti)))
            if len(self._reads) < _MOST_READS and t.numel() == 1:
                self._reads.append((weakref.ref(t), self._session.gate.steps.current, site, frame.f_code))
            turns = () if tracer else turns_around(frame, self._ownership.owns)
            self._suspect = (Noticed("value"), tracer.last_bad(t) if tracer else None, turns)
            self._read_in = frame
        if self._reads_decide and any(t.numel() == 1 for t in bad):
            self._stopped_by_read()
            end_program()
        return bad

    def module_returned(self, module: Any, output: Any) -> None:
        tracer = self._session.live.tracer
        if self.bad_output is not None and tracer is None:
            return
        bad = [t for _, t in tensors_in(output) if not is_finite(t)]
        if not bad:
            return
        has_nan = any(bool(torch.isnan(t).any()) for t in bad)
        self.bad_output = Noticed("output", type(module).__name__ if has_nan else "")
        if tracer is None:
            return
        if self._outputs_decide:
            if self._concluded(Noticed("output", type(module).__name__), bad, []):
                end_program()
        elif self._output_event is None:
            self._output_event = tracer.last_bad(bad[0])

    # How it ends.

    def program_failed(self, error: BaseException) -> None:
        """The program ends with an exception."""
        session = self._session
        if isinstance(error, Stop | KeyboardInterrupt) or session.phase is SETTLED:
            return
        self._gave_up = self._handles_nan_itself and self._has_given_up(error)
        if self._stops_for_read:
            session.settle_on_batch_of(error)
            return
        if session.left_by(error):  # An error in a replay is not reported: the output stays hidden to the end.
            return
        if isinstance(error, SystemExit):
            if error.code in (0, None):
                return
            error = error.__context__ or error  # what a library like hydra prints before it ends the program
        bad = session.bad_values_of(error)
        if bad or "LinAlgError" in type(error).__name__ or is_of_anomaly_mode(error):
            turns = turns_in_traceback(error, self._ownership.owns)
            session.settle_on_batch_of(error)
            events = session.microscope.raised(error)
            self._stopped_by(Noticed("exception", type(error).__name__), bad, events, turns)

    @property
    def _stops_for_read(self) -> bool:
        """Whether the last bad value that the program read is why it stops."""
        return self._suspect is not None and (self._gave_up or not self._handles_nan_itself)

    @property
    def first_skipped(self) -> int | None:
        """The step of the first of several bad losses that a program has skipped before it gave up."""
        steps = [*self._skipped, *(step for _, step, _, _ in self._reads)]
        return min(steps) if self._gave_up and len(steps) > 1 else None

    def _has_given_up(self, error: BaseException) -> bool:
        """Whether the program ends with an error in a loop that has read a bad value, and not trained since."""
        if self._suspect is None or (isinstance(error, SystemExit) and error.code in (0, None)):
            return False
        at = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__)]
        loops = [(turn.code, turn.lines) for turn in self._suspect[2] if not turn.is_function]
        return any(code is one and line in lines for code, line in at for one, lines in loops)

    def group_left(self) -> None:
        """The program leaves its process group after it has read a bad value: later no rank could replay the step."""
        if self._stops_for_read and self._session.phase is WATCHING:
            self._stopped_by_read()
            self._explain_left()

    def training_begins(self, optimizer: Any, frame: FrameType) -> None:
        """The program makes an optimizer. Explains a training that it has given up before, by an error that it caught.

        It has if the function that read a bad loss was left, and the new optimizer has other parameters.
        """
        session, caller = self._session, cast("FrameType | None", frame)
        if not self._stops_for_read or session.phase is not WATCHING or session.live.on:
            return
        while caller is not None:
            if caller is self._read_in:
                return
            caller = caller.f_back
        trained = {id(p) for one in list(session.gate.steps.done) for p in parameters_of(one)}
        if trained and not any(id(p) in trained for p in parameters_of(optimizer)):
            with timers_stopped():
                self._stopped_by_read()
                if session.report is not None:
                    session.report = replace(session.report, notes=(*session.report.notes, _GIVEN_UP))
                self._explain_left()
            session.let_go_of = True

    def _stopped_by_read(self) -> None:
        """The program has read a bad value, and stops."""
        assert self._suspect is not None
        (noticed, event, turns), self._suspect, self._read_in = self._suspect, None, None
        self._stopped_by(noticed, [], [] if event is None else [event], turns)

    def _explain_left(self) -> None:
        left, self._left_by_program = self._left_by_program, False
        if left and self._session.report is not None and not self._policy.unresolved:
            self._policy.explain(self._session, self._session.report)

    def program_ended(self) -> Report:
        """Checks once more what training left behind; returns the report."""
        session = self._session
        session.left_by_program()
        trip = session.gate.remaining_nonfinite()
        if trip is not None:
            with contextlib.suppress(SystemExit):
                session.trip_at_end(trip)
        if session.phase is WATCHING:
            if self._stops_for_read:
                self._stopped_by_read()
            elif not session.gate.trained and self._output_event is not None:
                self._concluded(Noticed("output"), [], [self._output_event])
            elif not session.gate.trained and self.bad_output is not None and not session.live.on:
                self._policy.unresolved = True
        session.microscope.stop()
        self._explain_left()
        return session.report if session.report is not None else self._with_outlook(self._finite())

    def _with_outlook(self, report: Report) -> Report:
        """The report of a finite run, with its history, its forecasts and the head-room of its operators."""
        gate = self._session.gate
        if not gate.trained:
            return report
        history = report.history if report.history.steps else gate.past(self._ownership)
        return replace(
            report,
            history=history,
            events=(*report.events, *self._forecasts),
            forecast=tuple(gate.forecasts),
            headroom=self._session.headroom(),
        )

    def _finite(self) -> Report:
        """The report of a program without a non-finite value: its loss may still have exploded."""
        gate = self._session.gate
        if (lost := self._session.divergence()) is not None:
            return lost
        alarm = gate.explosion
        if alarm is None:
            return self._with_bad_copies(self._with_skipped(Report("clean")))
        # Without a change of the weights, another scale of the loss, or an opponent, made it jump.
        notes = (f"but training diverged: {alarm.text}",) if alarm.weights and alarm.weights.are_lost else ()
        return Report("clean", events=(event_of(alarm),), history=gate.past(), notes=notes)

    def _with_skipped(self, report: Report) -> Report:
        """The clean report, with an event for each bad loss that the program itself has skipped."""
        events = [
            NaNEvent("skipped", f"step {step}: the program {text}", step, what="loss", time=time())
            for step, text in self._skipped.items()
        ]
        return replace(report, events=tuple(events))

    def _with_bad_copies(self, report: Report) -> Report:
        """The clean report, with a note on a copy of the model (an average of its weights) that is not finite."""
        models = self._session.models
        if models is None or not self._session.gate.trained:
            return report
        models.tell_apart(self._session.gate.trained_parameters())
        bad = next((p for p in models.copied if not is_finite(p)), None)
        if bad is None:
            return report
        found = stat(models.name(bad), bad)
        text = f"but {found.name} holds {kind(found)}: what updates the copy has created it, not training"
        event = NaNEvent("nonfinite", text, what="parameter", layer=found.name, tensor=found, time=time())
        return replace(report, events=(*report.events, event), notes=(*report.notes, text))

    def _stopped_by(
        self, noticed: Noticed, tensors: list[Tensor], events: list[int], turns: Sequence[Turn] = ()
    ) -> None:
        session = self._session
        if session.phase is not WATCHING:
            return
        trip = Trip(noticed, tensors, before_update=True)
        known = session.known(trip)
        session.keep_state(known, trip)
        if session.live.on:
            session.backwards.blame_first_bad(noticed)
            self._concluded(noticed, tensors, events)
        else:
            answer = session.asked(StepFailure(trip, (noticed.what, 0), known, turns)) if turns else None
            self._policy.known(session, answer.report if answer is not None else known)
            session.close()
            self._left_by_program = True

    def _concluded(self, noticed: Noticed, tensors: list[Tensor], events: list[int]) -> bool:
        """Explains from the trace; False if everything non-finite was intended."""
        report = self._session.microscope.conclude(noticed, tensors, events, AS_IT_RAN)
        if report is not None:
            self._policy.known(self._session, report)
            self._session.close()
        return report is not None
