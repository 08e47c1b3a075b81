"""The engine behind every door: reacts to trips, replays and searches the step, and follows its policy."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from firstnan.diagnose.unusual_data import with_doubt
from firstnan.engine import children, isolation, parts_replay, turn_search
from firstnan.engine.backward_calls import BackwardCalls
from firstnan.engine.bad_losses import UnusedLosses, hidden_by
from firstnan.engine.children import Answer, Answering, TurnReplay
from firstnan.engine.compiled import with_compiler
from firstnan.engine.conclude import AS_IT_RAN, bad_values, diverged, is_of_anomaly_mode, tells_of_numbers
from firstnan.engine.handouts import FirstBatch, Handouts
from firstnan.engine.kept_turns import KeptTurns
from firstnan.engine.loop_replay import LoopReplay, RepeatedStep, StepFailure, can_replay, harm_of_replay
from firstnan.engine.microscope import LiveTrace, Microscope
from firstnan.engine.parts_replay import PartsReplay
from firstnan.engine.policies import (
    COMPARING,
    REPLAYING,
    REPLAYS,
    SEARCHING,
    SETTLED,
    TRANSITIONS,
    TRIPPED,
    WATCHING,
    EndProgram,
    Phase,
    Policy,
)  # fmt: skip
from firstnan.engine.ranks import keep_store, world
from firstnan.engine.rates import with_rate_sites
from firstnan.engine.recovery import StepSettings
from firstnan.engine.sharded import SpreadWeights, any_rank_says, are_gathered
from firstnan.engine.turn import (
    Turn,
    calls_around,
    loops_of,
    turns_around,
    turns_in_traceback,
    values_around,
    values_in_traceback,
    values_needed,
)
from firstnan.gate.gate import Gate, Trip
from firstnan.gate.gradient_checks import LATE
from firstnan.observe.compiler import compiles
from firstnan.observe.gradient_hooks import make_gradients_bad
from firstnan.observe.hooks import Hooks
from firstnan.observe.observer import Decision, Observer
from firstnan.observe.sites import Ownership, place_of
from firstnan.observe.standstill import collector_paused, own_handlers_interrupt, timers_stopped
from firstnan.records import Batch, Headroom, History, LoopTurn, NaNEvent, Noticed, Report
from firstnan.records.errors import InternalErrors, NonFiniteError
from firstnan.repair.data import doubtful_samples_left_out
from firstnan.report import nonfinite_error
from firstnan.tensors.finite import has_nan_or_positive_inf, is_finite, read_all, readable, tensors_in
from firstnan.tensors.models import Parts, Scope, drop_gradients, parameters_of
from firstnan.tensors.state import Schedules, restore_buffers

if TYPE_CHECKING:
    from firstnan.engine.capsule_writer import CapsuleWriter
    from firstnan.engine.journal import Journal
    from firstnan.engine.model_calls import ModelCalls, ReplaySource
    from firstnan.engine.program_watch import ProgramValues
    from firstnan.engine.recovery import Recovery
    from firstnan.engine.replicas import Replicas
    from firstnan.engine.restart import Restart
    from firstnan.engine.sampling import StepSamples
    from firstnan.gate.growth_guard import Alarm
    from firstnan.observe.layers import LayerWatch, ModelCall
    from firstnan.tensors.models import Models

_NOT_INVESTIGATED = "only the first 3 failures are investigated, and none once the weights are non-finite"
_SHARDED = "the weights are sharded over several ranks, and not all of them reached this point to replay the step"
_IN_PROCESS = "the step was replayed in the program's own process ({}); what Python code wrote meanwhile was discarded"
_INTERRUPTED = "the replay of the failing step was ended by Ctrl-C"
_DETECTED = "the program's own NaNDetector decided how training continued; later failures are in its reports"
_WENT_ON = "the program caught the SystemExit that should end it here and continued; its later steps were not watched"
_WENT_ON_ELSEWHERE = "another thread of the program continued to train; its later steps were not watched"
_NO_SNAPSHOT = "the update produced non-finite weights, and there is no snapshot to restore"
_MANY_OVERFLOWS = 8
"""So many skipped updates in a row, and twice as many and so on, raise the question whether the scale is to blame."""
log = logging.getLogger("firstnan")

_active: weakref.WeakSet[Session] = weakref.WeakSet()
"""The sessions in this process that watch named optimizers."""


class Session(Observer):
    """Watches one training run, from `begin` to `end`; the doors differ only in the parts they pass in.

    `gate` and `handouts` are made by whoever makes the parts that share them. `journal`, `layers`, `recovery` and
    `calls` are those of a detector; `capsules` writes the failing step to a file; `restart` starts from such a file;
    `values` watches what a whole program reads; `sources` are replays that need no loop; `replicas` compares ranks.
    `through_loop`: the loop takes its batches through us from the start. `samples` looks at the
    operators of a few healthy steps; `first_batch` is given to the program first; `on_step` is called after each step.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        ownership: Ownership,
        scope: Scope | None = None,
        gate: Gate | None = None,
        handouts: Handouts | None = None,
        journal: Journal | None = None,
        layers: LayerWatch | None = None,
        recovery: Recovery | None = None,
        calls: ModelCalls | None = None,
        values: ProgramValues | None = None,
        capsules: CapsuleWriter | None = None,
        restart: Restart | None = None,
        sources: Callable[[Session], Sequence[ReplaySource]] = lambda session: (),
        replicas: Replicas | None = None,
        trace_from: int | None = None,
        trace_block: bool = False,
        through_loop: bool = False,
        may_replay: bool = True,
        in_worker: bool = False,
        clips: bool = False,
        clip_at: float | None = None,
        say: Callable[[str], object] = log.error,
        samples: StepSamples | None = None,
        first_batch: FirstBatch | None = None,
        on_step: Callable[[Session], None] | None = None,
    ) -> None:
        self.policy, self.scope = policy, scope or Scope()
        self.gate, self.handouts = gate or Gate(), handouts or Handouts()
        self._journal, self.layers, self.recovery, self.calls, self.values = journal, layers, recovery, calls, values
        self.microscope = Microscope(ownership, self.gate, self.handouts, self.scope.models)
        self.live = LiveTrace(self.microscope, from_update=trace_from, block=trace_block)
        self.hooks = Hooks(self, self.scope.optimizers, program=values is not None, replays=self.handouts.replays)
        self._sources, self._capsules, self._restart = sources(self), capsules, restart
        self._replicas, self._first_batch = replicas, first_batch
        self.models: Models | None = None
        self.phase: Phase = WATCHING
        self.report: Report | None = None
        self.streak = 0
        """How many of the last steps were bad."""
        self.training_thread: int | None = None
        self.through_loop, self._may_replay = through_loop, may_replay
        self._fetching: Any = None
        """The iterator that is asked for a batch at the moment."""
        self._clips, self._clip_at = clips, clip_at
        """Whether gradients are clipped after a warning, and the limit that every norm is clipped to."""
        self._errors = InternalErrors(say)
        self.samples, self._on_step = samples, on_step
        self._lock = threading.RLock()
        self._busy = self._told = False
        """Whether code of ours runs that looks like training, and whether this step's failure was reported."""
        self._loops: tuple[LoopTurn, ...] = ()
        self._tripped_in: int | None = None
        """How far the program's loops were at the last trip, and the step that it was in."""
        self._hidden_by = ""
        """Why the program's own logs do not show the failure at hand."""
        self._investigated = 0
        self._closely = True
        """Whether the failure at hand is investigated."""
        self._is_computed = False
        """Whether the next step's loss was already computed with the current weights when the last one ended."""
        self._unused_losses = UnusedLosses(ownership.owns)
        """Looks for bad losses that the loop skips."""
        self.backwards = BackwardCalls(self.gate, self.handouts)
        self._kept_turns = KeptTurns()
        self._updated = False
        """Whether the update of a dropped step has come."""
        self._dropped: dict[int, int] = {}
        """How many updates of the bad step each optimizer has attempted."""
        self._replay: LoopReplay | TurnReplay | None = None
        self.repeats = RepeatedStep(self.handouts, self.gate)
        self._settings = StepSettings(self.scope, self.gate)
        self._schedules: Schedules | None = None
        """Learning rates, schedules and scales that the failing step began with."""
        self._holds = False
        self._held: tuple[Report, bool] | None = None
        """Whether the policy has to wait for other ranks, and what it will decide on."""
        self.reaches_others = True
        """Whether other ranks may have got something non-finite from this one."""
        self.weights = SpreadWeights()
        self._deferred: StepFailure | None = None
        """The failure to investigate when all ranks have come."""
        self._explosions: dict[Alarm, History] = {}
        """For each explosion of the loss, what was known when it was noticed."""
        self.is_detected = False
        """Whether a detector of the program's own decides about the failure at hand."""
        self.is_reported = False
        """Whether `firstnan run` has reported the failure at hand, which a detector decides about."""
        self.let_go_of = False
        """Whether the program has gone on after it was told to end."""
        self._process, self._is_worker = os.getpid(), in_worker
        self.failure: StepFailure | None = None
        """The failure under investigation, where that happens in children."""
        self.began = time.monotonic()
        self.maker_is_left_out = False
        """Whether the failing step could be replayed only after the statement that may have made the value."""
        self._compiled: list[Any] = []
        """Optimizers whose updates are part of compiled code, where none of our hooks runs."""
        self.on_stop: Callable[[], None] = lambda: None
        """Called when training is ended by an error of ours."""

    # Attaching and detaching.

    def begin(self) -> None:
        if self.scope.optimizers is not None:
            self.learn_models()
        for optimizer in self.scope.optimizers or ():
            self.gate.optimizer_made(optimizer)
            self._watch_gradients(optimizer)
        if self.scope.optimizers:
            self.handouts.training_begins()
            self._settings.begin()
        self.hooks.install()
        for old in [ref() for ref in self.scope.superseded]:
            if old is not None:
                self.hooks.watch(old)
        if self.calls is not None:
            self.calls.when_called(self._model_is_called)
            self.calls.attach()
        if self._journal is not None:
            self._journal.tell_forecasts(self.gate.foresees)
        if self.samples is not None:
            self.samples.tell_forecasts(self.gate.foresees, self._parts, outputs=self.layers is None)
        if self.layers is not None:
            # What a replay shows is kept apart until the failure is explained.
            self.journal.keep_layers_apart(lambda: self.microscope.running or self.phase in REPLAYS)
            self.layers.pause_while(lambda: self.phase in (TRIPPED, COMPARING, SEARCHING))
            self.layers.hide_reads(lambda: self.microscope.unseen() if self.microscope.running else None)
            self.layers.when_returned(self._model_returned, lambda: self.trains)
            self.gate.reads.also_read(self.layers)
            self.layers.attach()
        if self.scope.optimizers is not None:
            _active.add(self)

    def end(self) -> None:
        """Leaves torch, the models and the optimizers as they were."""
        with contextlib.suppress(NonFiniteError):
            self.hooks.guarded(self._count_compiled_updates)
        self.policy.released()
        self.forget_replay()
        self.failure = None  # it holds the program's variables, which close their files when they are freed
        if self.phase is SETTLED and self.report is not None:
            with contextlib.suppress(NonFiniteError):  # already reported
                self.resume()
        _active.discard(self)
        self.hooks.remove()
        if self.samples is not None:
            self.samples.stop(self.gate.steps.current)
        self.gate.gradient_norms.remove()
        if self.calls is not None:
            self.calls.detach()
        if self.layers is not None:
            self.layers.detach()
            if self.layers.error is not None:
                self.internal_error(self.layers.error)
        self.microscope.stop()
        self.handouts.forget()

    @contextlib.contextmanager
    def running(self) -> Iterator[Session]:
        """Watches from here to the end of a `with` block."""
        try:
            self.begin()
            yield self
        finally:
            self.end()

    def _parts(self) -> Parts:
        return self.models.parts() if self.models is not None else {}

    def learn_models(self) -> None:
        """Finds the models, to know the names and buffers from now on."""
        self.models = self.microscope.models = self.scope.models()
        self.handouts.watch_buffers(self.models.slots)
        self.gate.watch_models(self.models)

    @property
    def journal(self) -> Journal:
        assert self._journal is not None
        return self._journal

    def internal_error(self, error: Exception) -> None:
        self._errors(error)

    @property
    def had_errors(self) -> bool:
        """Whether there was an internal error, so that what looks finite may only not have been seen."""
        return self._errors.any

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        return self._lock if self.microscope.tracer is None else self._unseen()

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        with self._lock, self.microscope.unseen():
            yield

    def enter(self, phase: Phase) -> None:
        assert phase is self.phase or phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase = phase

    # Optimizers.

    def forked(self) -> None:
        """The program has forked a process that trains: this is it, with a copy of everything."""
        if self.values is None:
            return  # a detector watches the process it was attached in
        self._lock = threading.RLock()
        self.hooks.moved_to_child()

    def optimizer_made(self, optimizer: Any, frame: FrameType) -> None:
        if self.values is not None and self._replay is None and not self.in_child:
            self.values.training_begins(optimizer, frame)
        if self.scope.optimizers is not None:
            if not self.scope.adopt(optimizer):
                return
            self.hooks.watch(optimizer)
        self.gate.call_sites.made(optimizer, frame)
        self.gate.optimizer_made(optimizer)
        self._watch_gradients(optimizer)
        if self.gate.steps.total == 0:
            self.handouts.training_begins()
        self.live.optimizer_made()

    def scheduler_made(self, scheduler: Any) -> None:
        if any(scheduler.optimizer is one for one in self.scope.optimizers or ()):
            self._settings.scheduler_made(scheduler)

    def _watch_gradients(self, optimizer: Any) -> None:
        if not self.gate.thorough:
            self.gate.gradient_norms.watch(optimizer)

    def passes_quickly(self, optimizer: Any) -> bool:
        if not self.gate.frugal or self.phase is not WATCHING or self._told or self._clip_at is not None:
            return False
        if len(_active) > 1:
            return False
        if self.scope.superseded:
            self.scope.revive(optimizer)
        return self.gate.passes_quickly(optimizer)

    def passed_quickly(self, optimizer: Any) -> bool:
        if not self.gate.passed_quickly(optimizer):
            return False
        self._step_ended()
        return True

    @property
    def in_worker(self) -> bool:
        """Whether this is a process that the watched program has started itself."""
        return self._is_worker or os.getpid() != self._process

    def _was_stopped(self) -> bool:
        """Whether the program trains on although it was told to end."""
        if self.phase is SETTLED and isinstance(self.policy, EndProgram) and self.policy.ended:
            self.policy.goes_on(self)
        return self.let_go_of

    def let_go(self, *, in_other_thread: bool) -> None:
        """Leaves the program alone from here on; its later steps are not watched."""
        if not self.let_go_of and not self.in_worker and self.report is not None:
            note = _WENT_ON_ELSEWHERE if in_other_thread else _WENT_ON
            self.report = replace(self.report, notes=(*self.report.notes, note))
        self.let_go_of = True

    def leave_to_detector(self) -> bool:
        """Leaves the program to its own detector, if that watches what has failed; whether it does."""
        if self.is_detected and self.report is not None:
            self.report = replace(self.report, notes=(*self.report.notes, _DETECTED))
            self.let_go_of = True
        return self.is_detected

    def _detects(self, trip: Trip, optimizer: Any) -> bool:
        """Whether this is the session of a detector that decides about such a failure."""
        if self._journal is None or self.let_go_of:
            return False
        if optimizer is not None:
            return not self.scope.optimizers or any(one is optimizer for one in self.scope.optimizers)
        return trip.noticed.what != "loss" or self.scope.is_trained_by(trip.tensors, self.models)

    def before_update(self, optimizer: Any, closure: bool, frame: FrameType) -> Decision:
        if (self.let_go_of or self.phase is SETTLED) and self._was_stopped():
            return Decision.RUN
        decision = self._before_update(optimizer, closure, frame)
        return Decision.RUN if self.let_go_of else decision

    def _before_update(self, optimizer: Any, closure: bool, frame: FrameType) -> Decision:
        if self.scope.superseded:
            self.scope.revive(optimizer)
        if self._compiled and self._replay is None:  # this one is not, or no longer
            self._compiled = [o for o in self._compiled if o is not optimizer]
        if not self.gate.call_sites.knows_step_of(optimizer):
            self.gate.call_sites.stepped(optimizer, frame)
        shared = self._journal is not None and self.weights.are_spread(optimizer)
        if shared and self.phase is SETTLED:
            any_rank_says(True, optimizer)
            shared = False
        usual = self.phase is WATCHING and self._replay is None and self._restart is None and len(_active) < 2
        if not usual and self._drops(optimizer):
            return Decision.DROP
        trips = self.gate.check_update(optimizer, closure)
        if self.weights.are_here:
            trips = [*trips, *self.weights.unreduced()]
        if shared and any_rank_says(bool(trips), optimizer) and not trips:
            trips = [Trip(Noticed("gradient", "on another rank"), [], before_update=True)]
        for trip in trips:
            self._trip(trip, optimizer)
        if self.scope.optimizers is not None:
            self._trains_here()
        if self._decide(optimizer, closure) is Decision.DROP:
            return Decision.DROP
        risky = self.recovery is not None and self.recovery.is_watched_closely(optimizer)
        safe = self.live.on and self.live.update_begins(
            optimizer, closure, self.gate.norm, self.gate.steps.of(optimizer)
        )
        if self._clip_at is not None:
            self.journal.clip(optimizer, self.gate.norm, self._clip_at)
        alarm = self.gate.update_begins(optimizer, closely=risky, safe=safe)
        if alarm is not None:
            self._alarmed(alarm, optimizer)
        return Decision.RUN

    def _drops(self, optimizer: Any) -> bool:
        """Whether to drop an update: between a trip and its replay, repeated by a replay, or part of a bad step."""
        if self._replay is not None:
            return self._replay.drops(optimizer)
        if self.phase is SETTLED:
            self._settle_held(optimizer)
        if self.phase is SETTLED:
            return self._drop_settled(optimizer)
        return (self._restart is not None and self._restart.drops_update()) or self._is_held()

    def _decide(self, optimizer: Any, closure: bool) -> Decision:
        """Decides on an update after its gradients were checked, which may have tripped."""
        if self._replay is not None:
            decision = self._replay.decide(optimizer, closure)
            if self.phase is not WATCHING:
                return decision
        if self.phase is SETTLED:
            self._drop_settled(optimizer)
            return Decision.DROP
        if self.recovery is not None:
            self.recovery.before_update(optimizer, closure, self.gate.norm)
        return self.policy.before_update(self, optimizer, closure)

    def _drop_settled(self, optimizer: Any) -> bool:
        """Drops an update of a bad step; False if the loop makes more than it does per batch, so it was left."""
        if self._journal is None:
            return True
        self._updated = True
        count = self._dropped[id(optimizer)] = self._dropped.get(id(optimizer), 0) + 1
        if self.through_loop and count > self.handouts.updates_per_batch:
            self.left_without_asking()
            self.resume()
            return False
        self.gate.drop_update(optimizer)
        if count == 1 and not self.policy.continues:  # the program has caught the error
            self._journal.dropped(self.gate.steps.of(optimizer))
        if self.policy.drops:  # at once: the program may save the model before its next step
            restore_buffers(self.buffers_before())
        return True

    def _is_held(self) -> bool:
        """Whether another session is replaying or dropping this step."""
        return len(_active) > 1 and any(
            other is not self
            and other.phase is not WATCHING
            and any(one is theirs for one in self.scope.optimizers or () for theirs in other.scope.optimizers or ())
            for other in list(_active)
        )

    def after_update(self, optimizer: Any) -> None:
        if self.let_go_of or not self.gate.is_updating(optimizer):
            return
        trips = self.gate.update_ended(optimizer)
        try:
            for trip in trips:
                self._trip(trip, optimizer)
        finally:
            self._step_ended()

    def update_skipped(self, optimizer: Any, scale: float) -> None:
        if self.let_go_of or self._drops(optimizer):
            return
        if self._journal is not None and self._replay is None:
            self._journal.overflowed(self.gate.steps.of(optimizer), scale)
        for trip in self.gate.update_skipped(optimizer, scale):
            self._trip(trip, optimizer)
        if self.phase is SETTLED:
            self._drop_settled(optimizer)
        elif self.phase is WATCHING:
            self.gate.skip_ended(optimizer)
            self._step_ended()

    def _count_compiled_updates(self) -> None:
        """Counts and checks the updates that compiled code has made since this was last called."""
        for optimizer in self.hooks.compiled_updates():
            known = [optimizer] if optimizer is not None else list(self.gate.steps.done)
            self._compiled += [o for o in known if all(o is not other for other in self._compiled)]
            for one in known if self._replay is None else ():
                if self.phase is SETTLED:
                    self._drop_settled(one)
                elif self.phase is WATCHING:
                    self._alarmed(self.gate.update_begins(one), one)
                    self.after_update(one)

    def _check_before_compiled_update(self, roots: list[Tensor]) -> None:
        """The update that follows will not be seen, so it has to be decided now."""
        if not self._trains_in_this_thread(roots):
            return
        for optimizer in self._compiled:
            if self.gate.scales:
                return
            for trip in self.gate.check_update(optimizer, closure=False):
                self._trip(trip, optimizer)
            if self.phase in (SETTLED, TRIPPED):
                drop_gradients(optimizer)

    def _trains_in_this_thread(self, roots: list[Tensor]) -> bool:
        """Whether it is certain that no other thread computes the gradients now: reading them would crash."""
        if self.scope.optimizers is None:
            return len(self.gate.steps.done) <= 1 or threading.active_count() == 1
        if self.training_thread is None and self.gate.trains(roots, self._compiled):
            self._trains_here()
        return self.training_thread == threading.get_ident()

    @property
    def updates_with_this_batch(self) -> int:
        """How many updates were made since the latest batch was handed out: those of other optimizers, as in a GAN."""
        latest = self.handouts.latest
        return self.gate.steps.total - latest.updates if latest is not None else 0

    def update_count(self) -> int:
        return self.gate.steps.updates

    def _step_ended(self, by_hand: bool = False) -> None:
        if self._replay is not None:
            self._replay.update_ended()
            return
        if self._kept_turns.is_on:
            self._kept_turns.end()
        elif self._kept_turns.is_on is None and self.handouts.latest is None and self.backwards.since_update > 1:
            self._kept_turns.is_on = not world().is_alone
        self.backwards.at_update = self.backwards.count
        if self.gate.news:
            self._tell_forecasts()
        self._told, told = False, self._told
        if self.phase is SETTLED:
            self.policy.step_dropped(self)
            self._updated = True
            if self._journal is not None and not self.policy.drops:
                self._journal.counts.steps += 1
            return
        if not told:
            self.streak = 0
        by_us = self.through_loop and self.values is None  # each batch, or step, comes through the detector
        if not by_us and self.handouts.are_left(self.gate.steps.total):
            self.handouts.leave(self.gate.steps.total)
        if self.handouts.latest is None:
            self.handouts.turn_ended(self.gate.steps.total)
            if self.scope.optimizers:
                self._settings.update_ended()
        if self._journal is not None:
            self._journal.counts.steps += 1
        if self.calls is not None:
            self.calls.forget()
        if self.layers is not None:
            self.layers.new_step()
        if self.recovery is not None and self.recovery.every is not None:
            self.recovery.after_update(self.gate.steps.current)
        if self.values is not None:
            self._whole_program_step_ended()
        if self._replicas is not None:
            self._compare_replicas(self._replicas)
        if self.samples is not None and self.gate.steps.total >= self.samples.due and not self.live.on:
            self.samples.step_ended(self.gate.steps.total)
        if self._on_step is not None:
            self._on_step(self)
        if self.live.on:
            self.live.step_ended(by_hand, self.gate.steps)
        self.policy.step_ended(self)
        if self._restart is not None:
            self._restart.step_ended(by_hand)

    def _compare_replicas(self, replicas: Replicas) -> None:
        steps, models = self.gate.steps, self.models
        name = models.name if models is not None else lambda tensor: ""
        try:
            replicas.updated(steps.total, max(steps.current - 1, 0), list(steps.done), name)
        except Exception as error:  # the store may be gone
            self._replicas = None
            self.internal_error(error)

    def _whole_program_step_ended(self) -> None:
        assert self.values is not None
        self.values.forget()
        if self.models is None:
            self.learn_models()
            keep_store()
        if self._capsules is not None:
            self._capsules.step_ended()

    # Backward.

    def concerns(self, roots: list[Tensor]) -> bool:
        if self._busy or self.scope.optimizers is None:
            return not self._busy
        if self.training_thread is not None and self.training_thread != threading.get_ident():
            return False
        return bool(self.scope.optimizers) or (self.calls is not None and self.calls.were_made())

    def before_backward(self, roots: list[Tensor], frame: FrameType) -> None:
        if self.samples is not None and self.samples.active:
            self.samples.stop(self.gate.steps.current)
        if (self.let_go_of or self.phase is SETTLED) and self._was_stopped():
            return
        gate = self.gate
        if not gate.call_sites.backward:
            gate.call_sites.called_backward(frame)
        if gate.optimizers > 1:
            gate.steps.backward_from(place_of(frame))
        self.policy.before_backward(self, roots)
        if self.hooks.has_compiled_updates():
            self._count_compiled_updates()
        if self.phase is SETTLED and self._is_discarded():
            self.resume()
        if not self.through_loop:
            self._is_computed = True
            self.body_ended()
            self._is_computed = False
        if self.values is not None:
            self.values.trains_on()
        if self._capsules is not None:
            self._capsules.backward_begins()
        if self._restart is not None:
            self._restart.backward_begins()
        if self.live.on:
            self.live.backward_begins()
        if self._kept_turns.is_on and self._replay is None:
            self._kept_turns.backward_begins(frame)
        self.backwards.begin()
        for trip in gate.backward_begins(roots):
            self._trip(trip, None)
        if self.layers is not None:
            self.layers.drop_notes()
        self.backwards.batch_is_used()

    def _is_discarded(self) -> bool:
        """Whether the program has cleared the gradients of a bad step itself: no update with them is left to drop."""
        waits = not self._updated and self._held is None and self._replay is None
        if not waits or self.gate.in_step is not None or self._journal is None or not self.scope.optimizers:
            return False  # in a step, it is an optimizer that asks for the loss once more
        gradients = [readable(p.grad) for optimizer in self.scope.optimizers for p in parameters_of(optimizer)]
        return not any(gradient is not None and bool(gradient.any()) for gradient in gradients)

    def needs_after_backward(self) -> bool:
        gate = self.gate
        if gate.steps.total == 0 and not self._compiled and compiles():
            # Not known yet; the first update shows it. Where reads wait for a device, one more would cost too much.
            self._compiled = [o for o in list(gate.steps.done) if gate.reads_freely(o)]
        if self._compiled or gate.uses_gradients_at_once:
            return True
        return (self._replay is not None or self.microscope.tracer is not None) and self._judges_backward()

    def _judges_backward(self) -> bool:
        """Whether the gradients are read after each backward call: if several accumulate, this tells which was bad."""
        has_parts = self.microscope.running and self.handouts.replays
        return has_parts or isinstance(self._replay, PartsReplay)

    def bad_values_of(self, error: BaseException) -> list[Tensor]:
        """The bad values in the frames of an exception, or the gradients if it may tell of them."""
        told = not self.gate.scales and tells_of_numbers(error)  # a scaler's overflows are no reason to stop
        return bad_values(error) or (self.backwards.bad_gradients() if told else [])

    def after_backward(self, roots: list[Tensor]) -> None:
        if self._judges_backward() and self.backwards.bad_after is None:
            bad = self.backwards.judge()
            if isinstance(self._replay, PartsReplay):
                self._replay.backward_ended(bad)
        if not self.gate.uses_gradients_at_once and not self._compiled:
            return
        if self._compiled and self.gate.in_step is None:
            self._check_before_compiled_update(roots)
            return
        if self.gate.awaits_first_update and not self.scope.is_trained_by(roots, self.models):
            return  # another model is trained first, maybe by an optimizer that is not watched here
        for trip in self.gate.backward_ended(roots):
            self._trip(trip, self.gate.in_step)
        if self.gate.in_step is None and self.gate.is_by_hand:
            self._manual_step_ended()

    def gradients_returned(
        self, losses: list[Tensor], targets: list[Tensor], gradients: list[Tensor], frame: FrameType
    ) -> None:
        if self._was_stopped():
            return
        self.backwards.called = True
        if not self.gate.is_step(place_of(frame), losses, targets):
            self.policy.before_backward(self, losses)
            self.gate.differentiated(losses, targets)
            return
        if not self.gate.call_sites.backward:
            self.gate.call_sites.called_backward(frame)
        self.policy.before_backward(self, losses)
        for trip in self.gate.gradients_returned(losses, targets, gradients):
            self._trip(trip, None)
        self._manual_step_ended()

    def _manual_step_ended(self) -> None:
        self._alarmed(self.gate.end_manual_step(), None)
        self._step_ended(by_hand=True)

    def norm_measured(self, gradients: list[Tensor], norm: Any) -> None:
        self.gate.clipping.norm_computed(gradients, norm)

    def gradients_clipped(self, parameters: list[Tensor], limit: Any, norm: Any) -> None:
        self.gate.gradients_clipped(parameters, limit, norm)

    def loss_scaled(self, given: Any, scaled: Any, scaler: Any) -> Any:
        self.gate.loss_scaled(given, scaled, scaler)
        overflows = self.gate.overflows
        if overflows >= _MANY_OVERFLOWS and overflows.bit_count() == 1 and self.phase is WATCHING:
            self.gate.judged_unscaled(children.is_bad_unscaled(self, given))
        return self.policy.loss_scaled(given, scaled)

    def _alarmed(self, alarm: Alarm | None, optimizer: Any) -> None:
        if alarm is None:
            return
        if alarm.kind == "explosion":
            # Not a failure yet: training may recover. What is known now may be gone when the program ends.
            self._explosions[alarm] = self.gate.past_of_explosion(self.microscope.ownership)
        if self._journal is None:
            return
        if self.layers is not None:
            self.layers.watch_closely()
        self._journal.alarmed(alarm, optimizer)
        if self._clips and self._clip_at is None and alarm.kind != "explosion":
            self._journal.clip(optimizer, alarm.norm, alarm.usual)

    def _tell_forecasts(self) -> None:
        for forecast in self.gate.take_news():
            if self.values is not None:
                self.values.foreseen(forecast)
            if self._journal is not None:
                self._journal.foreseen(forecast)

    def _is_training_thread(self) -> bool:
        return self.training_thread in (None, threading.get_ident())

    def _trains_here(self) -> None:
        if self.scope.optimizers is not None:
            self.training_thread = threading.get_ident()
            if self.layers is not None:
                self.layers.train_in(self.training_thread)

    # Batches.

    def indices_sampled(self, iterator: Any, indices: Any) -> Any:
        if self._first_batch is not None:
            indices = self._first_batch.in_place_of(iterator, indices)
        self.handouts.sampled(iterator, indices)
        return indices

    def epoch_begins(self, iterator: Any) -> None:
        self.handouts.epoch_begins(iterator)

    def loader_asked(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        if self.values is not None or isinstance(self._replay, TurnReplay):
            return self.next_batch(iterator, fetch)
        if self.through_loop or not self._is_training_thread():
            batch = fetch(iterator)
            if self._fetching is not None and self._fetching is not iterator and self._is_training_thread():
                self.hooks.guarded(self.handouts.handed_on, iterator, batch)
            return batch
        # A loop that knows nothing of us, such as a framework's: the batch is only remembered.
        self.hooks.guarded(self.batch_left, sys._getframe(1))
        self.hooks.guarded(self.body_ended)
        try:
            batch = fetch(iterator)
        except StopIteration:
            self.hooks.guarded(self.handouts.exhausted, iterator, self.gate.steps.total)
            raise
        if torch.is_grad_enabled():
            self.hooks.guarded(self._remember, iterator, batch)
        else:
            self.hooks.guarded(self.handouts.passed, iterator)
        return batch

    def _remember(self, iterator: Any, batch: Any) -> None:
        if not self.gate.steps.total and not self.backwards.count:
            if self.models is None and self.handouts.latest is None and self.handouts.replays:
                self.handouts.watch_buffers(self.scope.models().slots)
            self.handouts.drop_buffers()  # a program may compute buffers from its data before it trains
        before = self.handouts.latest.updates if self.handouts.latest is not None else None
        if self.handouts.fetched(iterator, batch, self.gate.steps.total).updates != before:
            self.backwards.forget()
        self.backwards.called = False
        if (
            not self.backwards.count and self.scope.optimizers
        ):  # before the first one of a step, or none is for training
            self._settings.batch_taken()

    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The next batch of a loader; during a replay, the batches of the failing step again."""
        __tracebackhide__ = True
        while self._replay is not None and torch.is_grad_enabled():
            again = self._replay.next_batch(iterator)
            if again is not None:
                return again[0]
        if self.handouts.has_more(iterator):  # Training continues in the middle of a replay.
            return self.handouts.again(iterator).batch
        if self.phase is not WATCHING or self.handouts.testing is not None or self.hooks.has_compiled_updates():
            self.hooks.guarded(self._turn_ended)
        if self._restart is not None and self.phase is WATCHING and torch.is_grad_enabled():
            fetch = self._restart.around(fetch, self.unseen)
        self._fetching = iterator
        try:
            batch = self.live.fetched(fetch, iterator) if self.live.on else fetch(iterator)
        except StopIteration:
            self.hooks.guarded(self.handouts.exhausted, iterator, self.gate.steps.total)
            raise
        finally:
            self._fetching = None
        self.hooks.guarded(self.handed_out, iterator, batch)
        return batch

    def handed_out(self, iterator: Any, batch: Any) -> None:
        if not torch.is_grad_enabled() and self.scope.optimizers is None:
            self.handouts.passed(iterator)
            return
        self._trains_here()
        if self.microscope.lines is not None:
            self.microscope.lines.arrived(t for _, t in tensors_in(batch))
        if self.handouts.unclaimed:
            self.handouts.recognise(iterator, batch)
        self._remember(iterator, batch)
        if self._restart is not None:
            self._restart.label(self.handouts.latest)
        if self._capsules is not None:
            self._capsules.handed_out()
        if self.live.on:
            self.live.handed_out(batch)

    def through_the_loop(self) -> None:
        """The loop gets its batches or runs its steps through us, so a failing step can be replayed completely."""
        if not self.through_loop:
            self.through_loop = True
            if self.calls is not None and self.scope.optimizers and world().is_alone:
                self.calls.keep_less()

    def when_stopped(self, act: Callable[[], None]) -> None:
        """Calls `act` before training is ended by an error of ours."""
        self.on_stop = act

    def batch_left(self, frame: FrameType | None) -> None:
        """The loop asks for its next batch, or ends; records a bad loss that it has not called backward on."""
        if self.handouts.latest is not None or (self.calls is not None and self.calls.caller is not None):
            self._tell_unused_loss(frame)

    def _tell_unused_loss(self, frame: FrameType | None, *, only_losses: bool = False) -> None:
        if self.phase is not WATCHING or self._journal is None or self.backwards.called or self._replay is not None:
            return
        caller = self.calls.caller if self.calls is not None else None
        found = self._unused_losses.find(caller, frame, only_losses=only_losses)
        if found is not None:
            self._journal.left_out(*found)

    def _turn_ended(self) -> None:
        self._count_compiled_updates()
        self.body_ended()

    def body_ended(self) -> None:
        """The step has ended: the loop asks for the next batch, its function returned, or another backward begins."""
        self.handouts.body_ended()
        if self.phase is SETTLED and self._updated:
            self.resume()

    # What a whole program reads.

    def value_read(self, tensor: Tensor, frame: FrameType) -> None:
        lines = self.microscope.lines
        if (lines is not None and lines.is_reading) or frame.f_globals.get("__name__", "").startswith("firstnan."):
            return  # we read it ourselves
        if self.values is not None and self.phase in (WATCHING, REPLAYING, COMPARING):
            bad = self.values.read(tensor, frame)
            if isinstance(self._replay, TurnReplay):
                for value in bad or [tensor]:
                    self._replay.value_read(value)

    def group_left(self) -> None:
        if self.values is not None and self._replay is None and not self.in_child:
            self.values.group_left()

    def module_returned(self, module: Any, output: Any) -> None:
        if self.values is not None:
            self.values.module_returned(module, output)

    @property
    def trains(self) -> bool:
        """Whether the program trains, as far as is known."""
        return bool(self.scope.optimizers) or self.gate.trained

    def _model_returned(self, module: Any, args: Any, kwargs: Any, output: Any, call: ModelCall) -> None:
        """A model whose layers are watched has returned: outside of training, its result counts as the loss does."""
        if self._busy or (self.phase is not WATCHING and self._replay is None):
            return
        if torch.is_grad_enabled() and self.trains:
            return  # a loss follows, which the gate checks
        if self.training_thread not in (None, threading.get_ident()):
            return
        if self.layers is not None and (waiting := self.layers.collect()):
            self.layers.judge(read_all(waiting))
        found, call.first = call.first, None
        if found is None:
            return
        floating = [t for _, t in tensors_in(output) if t.is_floating_point() or t.is_complex()]
        bad = [t for t in floating if has_nan_or_positive_inf(t)]
        if floating and not bad:
            return  # it has vanished
        if not self.policy.judges_outputs and self._replay is None:
            self.journal.reached_output(found)
            return
        if self.calls is not None:
            self.calls.keep_returned(module, args, kwargs)
        tensors = bad or [t for t in (found.tensor,) if t is not None]
        self._trip(Trip(Noticed("output", found.layer), tensors, before_update=True), None)

    # Trips.

    def _trip(self, trip: Trip, optimizer: Any) -> None:
        place = ("update", id(optimizer)) if optimizer is not None else ("backward", self.backwards.count)
        place = (f"{trip.noticed.what} {place[0]}", place[1])
        if trip.noticed.what == "loss" and not self.scope.is_trained_by(trip.tensors, self.models):
            return
        if trip.noticed.what == "buffer" and self.handouts.has_missing_values():
            return  # the program masks them, or the loss would not be finite; the buffer only keeps a copy
        if self._replay is not None:
            self._replay.tripped(trip, place)
        elif self.phase is WATCHING and self.policy.tripped(self, trip) and not self._told and not self._is_held():
            if self.values is not None and self._is_left_out(trip):
                self.backwards.forget()  # The program clears these gradients: no later batch adds to them.
                return
            others = [other for other in list(_active) if other is not self and other._detects(trip, optimizer)]
            self.is_detected = bool(others)
            for other in others:
                other.is_reported = other.is_reported or self.values is not None
            with timers_stopped(), collector_paused():
                self._investigate(trip, place)

    def _is_left_out(self, trip: Trip) -> bool:
        """Whether the program leaves out the update itself; asks a child."""
        assert self.values is not None
        try:
            with timers_stopped(), collector_paused(), self._interruptible():
                return self.values.leaves_out(trip)
        except KeyboardInterrupt:
            if not isinstance(self.policy, EndProgram):
                raise
            self.policy.interrupt()
            return False

    def _interruptible(self) -> AbstractContextManager[None]:
        """Ctrl-C ends the investigation if the program ends after it anyway."""
        ends = isinstance(self.policy, EndProgram) and not self.in_worker
        return own_handlers_interrupt() if ends else contextlib.nullcontext()

    def _investigate(self, trip: Trip, place: tuple[str, int]) -> None:
        try:
            self._tripped(trip, place)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, NonFiniteError) or self.in_child or self.phase is SETTLED:
                raise
            if isinstance(error, Exception):
                self.internal_error(error)  # and the policy decides all the same: it protects the weights
            elif isinstance(self.policy, EndProgram):
                self.policy.interrupt()  # before anything was saved
            else:
                raise
            self._replay, self._told = None, True
            if self.policy.undoes:
                self._schedules = self._settings.before(trip, self.hooks.scalers)
            notes = () if isinstance(error, Exception) else (_INTERRUPTED,)
            report = Report("nonfinite", self.gate.steps.total, noticed=trip.noticed, notes=notes)
            self.settle(report, trip.before_update)

    def _tripped(self, trip: Trip, place: tuple[str, int]) -> None:
        # Other ranks wait in the backward call for this one, and get the same gradients from it.
        self._holds = trip.noticed.what == "loss" and not world().is_alone
        try:
            here, steps = sys._getframe(), self.gate.steps.total
            is_used = self.handouts.settle_on_used(values_around(here), steps, lambda: values_needed(here))
            if not is_used and self.values is None and not self.through_loop:
                self.handouts.forget()  # it may be another model's
        except Exception as error:  # a variable of the program that does not like to be looked at
            self.internal_error(error)
        late = self.gate.reads.late
        # Once the weights are bad every step fails, and none of them tells more.
        most = self.policy.investigates
        closely = not late and (most is None or (self._investigated < most and (self.policy.undoes or not self.streak)))
        # The source of the loops is read only for a failure that is investigated: it takes longer than a small step.
        owns = self.microscope.ownership.owns
        turns = turns_around(sys._getframe(), owns) if closely or self.live.on else []
        self._loops = self._loops_at(trip, turns)
        report = replace(self.known(trip, anew=closely), loops=self._loops)
        self._tripped_in = report.step
        self._hidden_by = hidden_by(sys._getframe())
        if self.live.on:
            self.backwards.blame_first_bad(trip.noticed)
            self._traced_as_it_ran(StepFailure(trip, place, report))
            return
        self._told = True
        if late:
            report = replace(report, step=max((report.step or 0) - 1, 0), batch=None, notes=(LATE,))
        if self._journal is not None:
            self._journal.tripped(trip.noticed, trip.tensors, report.step, self.gate.norm)
        self._investigated += closely
        self._closely = closely
        try:
            with self._interruptible():
                self.policy.known(self, report)
        except KeyboardInterrupt:
            if not isinstance(self.policy, EndProgram):
                raise
            self.policy.interrupt()
        self.keep_state(report, trip)
        calls = calls_around(sys._getframe(), owns) if closely else []
        if closely or self.policy.undoes:
            self._schedules = self._settings.before(trip, self.hooks.scalers, turns, calls)
        if closely:
            answer = self.asked(StepFailure(trip, place, report, turns, calls))
            if self.in_child:
                return
            if answer is not None:
                if self._journal is not None:
                    self._journal.replayed_layers(answer.layers)
                self.settle(answer.report, answer.before_update)
                return
        if closely and trip.before_update and self.can_replay_loop():
            self.replay_by_loop(StepFailure(trip, place, report))
            return
        if closely:
            if self.through_loop and isolation.unavailable() and (harm := harm_of_replay()):
                report = replace(report, notes=(*report.notes, harm))
            report = self.replayed_at_once(report, trip)
        elif not late and self.policy.undoes:
            report = replace(report, notes=(_NOT_INVESTIGATED,))
        self.settle(report, trip.before_update)

    def _model_is_called(self) -> None:
        """In a loop that does not use `batches`, the model is called, with gradients."""
        if not self._is_training_thread() or self.handouts.latest is not None or self.calls is None:
            return
        if self.calls.first is None:
            self._settings.model_called()
        elif not self.backwards.called:  # maybe in the turn before
            self._tell_unused_loss(sys._getframe(1), only_losses=True)
        self.backwards.called = False

    def asked(self, failure: StepFailure) -> Answer | None:
        """What children find out about a failure; None if there can be none, or in a child."""
        if not self._may_replay or isolation.unavailable():
            return None
        if are_gathered(list(self.gate.steps.done)):
            return self._asked_together(failure)
        return self._asked(failure)

    def _asked_together(self, failure: StepFailure) -> Answer | None:
        """The same, for weights that are spread over ranks: when all of them have come to the update."""
        if self._holds:
            self._deferred = failure
            if self._ends_program():
                # The others come only if they get bad gradients, which this loss may not have. No update uses them.
                for loss in failure.trip.tensors:
                    make_gradients_bad(loss)
            return Answer(failure.report, failure.trip.before_update)
        if failure.trip.noticed.what in ("parameter", "state"):  # the update needs this rank's part only
            answer = self._asked(failure)
            self.failure = None
            return answer
        answer = None
        if self.weights.gather(failure.report.step, list(self.gate.steps.done)):
            answer = self._asked(failure)
        if self.in_child:
            return None
        had_all = self.weights.are_here
        if not self._ends_program():  # otherwise a fix is tried with these weights
            self.scatter_weights()
        if answer is not None:
            return answer
        notes = () if had_all else (_SHARDED,)
        return Answer(replace(failure.report, notes=(*failure.report.notes, *notes)), failure.trip.before_update)

    def _ends_program(self) -> bool:
        return isinstance(self.policy, EndProgram) and not self.in_worker and not self.is_detected

    def scatter_weights(self) -> None:
        """Each rank holds its own part again."""
        if self.weights.are_here:
            self.failure = None
        self.weights.scatter()

    def _asked(self, failure: StepFailure) -> Answer | None:
        self.failure = failure
        try:
            if isinstance(self.policy, EndProgram) and self.policy.interrupted:
                raise KeyboardInterrupt
            with self._interruptible():
                return self._answer_of_children(failure)
        except KeyboardInterrupt:
            if not isinstance(self.policy, EndProgram):
                raise
            self.policy.interrupt()
            return Answer(replace(failure.report, notes=(*failure.report.notes, _INTERRUPTED)))

    def _loops_at(self, trip: Trip, turns: Sequence[Turn]) -> tuple[LoopTurn, ...]:
        """How far the loops were in the failing step; unknown where an update by hand is judged in the next turn."""
        late = self.gate.is_by_hand and trip.noticed.what == "parameter"
        return () if late else loops_of(turns, self.microscope.ownership.owns)

    def _answer_of_children(self, failure: StepFailure) -> Answer | None:
        answer = children.ask(self, failure)
        if answer is not None and not answer.report.loops and answer.report.step == failure.report.step:
            # The innermost loop is at the last batch of the step, which may not be the bad one.
            earlier = answer.part is not None and answer.part + 1 < len(self.backwards.batches())
            self._loops = self._loops_at(failure.trip, failure.turns[earlier:])
            answer = replace(answer, report=replace(answer.report, loops=self._loops))
        if answer is None or self.in_child:
            return answer
        if answer.part is not None:
            self.backwards.blame(answer.part)
        answer = with_compiler(self, failure, answer)
        return children.with_drawn(self, failure, turn_search.with_samples(self, failure, answer))

    def known(self, trip: Trip, *, anew: bool = True) -> Report:
        """What is known without a replay; `anew`: the models are looked at again, for tensors they got since."""
        if self.layers is not None:
            with self.journal.noting_layers():
                self.layers.read_notes()
        brief = not anew and not self.streak  # one of many that are skipped
        return self.microscope.evidence(trip.noticed, trip.tensors, anew=anew).preliminary(brief=brief)

    def keep_state(self, report: Report, trip: Trip) -> None:
        """Saves the failing step in a capsule while its weights still exist."""
        if self._capsules is not None and self.values is not None:
            self._capsules.tripped(
                self._told_of(report), written=not trip.before_update or self.gate.in_step is not None
            )

    def lacks_capsule(self, report: Report) -> bool:
        """Whether the capsule could not be written, since the update was already in the weights."""
        updated = report.noticed is not None and report.noticed.what == "parameter"
        return updated and self._capsules is not None and self.values is not None and not self._capsules.is_done

    def can_replay_loop(self, *, apart: bool = False) -> bool:
        can = self._may_replay and self.through_loop and can_replay(self, apart=apart)
        return can and (apart or not harm_of_replay())

    # In a forked child.

    @property
    def in_child(self) -> bool:
        return isinstance(self.policy, Answering)

    def continue_as_child(self, policy: Answering) -> None:
        """From now on this process only investigates; everything it learns goes to its parent."""
        self.policy, self._process = policy, os.getpid()
        self.repeats.step_failed()
        for other in list(_active):  # a detector has no say about what runs again
            other.let_go_of = other.let_go_of or other is not self
        self.hooks.moved_to_child()
        if self.failure is not None:
            self.microscope.known_history = self.failure.report.history  # a replay makes updates of its own

    def replay_begins(self) -> None:
        """The state that a replay begins from was restored."""
        if self.layers is not None:
            self.layers.step_again()
        self.repeats.replay_begins()

    def try_with(self, policy: Policy) -> None:
        """In a child that tries a change: training goes on from here, under this policy."""
        self.policy, self._replay, self.phase = policy, None, WATCHING
        self._told = False

    def replay_by_loop(self, failure: StepFailure) -> None:
        """Replays the step when the loop asks for its next batch."""
        assert self._schedules is not None
        self._replay = LoopReplay(self, failure, self._schedules)
        self.enter(TRIPPED)

    def turn_replayed_by(self, replay: TurnReplay) -> None:
        self._replay = replay

    def begin_turn(self) -> None:
        """A turn of the loop is about to run again."""
        self.backwards.forget()
        if self._schedules is not None:
            self._schedules.restore()

    def accumulated(self, failure: StepFailure) -> Iterator[PartsReplay]:
        """Replays that tell which batch of a step with several is to blame."""
        yield from parts_replay.ways(self, failure)
        yield from self._kept_turns.ways(self, failure)

    def has_source(self, trip: Trip) -> bool:
        """Whether a replay that needs no loop can explain this."""
        return any(source.can(trip) for source in self._sources)

    def _traced_as_it_ran(self, failure: StepFailure) -> None:
        """Explains a failure whose operators are already recorded."""
        trip = failure.trip
        self.keep_state(failure.report, trip)
        report = self.microscope.conclude(trip.noticed, trip.tensors, [], AS_IT_RAN)
        if report is None:
            return
        if self.policy.searches and trip.before_update and self.can_replay_loop():
            self._replay = LoopReplay(self, failure, self._settings.before(trip, self.hooks.scalers, failure.turns))
            if self._replay.searches(report):
                return
        self.settle(report, trip.before_update)

    def replayed_at_once(self, report: Report, trip: Trip) -> Report:
        """The report, completed by a replay that needs no loop."""
        if not world().is_alone:
            return report  # other ranks would not take part in its collectives
        self._busy = True
        try:
            source = next((s for s in self._sources if s.can(trip)), None)
            return source.replay(report, trip) if source is not None else report
        except Exception as error:  # The replay is not part of the program, so its errors must not reach the program.
            self.internal_error(error)
            return report
        finally:
            self._busy = False
            self.microscope.stop()

    # The policy.

    def settle(self, report: Report, before_update: bool, *, finite: bool = False) -> None:
        """The investigation is over and the policy decides. `finite`: the step was good in the end."""
        if isinstance(self.policy, Answering):
            whole = not isinstance(self._replay, TurnReplay) or self._replay.whole
            self.policy.answer(Answer(report, before_update, whole, self.layers_seen(), self.handouts.part))
        if isinstance(self._replay, LoopReplay) and (why := isolation.unavailable()) and not isolation.is_off():
            report = replace(report, notes=(*report.notes, _IN_PROCESS.format(why)))
        self.microscope.stop()
        self._replay = None
        self.enter(SETTLED)
        if not report.loops and report.step == self._tripped_in:
            report = replace(report, loops=self._loops)
        report = self._completed(report, before_update)
        self._keep_report(report)
        self.streak += not finite
        if finite and self.policy.continues and world().is_alone:
            log.warning("%s", nonfinite_error(report))
            self.enter(WATCHING)
            return
        if self._holds and self.policy.holds(self, report):
            self._held = (report, before_update)
            return
        self._holds = False
        self.policy.settle(self, report, before_update)

    def _settle_held(self, optimizer: Any) -> None:
        """The backward call that other ranks have waited for is over: the policy decides what was put off."""
        if self._held is not None and not self.weights.are_spread(optimizer):  # otherwise this is only a part of them
            gradients = (p.grad for p in parameters_of(optimizer))
            self.reaches_others = any(g is not None and not is_finite(g) for g in gradients)
        self._holds, held, self._held = False, self._held, None
        self.policy.released()
        failure, self._deferred = self._deferred, None
        if failure is not None and held is not None:
            answer = self.asked(failure)
            if self.in_child:
                return
            if answer is not None:
                held = self._completed(answer.report, answer.before_update), answer.before_update
                self._keep_report(held[0])
        if held is not None:
            self.policy.settle(self, *held)

    def layers_seen(self) -> tuple[NaNEvent, ...]:
        """What the layer watch has seen in a replay."""
        return self._journal.layers_of_replay if self._journal is not None else ()

    def _completed(self, report: Report, before_update: bool) -> Report:
        """The complete report, with its capsule written."""
        if self._journal is not None and report.noticed is not None and report.noticed.what == "output":
            self._told = False  # no update follows
            report = self._outside_training(report)
        report = doubtful_samples_left_out(with_doubt(self._told_of(self._without_wrong_batch(report))))
        if self._capsules is None or self._journal is None:
            return report
        first = self.calls.first if self.calls is not None else None
        undo = self.recovery.undo_update if self.recovery is not None and self.policy.undoes else None
        random = first.random if first is not None else None
        return self._capsules.settled(report, before_update, undo, self.buffers_before(), random)

    def _without_wrong_batch(self, report: Report) -> Report:
        """The report of a bad gradient that several batches have added to: if nothing tells which, none is named."""
        # Where the program updates by hand, gradients are checked after each batch.
        known = self.handouts.part is not None or self.gate.is_by_hand
        parts = self.backwards.batches() if not known else []
        gradient = report.noticed is not None and report.noticed.what == "gradient" and report.step == self._tripped_in
        if len(parts) < 2 or not gradient or report.batch is None or report.batch.confirmed:
            return report
        indices = f"{parts[0].index} to {parts[-1].index}"
        note = f"one of the {len(parts)} batches of this step ({indices}); which one is not known"
        return replace(report, batch=Batch(note=note))

    def _keep_report(self, report: Report, before: Report | None = None) -> None:
        """Keeps the report of a failure; with `before`, the same failure's report with more in it."""
        self.report = report
        if self._journal is not None and (self._closely or before is not None or not self._journal.has_reports):
            self._journal.explained(report, before)

    def add_to_report(self, report: Report) -> Report:
        """Keeps the report of the failure at hand with more in it."""
        self._keep_report(report, self.report)
        return report

    def _outside_training(self, report: Report) -> Report:
        """The report of a model that is only called: it has no step, and its batch is that of its loader."""
        batch, index = report.batch, self.handouts.position(training=not self.trains)
        if self.trains:
            batch = None if index is None else Batch(index)
        elif index is not None and (batch is None or batch.index is None):
            batch = replace(batch or Batch(), index=index)
        return replace(report, step=None, batch=batch)

    def complete(self, report: Report) -> Report:
        """The report, with what the program's watch adds to it."""
        return self._told_of(report)

    def _told_of(self, report: Report) -> Report:
        report = replace(report, forecast=tuple(self.gate.forecasts), headroom=self.headroom())
        if self._hidden_by and self._hidden_by not in report.notes:
            report = replace(report, notes=(*report.notes, self._hidden_by))
        if self._journal is not None:
            return self._journal.completed(report)
        here = world()
        return replace(report, rank=here.rank, world_size=here.size)

    def headroom(self) -> tuple[Headroom, ...]:
        """How near risky operators have come to their limits, in the steps that were sampled."""
        return self.samples.nearest() if self.samples is not None else ()

    def buffers_before(self) -> list[Any]:
        """The buffers as they were when the current step began."""
        return self.calls.buffers_before() if self.calls is not None else self.handouts.first_buffers()

    def drop_rest_of_step(self, *, updated: bool) -> None:
        """Drops the rest of this step's updates. A later backward call still needs the current weights."""
        self._updated = updated
        if not self.through_loop and self.calls is not None:
            self.calls.before_next(self._model_called)

    def _model_called(self) -> None:
        """In a loop that does not use `batches`, a bad step ends when the model is called for the next one."""
        if self._updated and self._is_training_thread():
            self.hooks.guarded(self.body_ended)

    # Replays by the loop.

    @property
    def asks_again(self) -> bool:
        """Whether the loop's next batch belongs to the failing step."""
        return self._replay is not None or self.handouts.more_to_come

    @property
    def is_searching(self) -> bool:
        return self.phase is SEARCHING

    def settle_on_batch_of(self, error: BaseException) -> None:
        """The step that raised this has used the batch that its variables hold; a later one may be fetched already."""
        try:
            self.handouts.settle_on_used(values_in_traceback(error), self.gate.steps.total)
        except Exception as trouble:  # a variable of the program that does not like to be looked at
            self.internal_error(trouble)

    def left_by(self, error: BaseException) -> bool:
        """Whether an error that left the loop was raised by a replay with replaced samples."""
        if self.in_child and self._replay is None:
            children.answer_left(self, None)
        search = self._replay.search if self._replay is not None else None
        if search is not None:
            search.left_by(error)
        return search is not None

    @contextlib.contextmanager
    def step_again(self) -> Iterator[None]:
        """Wraps a step function: hides what it raises while samples are replaced."""
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            search = self._replay.search if self._replay is not None else None
            if search is None:
                raise
            search.raised(error)

    def forget_replay(self) -> None:
        """Ends the replay under way, if there is one."""
        if self._replay is not None:
            self._replay.end()
            self._replay = None
            self.enter(SETTLED)

    def left_without_asking(self) -> None:
        """The loop goes on without asking for a batch: from now on a step ends where the next backward begins."""
        self.through_loop = False

    def step_is_over(self) -> None:
        """Lets training resume when the loop continues."""
        self._updated = True

    def resume(self) -> None:
        """The bad step is over, and training continues."""
        self.enter(WATCHING)
        self._updated = False
        self._dropped.clear()
        if self.calls is not None:
            self.calls.before_next(None)
        self.policy.resume(self)

    def clean_up(self, buffers: list[Any]) -> None:
        """Restores what a dropped step changed besides the weights."""
        self._told = False
        self.gate.reads.forget()
        if self.recovery is not None:
            self.recovery.clean_up(buffers, self._schedules)
        self._schedules = None
        if self.calls is not None:
            self.calls.forget()

    def undo(self) -> None:
        if self.recovery is None or not self.recovery.go_back(in_use=self._is_computed):
            self.stop(_NO_SNAPSHOT)

    def stop(self, *why: str) -> NoReturn:
        """Ends training with the state from before the bad step."""
        assert self.report is not None
        if self.recovery is not None:
            self.recovery.go_back()
            if self.recovery.every is None:
                restore_buffers(self.buffers_before())
            if self._schedules is not None:
                self._schedules.restore()
        self._keep_report(replace(self.report, notes=(*self.report.notes, *why)), self.report)
        self.on_stop()
        raise nonfinite_error(self.report)

    # The loop was left.

    def left(self, error: BaseException | None) -> Report | None:
        """The report of a failure that the loop was left with; None if there is none, or it was already reported."""
        replay = self._replay
        if self.in_child:
            children.answer_left(self, replay)
        if replay is not None:
            return self._left_in_replay(replay, error)
        if isinstance(error, Exception) and not isinstance(error, NonFiniteError):
            trip = Trip(Noticed("exception", type(error).__name__), self.bad_values_of(error), before_update=True)
            return self._known_at_end(trip, error) if trip.tensors or is_of_anomaly_mode(error) else None
        if error is not None or self.phase is not WATCHING or self.streak:
            return None
        last = self.gate.remaining_nonfinite()
        return self._known_at_end(last, None) if last is not None else self.divergence()

    def _with_rate_sites(self, history: History) -> History:
        optimizers = self.gate.with_history(updated=True)
        if len(optimizers) != 1 + len(history.others):
            return history
        try:
            return with_rate_sites(history, optimizers, self.microscope.ownership)
        except Exception:  # an object of the program that does not like to be looked at, or another source than was run
            return history

    def divergence(self) -> Report | None:
        """The report of a training that is lost although every number is finite; asked when it is over."""
        lost = self.gate.divergence if self.phase is WATCHING and self.report is None else None
        history = self._explosions.pop(lost[0], None) if lost is not None else None
        if lost is None or history is None:
            return None
        report = diverged(lost[0], self._with_rate_sites(history), lost[1])
        report = replace(self._told_of(report), events=report.events)
        if self._journal is not None:
            self._closely = True
            self._keep_report(report)
        return report

    def _left_in_replay(self, replay: LoopReplay | TurnReplay, error: BaseException | None) -> Report | None:
        report = replay.left()
        self.microscope.stop()
        if self.policy.drops and error is None and replay.search is None:
            self.settle(report, before_update=True)
            self.resume()
            return None
        self._replay = None
        self.enter(SETTLED)
        self._keep_report(
            self._completed(report, before_update=True) if replay.search is None else self._told_of(report)
        )
        return self.report

    def _known_at_end(self, trip: Trip, error: Exception | None) -> Report:
        """The report of an exception with a bad value, or of what the last update left behind."""
        if error is not None:
            self.settle_on_batch_of(error)
        report = self.known(trip)
        if error is None:
            self.journal.tripped(trip.noticed, trip.tensors, report.step, None)
        else:
            turns = turns_in_traceback(error, self.microscope.ownership.owns)
            answer = self.asked(StepFailure(trip, ("exception", 0), report, turns))
            report = answer.report if answer is not None else self.replayed_at_once(report, trip)
        self.microscope.stop()
        report = self._completed(report, before_update=error is not None)
        self._keep_report(report)
        return report

    def found(self, report: Report) -> None:
        """Keeps a report that belongs to no step."""
        self.report = report

    def left_by_program(self) -> None:
        """The program has ended, so no replay will follow."""
        replay = self._replay
        if self.in_child:
            children.answer_left(self, replay)
        if replay is not None:
            self.forget_replay()
            if replay.search is not None:
                self.policy.known(self, replay.left())

    def close(self) -> None:
        """Stops checking; later updates are dropped."""
        if self.phase is WATCHING:
            self.enter(SETTLED)

    def restored(self) -> None:
        """The state of a captured step was restored: records every operator from here on."""
        self.microscope.stop()
        self.learn_models()
        self.microscope.drop_gradients()
        self.gate.look_at_everything()
        self.live.begin(in_step=True)

    def trip_at_end(self, trip: Trip) -> None:
        """Training left something non-finite behind."""
        self._trip(trip, None)
