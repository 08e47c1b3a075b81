"""What a detector does while it is attached: hears of trips, has the step played again, and does as it was told."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Module

from firstnan.engine.closer import Closer
from firstnan.engine.conclude import bad_values, not_repeated
from firstnan.engine.detector_capsules import Capsules
from firstnan.engine.events import EventLog
from firstnan.engine.handouts import Replayer, ReplayError
from firstnan.engine.journal import Journal, one_line, rank
from firstnan.engine.microscope import AGAIN, Microscope
from firstnan.engine.mode import REPLAYING, SEARCHING, SKIPPING, WAITING, WATCHING, Mode
from firstnan.engine.model_calls import LastCalls
from firstnan.engine.neighbours import attached, is_held
from firstnan.engine.policy import Settings
from firstnan.engine.recovery import Recovery
from firstnan.engine.replays import Replays
from firstnan.engine.statistics import Statistics
from firstnan.gate.device_reads import LATE
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm, Guard
from firstnan.observe.layers import LayerWatch
from firstnan.observe.sites import Ownership
from firstnan.observe.training_hooks import TrainingHooks
from firstnan.records import Noticed, Report
from firstnan.records.errors import InternalErrors, NonFiniteError
from firstnan.tensors.batches import NamelessSource, restore_buffers
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import drop_gradients, reaches
from firstnan.tensors.safe_updates import is_torch_optimizer

_CLOSELY = 3
"""So many failures are looked at closely; where training goes on, those after them are only counted."""
_COUNTED = f"only the first {_CLOSELY} failures are looked at closely, and none that comes of weights already lost"
log = logging.getLogger("firstnan")


class Session:
    """Listens to the gate and to torch on behalf of one detector (a gate.Listener and a hooks.Audience)."""

    def __init__(
        self,
        roots: dict[str, Module],
        optimizers: list[Any],
        settings: Settings,
        ownership: Ownership,
        events: EventLog,
        stats: Statistics | None,
        layers: Callable[[Journal], LayerWatch] | None,
    ) -> None:
        self.roots, self.optimizers, self.settings = roots, optimizers, settings
        self.internal_error = InternalErrors(log.error)
        self.mode: Mode = WATCHING
        self.report: Report | None = None
        self.training_thread: int | None = None
        self.own_source = NamelessSource()
        self.through_us = False
        self.gate = Gate(self, frugal=True, synchronous=settings.policy in ("raise", "skip"))
        self.gate.new_guard = None if settings.guard == "off" else lambda: Guard(settings.max_grad_norm)
        self.replayer = Replayer()
        self.models = Models(roots)
        self.microscope = Microscope(ownership, self.gate, self.replayer, lambda: Models(roots))
        self.journal = Journal(events, stats, self.gate.steps, self.replayer, self.models, layers is not None)
        self.layers = layers(self.journal) if layers is not None else None
        self.hooks = TrainingHooks(self.gate, self, optimizers)
        self.last_calls = LastCalls(roots.values(), self.replayer, self.internal_error)
        every = settings.snapshot_every if settings.policy == "rollback" else None
        self.recovery = Recovery(self.models, optimizers, every)
        self.capsules = Capsules(settings, roots, self.gate, self.replayer, self.recovery, self.last_calls)
        self._closer = Closer(self.microscope, self.last_calls, self.recovery, self.hooks)
        self._lock = threading.RLock()
        self._busy = False
        """Something of ours runs that looks like training."""
        self.replays = Replays(self.replayer, self.recovery, self.gate, self.microscope)
        self._limit = settings.max_grad_norm if settings.guard == "clip" else None
        """No gradient norm is let through above it."""
        self._streak = self._looked = 0
        self._suppressed = self._told = False
        self._first: tuple[Noticed, Report] | None = None
        """The trip whose step is being played again."""

    # From the first line to the last.

    def begin(self) -> None:
        self.microscope.models = self.models
        self.replayer.watch_buffers(self.models.slots)
        self.gate.watch_models(self.models)
        for optimizer in self.optimizers:
            self.gate.optimizer_made(optimizer)
        self.hooks.install()
        self.last_calls.attach()
        if self.layers is not None:
            # What is played again is seen whole.
            self.layers.is_paused = lambda: self.microscope.running or self.mode is REPLAYING
            self.gate.reads.extra = self.layers
            self.gate.on_good_loss = self.layers.drop_notes
            self.layers.attach()
        attached.add(self)

    def end(self) -> None:
        if self.mode is SKIPPING:
            with contextlib.suppress(NonFiniteError):  # told already
                self._skip_ends()
        attached.discard(self)
        self.hooks.remove()
        self.last_calls.detach()
        if self.layers is not None:
            self.layers.detach()
            if self.layers.error is not None:
                self.internal_error(self.layers.error)
        self.microscope.stop()
        self.replayer.forget()

    def left(self, error: BaseException | None) -> Report | None:
        """The loop was left, perhaps because of a bad value: what is known of it."""
        if self.mode is SEARCHING:
            self.report = self.journal.completed(self.searched())
            return self.report
        if self._first is None and isinstance(error, Exception) and not isinstance(error, NonFiniteError):
            bad = bad_values(error)
            noticed = Noticed("exception", type(error).__name__)
            self._first = (noticed, self._known(noticed, bad)) if bad else None
        first, self._first = self._first, None
        if first is None:
            return self._left_bad() if error is None and self.mode is WATCHING and not self._streak else None
        noticed, report = first
        if self.mode is REPLAYING:
            report = self.microscope.conclude(noticed, [], self.microscope.raised(), AGAIN) or report
        else:
            report = self._looked_closer(report, noticed, before_update=True)
        self.microscope.stop()
        if self.settings.policy in ("skip", "rollback") and error is None:
            self._settle(report, before_update=True)
            self._skip_ends()
            return None
        self.report = self._completed(report, before_update=True)
        return self.report

    def _left_bad(self) -> Report | None:
        """Nothing failed, but the last update, or a buffer whose turn had not come, is not finite."""
        try:
            found = self.gate.remaining_nonfinite()
            if found is None:
                return None
            report = self._known(*found)
            self.journal.tripped(*found, report.step, None)
            self.report = self._completed(report, before_update=False)
        except Exception as error:
            self.internal_error(error)
        return self.report

    # What the gate says.

    @property
    def is_calm(self) -> bool:
        return self.mode is WATCHING and not self._told and len(attached) == 1 and self._limit is None

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        if noticed.what == "loss" and not self._trains_ours(tensors):
            return
        if self.mode is REPLAYING:
            report = self.microscope.conclude(noticed, tensors, [], AGAIN) or self._known(noticed, tensors)
            self._first = None
            # Where training is to go on, one replay is enough.
            searches = before_update and self.settings.policy == "raise" and self.gate.in_step is None
            if searches and self.replays.searches(report):
                self.mode, self.report = SEARCHING, report
            else:
                self._settle(report, before_update)
        elif self.replays.sift is not None:
            self.replays.sift.failed()
        elif self.mode is WATCHING and not self._told and not is_held(self):
            self._told = True
            self._tripped(noticed, tensors, before_update)

    def _tripped(self, noticed: Noticed, tensors: list[Tensor], before_update: bool) -> None:
        report, late = self._known(noticed, tensors), self.gate.reads.late
        if late:
            report = replace(report, step=max((report.step or 0) - 1, 0), batch=None, notes=(LATE,))
        self.journal.tripped(noticed, tensors, report.step, self.gate.norm)
        # Once bad weights were written every step is bad, and none of them says more.
        closely = not late and self._looked < _CLOSELY and not (self.settings.policy == "warn" and self._streak)
        self._looked += closely
        if closely or self.settings.policy != "warn":
            self.recovery.remember_schedules()
        if closely and before_update and self._can_play_again():
            self._first = (noticed, report)
            self.mode = WAITING
            return
        if closely:
            report = self._looked_closer(report, noticed, before_update)
        elif not late and self.settings.policy != "warn":
            report = replace(report, notes=(_COUNTED,))
        self._settle(report, before_update)

    def _can_play_again(self) -> bool:
        undone = self.gate.in_step is None or self.recovery.backup is not None
        return self.through_us and self._alone() and undone and self.replayer.possible(self.gate.steps.total)

    def _alone(self) -> bool:
        """Whether a step can be kept from the weights and played again by this process alone."""
        # Other ranks would not take part in the replay's collectives.
        return bool(self.optimizers) and rank()[1] == 1

    def _trains_ours(self, roots: list[Tensor]) -> bool:
        """Whether this loss trains our models: that of another one is none of our business."""
        graphs = [r for r in roots if r.grad_fn is not None]
        return not graphs or reaches(graphs, set(self.models.parameters))

    def _known(self, noticed: Noticed, tensors: list[Tensor]) -> Report:
        if self.layers is not None:
            self.layers.read_notes()
        return self.microscope.evidence(noticed, tensors).preliminary()

    def _looked_closer(self, report: Report, noticed: Noticed, before_update: bool) -> Report:
        self._busy = True
        try:
            return self._closer.look(report, noticed, before_update=before_update, advise=not self.through_us)
        except Exception as error:  # The replay is our idea: what goes wrong with it is no news to the program.
            self.internal_error(error)
            return report
        finally:
            self._busy = False

    def suppresses(self, optimizer: Any) -> bool:
        """No update may be written between a trip and its replay, nor twice by the replay, nor of a bad step."""
        if self.mode is SKIPPING:
            self._drop_update(optimizer)
        elif self.mode in (REPLAYING, SEARCHING):
            return self.replays.suppresses()
        return self.mode in (WAITING, SKIPPING) or is_held(self)

    def _drop_update(self, optimizer: Any) -> None:
        self._suppressed = True
        self.gate.steps.add(optimizer)

    def step_begins(self, optimizer: Any, closure: bool) -> None:
        self._trains_here()
        if self.mode in (WAITING, SEARCHING, SKIPPING):
            # The gate tripped on these very gradients and goes on: nothing of them may be written.
            drop_gradients(optimizer)
            self.gate.in_step = None
            if self.mode is SKIPPING:
                self._drop_update(optimizer)
            elif self.replays.sift is not None:
                self.replays.sift.passed()
            return
        if self.mode is REPLAYING and not closure:
            self._not_again()
        self.recovery.before_update(optimizer, closure, self.gate.norm)
        self.gate.look_closely = self.recovery.backup is not None or not is_torch_optimizer(optimizer)
        if self._limit is not None:
            self.journal.clip(optimizer, self.gate.norm, self._limit)

    def step_ended(self, by_hand: bool = False) -> None:
        if self.mode is WAITING:
            # Bad numbers appeared inside the update: it is undone, and will be made again.
            self.recovery.undo_update()
            optimizer = self.gate.steps.last() if self.gate.steps.last else None
            self.gate.steps.take_back(optimizer)
            return
        if self.mode is SEARCHING:
            return
        self._told, told = False, self._told
        if self.mode is SKIPPING:
            self._undo()
            self._suppressed = True
            return
        self.journal.counts.steps += 1
        if not told:
            self._streak = 0
        self.last_calls.forget()
        if self.layers is not None:
            self.layers.new_step()
        self.recovery.backup = None
        if self.recovery.every is not None:
            self.recovery.after_update(self.gate.steps.current)

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        if self.layers is not None:
            self.layers.watch_closely()
        self.journal.alarmed(alarm, optimizer)
        if self.settings.guard == "clip" and self._limit is None and alarm.kind != "explosion":
            self.journal.clip(optimizer, alarm.norm, alarm.usual)

    # What torch says.

    def concerns(self, roots: list[Tensor]) -> bool:
        if self._busy or self.training_thread not in (None, threading.get_ident()):
            return False
        called, self.last_calls.called = self.last_calls.called, False
        return called or bool(self.optimizers)

    def backward_begins(self) -> None:
        if not self.through_us:
            self.body_ended()

    def optimizer_made(self) -> None:
        """Only those that were given are followed."""

    def unseen(self) -> contextlib.AbstractContextManager[Any]:
        return self._lock if self.microscope.tracer is None else self._unseen()

    @contextlib.contextmanager
    def _unseen(self) -> Iterator[None]:
        with self._lock, self.microscope.unseen():
            yield

    def _trains_here(self) -> None:
        self.training_thread = threading.get_ident()
        if self.layers is not None:
            self.layers.training_thread = self.training_thread

    # What the loop says.

    def plays_again(self) -> None:
        """The loop takes its batches or makes its steps through us: a failing step is played again whole."""
        if not self.through_us:
            self.through_us = True
            if self._alone():
                self.last_calls.keep_less()

    def handed_out(self, source: Any, batch: Any) -> None:
        self._trains_here()
        try:
            with self._lock:
                self.replayer.fetched(source, batch, self.gate.steps.total)
        except Exception as error:
            self.internal_error(error)

    def body_ended(self) -> None:
        """The loop asks for the next batch, the function of a step has returned, or another backward begins."""
        self.replayer.body_ended()
        if self.mode is REPLAYING:
            self._not_again()
        if self.mode is SKIPPING and self._suppressed:
            self._skip_ends()

    def again(self, source: Any) -> Iterator[Any]:
        """The batches of the failing step once more, as they were first handed out, under the tracer."""
        try:
            handouts = self.replays.prepare(source)
        except ReplayError:
            self._cannot_again()
            return
        self.mode = REPLAYING
        yield from self.replays.traced(handouts)
        if self.mode is SEARCHING:
            yield from self.replays.sifted(source)
            self._settle(self.searched(), before_update=True)
        self.body_ended()

    def searched(self) -> Report:
        """The search for bad samples is over, or was left: the report with what it came to."""
        sift, self.replays.sift = self.replays.sift, None
        assert sift is not None
        assert self.report is not None
        self.mode = WATCHING
        return sift.told_in(self.report, self.replays.difference)

    # What is done about it.

    def _settle(self, report: Report, before_update: bool) -> None:
        """A failure is known as well as it will be: now the policy decides."""
        self.microscope.stop()
        self.mode = WATCHING
        policy = self.settings.policy
        self.report = report = self._completed(report, before_update)
        self._streak += 1
        if policy == "warn":
            # Once the weights are lost every step is bad: said ever more rarely.
            if self._streak.bit_count() == 1:
                told = report.origin is not None or report.notes
                log.warning("%s", NonFiniteError(report) if told else f"step {report.step}: {one_line(report)}")
            return
        if policy == "raise":
            self._stop()
        if self._streak > self.settings.streak:
            self._stop(f"{self._streak} steps in a row were not finite")
        if policy == "skip":
            self.journal.skipped(report)
        else:
            self.journal.rolled_back(report, self.recovery.good_step)
        # What remains of this step must not be written either. A backward still to come needs the weights as they are.
        self.mode, self._suppressed = SKIPPING, not before_update
        if not self.through_us:
            self.last_calls.before_call = self._called

    def _completed(self, report: Report, before_update: bool) -> Report:
        """With all that is known of it, and its capsule written."""
        return self.capsules.kept(self.journal.completed(report), before_update, self.last_calls.buffers_before())

    def _called(self) -> None:
        """In a plain loop a bad step ends where the model is called for the next one."""
        if self._suppressed and self.training_thread in (None, threading.get_ident()):
            self.hooks.guard(self.body_ended)

    def _undo(self) -> None:
        if not self.recovery.go_back():
            self._stop("the update itself was bad and is written; no state to go back to was kept")

    def _stop(self, *why: str) -> NoReturn:
        """Ends training; the state of before is worth more than what the bad step made of it."""
        assert self.report is not None
        self.recovery.go_back()
        if self.settings.policy != "rollback":
            restore_buffers(self.last_calls.buffers_before())
        self.report = replace(self.report, notes=(*self.report.notes, *why))
        raise NonFiniteError(self.report)

    def _skip_ends(self) -> None:
        self.mode, self._told = WATCHING, False
        self.last_calls.before_call = None
        self.gate.reads.forget()
        if self.settings.policy == "rollback":
            self._undo()
            self.recovery.clean_up([])
        else:
            self.recovery.clean_up(self.last_calls.buffers_before())
        self.last_calls.forget()

    def _cannot_again(self) -> None:
        """The batches of the bad step are gone; nothing of it was written."""
        assert self._first is not None
        (noticed, report), self._first = self._first, None
        report = replace(report, notes=("the loop's part in this step could not be played again",))
        self._settle(self._looked_closer(report, noticed, before_update=True), before_update=True)
        if self.mode is SKIPPING:
            self._skip_ends()

    def _not_again(self) -> None:
        """The same step was finite when it was played again."""
        assert self._first is not None
        (_, report), self._first = self._first, None
        self.microscope.stop()
        self.mode = WATCHING
        self.report = report = not_repeated(self.journal.completed(report), None)
        if self.settings.policy == "raise":
            raise NonFiniteError(report)
        log.warning("%s", NonFiniteError(report))
