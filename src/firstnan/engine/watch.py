"""Watches the program that runs in this process: trips, replays and traces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from time import time
from typing import Any, NoReturn

import torch
from torch import Tensor

from firstnan.capsule import Wanted
from firstnan.capsule.training_objects import Living
from firstnan.engine.capsule_writer import Keeper
from firstnan.engine.conclude import AS_IT_RAN, bad_values, came_from_outside, not_repeated
from firstnan.engine.handouts import Replayer, ReplayError
from firstnan.engine.microscope import AGAIN, Microscope
from firstnan.engine.samples.search import Sift, begin_search
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm
from firstnan.observe.muted_output import MutedOutput
from firstnan.observe.program_hooks import ProgramHooks, Stop, end_program
from firstnan.observe.sites import Ownership
from firstnan.records import NaNEvent, Noticed, Report
from firstnan.records.errors import InternalErrors
from firstnan.tensors.batches import copy_batch
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tensors.optimizers import drop_gradients
from firstnan.tracing.compare import first_difference
from firstnan.tracing.recording import Raw
from firstnan.tracing.tracer import Tracer


class Mode(Enum):
    WATCHING = auto()
    WAITING = auto()
    """Tripped; when the loader is asked for the next batch it gives the failing one again."""
    REPLAYING = auto()
    SEARCHING = auto()
    """Explained; the step is played again with samples replaced, to see which of them are bad."""
    TRACING = auto()
    DONE = auto()


class Watch:
    """Everything that happens inside the program's process, from the import of torch to the end."""

    is_calm = False  # Whoever starts a program under watch asks for the closest look.

    def __init__(
        self,
        *,
        ownership: Ownership,
        tracing: bool,
        trace_from: int | None,
        outputs_decide: bool,
        may_replay: bool,
        save: Callable[[Report], None],
        wanted: Wanted | None = None,
    ) -> None:
        self.ownership, self.save = ownership, save
        self.trace_from, self.outputs_decide, self.may_replay = trace_from, outputs_decide, may_replay
        self.mode = Mode.TRACING if tracing else Mode.WATCHING
        self.internal_error = InternalErrors(lambda text: print(text, file=sys.stderr))
        self.report = Report("clean")
        self.unresolved = False
        """The program has to be run again for the whole answer."""
        self.bad_output: Noticed | None = None
        self.gate = Gate(self, thorough=tracing)
        self.replayer = Replayer()
        self.microscope = Microscope(ownership, self.gate, self.replayer)
        self.keeper = Keeper(wanted, self.gate, self.replayer, self._living) if wanted is not None else None
        self.hooks = ProgramHooks(self.gate, self)
        self._suspect: tuple[Noticed, int | None] | None = None
        self._handles_nan_itself = False
        self._output_event: int | None = None
        self._to_suppress = 0
        self._stepped_while_waiting: set[int] = set()
        self._learned = False
        self._quiet = MutedOutput()
        self._sift: Sift | None = None
        self._traced: list[Raw] | None = None
        """The first trace of the failing step, where a second one is made to compare."""
        self._updates = 0
        """How many there had been when the gate tripped."""
        self.hooks.install()
        if tracing:
            self.microscope.start(in_step=False)

    @property
    def tracer(self) -> Tracer | None:
        return self.microscope.tracer

    # What the gate says.

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        if self._sift is not None:
            self._sift.failed()
            return
        if self._traced is not None and self.mode is Mode.REPLAYING:
            if self.report.origin is None:
                self._conclude(noticed, tensors)
            self._compare(self._traced)
        if self.mode is not Mode.REPLAYING:
            self._updates = self.gate.steps.total
        by_a_loader = before_update and not self.gate.in_step and self.gate.optimizers
        again = self.may_replay and by_a_loader and self.replayer.possible(self._updates)
        if self.mode is Mode.TRACING:
            self._keep(noticed, tensors, written=not before_update)
        if self.mode in (Mode.TRACING, Mode.REPLAYING):
            if self._conclude(noticed, tensors) and again and self._begin_search():
                return
            self._end()
        if self.mode is not Mode.WATCHING:
            return
        self._found(noticed, tensors)
        self._keep(noticed, tensors, written=not before_update)
        if again:
            self.mode = Mode.WAITING
            return
        end_program()

    def suppresses(self, optimizer: Any) -> bool:
        """No update may be written between a trip and its replay, nor twice by the replay."""
        if self.mode is Mode.WAITING:
            if id(optimizer) in self._stepped_while_waiting:
                self._give_up()
            self._stepped_while_waiting.add(id(optimizer))
            return True
        if self.mode in (Mode.REPLAYING, Mode.SEARCHING) and self.replayer.more_to_come:
            return True
        if self.mode in (Mode.REPLAYING, Mode.SEARCHING) and self._to_suppress > 0:
            self._to_suppress -= 1
            return True
        return self.mode is Mode.DONE or (self._sift is not None and self._sift.decided)

    def step_begins(self, optimizer: Any, closure: bool) -> None:
        if self.mode in (Mode.WAITING, Mode.SEARCHING):
            # The gate tripped on these very gradients and goes on, or only looks: nothing of them may be written.
            drop_gradients(optimizer)
            self.gate.in_step = None
            if self._sift is not None:
                self._sift.passed()
            else:
                self._stepped_while_waiting.add(id(optimizer))
        elif self.mode is Mode.REPLAYING:
            if self._traced is not None:
                self._compare(self._traced)
            if closure:
                self._give_up()
            self._replay_was_finite(optimizer)
        elif self.tracer is not None:
            self.tracer.update_begins(optimizer, closure, self.gate.norm)
            self.microscope.name_tensors()

    def step_ended(self, by_hand: bool = False) -> None:
        if self._sift is not None:
            return
        self._suspect = None
        self._learn_buffers()
        if self.keeper is not None:
            self.keeper.step_ended()
        tracer = self.tracer
        if tracer is None:
            return
        tracer.update_ended()
        # Without an optimizer object it is now that the program updates its weights.
        tracer.region = "update" if by_hand else "between"
        tracer.forget_healthy()
        tracer.step = self.gate.steps.current
        if self.trace_from is None or tracer.step >= self.trace_from - 1:
            tracer.start()
            tracer.follow()
            tracer.marks = bool(self.trace_from)  # A step that was asked for may be played again, to compare.
        else:
            tracer.stop()

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        """Growth is no failure yet; what it came to is told at the end."""

    def optimizer_made(self) -> None:
        if self.tracer is not None:
            # Another stage of training: what was done since the last update prepared it.
            self.tracer.relabel("between", "setup")

    def concerns(self, roots: list[Tensor]) -> bool:
        return True

    def backward_begins(self) -> None:
        if self._suspect is not None:
            # It saw a non-finite value and trains on: its own business, as long as nothing bad is written.
            self._handles_nan_itself = True
            self._suspect = None
        if self.keeper is not None:
            self.keeper.backward_begins()
        if self.tracer is not None:
            self.tracer.follow()
            self.tracer.region = "step"

    # What the hooks say.

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        return self.microscope.unseen()

    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        if self.mode in (Mode.WAITING, Mode.REPLAYING, Mode.SEARCHING) and torch.is_grad_enabled():
            return self._batch_again(iterator) if self._sift is None else self._batch_for(self._sift, iterator)
        self.hooks.guard(self.replayer.body_ended)
        tracer = self.tracer
        before = tracer.region if tracer else "step"
        if tracer is not None:
            tracer.region = "data"
        try:
            batch = fetch(iterator)
        finally:
            if tracer is not None:
                tracer.region = before
        self.hooks.guard(self._handed_out, iterator, batch)
        return batch

    def _batch_again(self, iterator: Any) -> Any:
        try:
            if self.mode is Mode.WAITING:
                self._to_suppress = self.replayer.begin(iterator, self._updates)
                self._begin_replay()
            handout = self.replayer.again(iterator)
        except ReplayError:
            self._give_up()
        with self.unseen():
            batch = handout.batch if self._traced is None else copy_batch(handout.pristine)
        self.microscope.mark_batch(batch, sys._getframe())
        return batch

    def _batch_for(self, sift: Sift, iterator: Any) -> Any:
        """The next batch of the replay under way, or the first of the next one."""
        try:
            try:
                handout = self.replayer.again(iterator)
            except ReplayError:
                if not self.replayer.knows(iterator):  # the loop has been left for another
                    self._end()
                if not sift.goes_on():
                    return self._after_search(sift, iterator)
                self._to_suppress = self.replayer.begin(iterator, self._updates)
                self.microscope.drop_gradients()
                handout = self.replayer.again(iterator)
            return sift.batch(handout)
        except ReplayError:
            self._end()
        except Exception as error:
            self.internal_error(error)
            self._end()

    def _after_search(self, sift: Sift, iterator: Any) -> Any:
        """Ends the program, unless the same batch was finite: then the step is traced a second time, to compare."""
        self._search_ends()
        if sift.repeated or self.tracer is None:
            end_program()
        self._traced = self.tracer.raws
        self.mode = Mode.WAITING
        return self._batch_again(iterator)

    def _handed_out(self, iterator: Any, batch: Any) -> None:
        if not torch.is_grad_enabled():
            self.replayer.passed(iterator)
            return
        self.replayer.fetched(iterator, batch, self.gate.steps.total)
        if self.keeper is not None:
            self.keeper.handed_out()
        if self.tracer is not None and self.tracer.running:
            self.tracer.follow()
            self.tracer.region = "step"
            self.microscope.mark_batch(batch, sys._getframe())

    def value_read(self, tensor: Tensor, caller: Any) -> None:
        """The program looked at a value: if it stops now, that is why."""
        if self._handles_nan_itself or self.mode in (Mode.WAITING, Mode.SEARCHING, Mode.DONE):
            return
        seen = [tensor]
        if not tensor.requires_grad and self.ownership.owns(caller.f_code):
            # Detached, or a yes-or-no question: mostly about a number at hand where it is asked.
            seen = [t for t in caller.f_locals.values() if isinstance(t, Tensor) and t.numel() == 1]
        for t in seen:
            if t.requires_grad and not is_finite(t):
                self._suspect = (Noticed("value"), self.tracer.last_bad(t) if self.tracer else None)

    def module_returned(self, module: Any, output: Any) -> None:
        """Until the program trains, what an outermost module returns is looked at."""
        if self.bad_output is not None and self.tracer is None:
            return
        bad = [t for _, t in tensors_in(output) if not is_finite(t)]
        if not bad:
            return
        has_nan = any(bool(torch.isnan(t).any()) for t in bad)
        self.bad_output = Noticed("output", type(module).__name__ if has_nan else "")
        if self.tracer is None:
            return
        if self.outputs_decide:
            if self._conclude(Noticed("output", type(module).__name__), bad):
                end_program()
        elif self._output_event is None:
            self._output_event = self.tracer.last_bad(bad[0])

    # The end of the program.

    def program_failed(self, error: BaseException) -> None:
        """The program ends by an exception: was a non-finite value the reason?"""
        if isinstance(error, Stop | KeyboardInterrupt) or self.mode is Mode.DONE or self._suspect is not None:
            return
        if self._sift is not None:  # What it says of a replay is no news to anyone: the output stays hidden to the end.
            self._sift.error = error
            return
        if isinstance(error, SystemExit) and error.code in (0, None):
            return
        bad = bad_values(error)
        if bad or "LinAlgError" in type(error).__name__:
            self._stopped_by(Noticed("exception", type(error).__name__), bad, [])

    def program_ended(self) -> None:
        self._search_ends()
        with contextlib.suppress(SystemExit):
            self.gate.last_look()
        if self.mode in (Mode.TRACING, Mode.WATCHING):
            if self._suspect is not None:
                noticed, event = self._suspect
                self._stopped_by(noticed, [], [] if event is None else [event])
            elif not self.gate.trained and self._output_event is not None:
                self._conclude(Noticed("output"), [], [self._output_event])
            elif not self.gate.trained and self.bad_output is not None and self.tracer is None:
                self.unresolved = True
        self.microscope.stop()
        self.mode = Mode.DONE
        self._tell_of_explosion()

    def _tell_of_explosion(self) -> None:
        alarm = self.gate.explosion
        if alarm is not None and self.report.verdict == "clean":
            event = NaNEvent("explosion", alarm.text, alarm.step, grad_norm=alarm.norm, time=time())
            text = f"training was lost all the same: {alarm.text}"
            self.report = replace(self.report, events=(event,), history=self.gate.past(), notes=(text,))

    def _stopped_by(self, noticed: Noticed, tensors: list[Tensor], events: list[int]) -> None:
        if self.mode in (Mode.TRACING, Mode.WATCHING):
            self._keep(noticed, tensors, written=False)
        if self.mode is Mode.TRACING and self.tracer is not None:
            raised = self.microscope.raised() if noticed.what == "exception" else []
            self._conclude(noticed, tensors, events + raised)
        elif self.mode is Mode.WATCHING:
            self._found(noticed, tensors)

    # Replaying and tracing.

    def _found(self, noticed: Noticed, tensors: list[Tensor]) -> None:
        """Something is not finite: on disk before anything else is tried."""
        self.mode = Mode.DONE
        self.report = self.microscope.evidence(noticed, tensors).preliminary()
        self.unresolved = True
        self.save(self.report)

    def _living(self) -> Living:
        return Living.find(list(self.gate.steps.done), leaves=self.gate.leaves)

    def _keep(self, noticed: Noticed, tensors: list[Tensor], *, written: bool) -> None:
        """The failing step goes into a capsule while its weights are still there."""
        if self.keeper is not None:
            report = self.microscope.evidence(noticed, tensors).preliminary()
            self.keeper.tripped(report, written=written or self.gate.in_step is not None)

    def _give_up(self) -> NoReturn:
        """The replay in this process cannot go on; another process will do it."""
        self.microscope.stop()
        self.mode = Mode.DONE
        self._end()

    def _replay_was_finite(self, optimizer: Any) -> None:
        """It goes on to the next batch, which will be the failing one once more."""
        assert self.tracer is not None
        drop_gradients(optimizer)
        self.gate.in_step = None
        self.microscope.stop()
        self._traced = self.tracer.raws
        self.mode, self._stepped_while_waiting = Mode.WAITING, {id(optimizer)}

    def _compare(self, first: list[Raw]) -> NoReturn:
        """The step was traced twice: says what differed between the two."""
        assert self.tracer is not None
        self.microscope.stop()
        self.mode = Mode.DONE
        self.report = not_repeated(self.report, first_difference(first, self.tracer.raws))
        self.unresolved = self.report.origin is None
        self.save(self.report)
        self._end()

    def _end(self) -> NoReturn:
        self._search_ends()
        end_program()

    def _begin_search(self) -> bool:
        """Has the step played again to see which samples are bad; False where that cannot be."""
        self.microscope.stop()
        try:
            self._sift = begin_search(self.report, self.replayer)
        except Exception as error:
            self.internal_error(error)
        if self._sift is None:
            return False
        self.mode = Mode.SEARCHING
        self.replayer.stop_again()
        self._quiet.begin()
        return True

    def _search_ends(self) -> None:
        sift, self._sift = self._sift, None
        self._quiet.end()
        if sift is not None:
            self.mode = Mode.DONE
            self.report = sift.told_in(self.report)
            self.save(self.report)

    def _begin_replay(self) -> None:
        self.mode = Mode.REPLAYING
        self._quiet.begin()
        self.microscope.drop_gradients()
        self.microscope.start(in_step=True)

    def _learn_buffers(self) -> None:
        """After the first step the models are there: their buffers are watched from now on."""
        if not self._learned:
            self._learned = True
            models = self.microscope.models = self.microscope.find_models()
            self.replayer.watch_buffers(models.slots)
            self.gate.watch_models(models)

    def _conclude(self, noticed: Noticed, tensors: list[Tensor], events: list[int] | None = None) -> bool:
        """Blames, explains and saves; False where everything seen was put there on purpose."""
        replayed = self.mode is Mode.REPLAYING
        how = AGAIN if replayed else AS_IT_RAN
        report = self.microscope.conclude(noticed, tensors, list(events or []), how)
        if report is None:
            return False
        self.report = report
        self.unresolved = replayed and (report.origin is None or came_from_outside(report.origin))
        self.mode = Mode.DONE
        self.save(report)
        return True
