"""Watches the program that runs in this process: trips, replays, traces, and turns what it saw into a Report."""

from __future__ import annotations

import platform
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from firstnan.blame import Verdict, blame
from firstnan.finite import is_finite, stat, tensors_in
from firstnan.gate import Gate, drop_gradients
from firstnan.hooks import Hooks, Stop
from firstnan.names import Models
from firstnan.records import Batch, Noticed, Origin, Report
from firstnan.replay import CannotReplay, Replayer, batch_size
from firstnan.rules import explain
from firstnan.site import Ownership, Spot, resolve
from firstnan.tracer import Tracer


class Mode(Enum):
    WATCHING = auto()
    WAITING = auto()
    """Tripped; when the loader is asked for the next batch it gives the failing one again."""
    REPLAYING = auto()
    TRACING = auto()
    DONE = auto()


class Watch:
    """Everything that happens inside the program's process, from the import of torch to the end."""

    def __init__(
        self,
        *,
        ownership: Ownership,
        tracing: bool,
        trace_from: int | None,
        outputs_decide: bool,
        may_replay: bool,
        save: Callable[[Report], None],
    ) -> None:
        self.ownership, self.save = ownership, save
        self.trace_from, self.outputs_decide, self.may_replay = trace_from, outputs_decide, may_replay
        self.mode = Mode.TRACING if tracing else Mode.WATCHING
        self.report = Report("clean")
        self.unresolved = False
        """The program has to be run again for the whole answer."""
        self.only_an_output = False
        self.gate = Gate(self)
        self.replayer = Replayer()
        self.hooks = Hooks(self.gate, self)
        self.tracer: Tracer | None = None
        self.models: Models | None = None
        self.entry: Spot | None = None
        self._suspect: tuple[Any, int | None] | None = None
        self._handles_nan_itself = False
        self._output_event: int | None = None
        self._bad_output = False
        self._to_suppress = 0
        self._stepped_while_waiting: set[int] = set()
        self._complained = False
        self.hooks.install()
        if tracing:
            self._trace()

    # What the gate says.

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        if self.mode in (Mode.TRACING, Mode.REPLAYING):
            self._conclude(noticed, tensors)
            raise Stop
        if self.mode is not Mode.WATCHING:
            return
        self.models = Models()
        noticed = self._named(noticed, tensors)
        step = self.gate.steps.current if noticed.what != "parameter" else self.gate.steps.current - 1
        self.report = Report("nonfinite", step, self._batch(), noticed=noticed, history=self.gate.past(), environment=environment())
        self.unresolved = True
        self.save(self.report)
        if self.may_replay and before_update and not self.gate.in_step and self.gate.optimizers and self._can_replay():
            self.mode = Mode.WAITING
            self.hooks.gate.trained = True
            return
        self.mode = Mode.DONE
        raise Stop

    def _can_replay(self) -> bool:
        return self.replayer.possible(self.gate.steps.total)

    def suppresses(self, optimizer: Any) -> bool:
        """No update may be written between a trip and its replay, nor twice by the replay."""
        if self.mode is Mode.WAITING:
            if id(optimizer) in self._stepped_while_waiting:
                self._give_up()
            self._stepped_while_waiting.add(id(optimizer))
            return True
        if self.mode is Mode.REPLAYING and self._to_suppress > 0:
            self._to_suppress -= 1
            return True
        return self.mode is Mode.DONE

    def step_begins(self, optimizer: Any) -> None:
        if self.mode is Mode.WAITING:
            # The gate tripped on these very gradients and goes on: nothing of them may be written.
            drop_gradients(optimizer)
            self._stepped_while_waiting.add(id(optimizer))
            self.gate.in_step = None
        elif self.mode is Mode.REPLAYING:
            self._give_up()
        elif self.tracer is not None:
            self.tracer.in_optimizer = True
            self._name_tensors(optimizer)

    def step_ended(self) -> None:
        self._suspect = None
        tracer = self.tracer
        if tracer is None:
            self._learn_buffers()
            return
        tracer.in_optimizer = False
        tracer.region = "between"
        if self.trace_from is not None:
            tracer.forget_healthy()
        tracer.step = self.gate.steps.current
        if self.trace_from is not None and tracer.step >= self.trace_from - 1:
            tracer.start()
        elif self.trace_from is not None:
            tracer.stop()

    def backward_begins(self) -> None:
        if self._suspect is not None:
            # It saw a non-finite value and trains on: its own business, as long as nothing bad is written.
            self._handles_nan_itself = True
            self._suspect = None
        if self.tracer is not None and self.tracer.region != "step":
            self.tracer.region = "step"

    # What the hooks say.

    def internal_error(self, error: Exception) -> None:
        if not self._complained:
            self._complained = True
            print(f"firstnan: internal error: {type(error).__name__}: {error} (the program goes on)", file=sys.stderr)
            if "FIRSTNAN_DEBUG" in __import__("os").environ:
                __import__("traceback").print_exception(error)

    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        if self.mode is Mode.WAITING:
            try:
                self._to_suppress = self.replayer.begin(iterator, self.gate.steps.total)
            except CannotReplay:
                self._give_up()
            self._begin_replay()
        if self.mode is Mode.REPLAYING:
            try:
                batch = self.replayer.again(iterator)
            except CannotReplay:
                self._give_up()
            self._mark_batch(batch)
            return batch
        self.replayer.prepare(iterator)
        tracer = self.tracer
        before = tracer.region if tracer else ""
        if tracer is not None:
            tracer.region = "data"
        try:
            batch = fetch(iterator)
        finally:
            if tracer is not None:
                tracer.region = before
        try:
            self._handed_out(iterator, batch)
        except Exception as error:
            self.internal_error(error)
        return batch

    def _handed_out(self, iterator: Any, batch: Any) -> None:
        if not torch.is_grad_enabled():
            self.replayer.passed(iterator)
            return
        self.replayer.fetched(iterator, batch, self.gate.steps.total)
        if self.tracer is not None and self.tracer.running:
            self.tracer.region = "step"
            self._mark_batch(batch)

    def value_read(self, tensor: Tensor, caller: Any) -> None:
        """The program looked at a value: if it stops now, that is why."""
        if self._handles_nan_itself or self.mode in (Mode.WAITING, Mode.DONE):
            return
        seen = [tensor] if caller is None else [t for t in caller.f_locals.values() if isinstance(t, Tensor) and t.numel() == 1]
        for t in seen:
            if t.requires_grad and not is_finite(t):
                self._suspect = (weakref.ref(t), self.tracer.last_bad(t) if self.tracer else None)

    def module_returned(self, module: Any, output: Any) -> None:
        """Until the program trains, what an outermost module returns is looked at."""
        if self._bad_output and self.tracer is None:
            return
        bad = [t for _, t in tensors_in(output) if not is_finite(t)]
        if not bad:
            return
        self._bad_output = True
        if self.tracer is None:
            return
        if self.outputs_decide:
            if self._conclude(Noticed("output", type(module).__name__), bad):
                raise Stop
        elif self._output_event is None:
            self._output_event = self.tracer.last_bad(bad[0])

    # The end of the program.

    def program_failed(self, error: BaseException) -> None:
        """The program ends by an exception: was a non-finite value the reason?"""
        if isinstance(error, Stop | KeyboardInterrupt) or self.mode is Mode.DONE:
            return
        code = error.code if isinstance(error, SystemExit) else 1
        if code in (0, None) or self._suspect is not None:
            return
        bad = bad_values(error)
        if bad or "LinAlgError" in type(error).__name__:
            self._stopped_by(Noticed("exception", type(error).__name__), bad)

    def program_ended(self) -> None:
        if self.tracer is not None and self.mode is Mode.TRACING and self.report.verdict == "clean":
            if self._suspect is not None:
                self._stopped_by(Noticed("value"), [])
            elif self._output_event is not None and not self.gate.trained:
                self._conclude(Noticed("output"), [], [self._output_event])
        elif self.mode is Mode.WATCHING:
            if self._suspect is not None:
                self._stopped_by(Noticed("value"), [])
            elif self._bad_output and not self.gate.trained:
                self.unresolved = self.only_an_output = True
        if self.tracer is not None:
            self.tracer.stop()
        self.mode = Mode.DONE

    def _stopped_by(self, noticed: Noticed, tensors: list[Tensor]) -> None:
        if self.mode is Mode.TRACING and self.tracer is not None:
            events = [] if self._suspect is None or self._suspect[1] is None else [self._suspect[1]]
            events += [i for i, r in enumerate(self.tracer.raws) if r.raised][-1:] if noticed.what == "exception" else []
            self._conclude(noticed, tensors, events)
        elif self.mode is Mode.WATCHING:
            self.models = Models()
            self.report = Report(
                "nonfinite", self.gate.steps.current, self._batch(), noticed=noticed, history=self.gate.past(), environment=environment()
            )
            self.unresolved = True
            self.mode = Mode.DONE
            self.save(self.report)

    # Replaying and tracing.

    def _give_up(self) -> None:
        """The replay in this process cannot go on; another process will do it."""
        if self.tracer is not None:
            self.tracer.stop()
        self.mode = Mode.DONE
        raise Stop

    def _begin_replay(self) -> None:
        self.mode = Mode.REPLAYING
        for p, _ in (self.models.parameters.values() if self.models else ()):
            p.grad = None
        self._trace()

    def _trace(self) -> None:
        torch.compiler.set_stance("force_eager")
        self.tracer = tracer = Tracer(self.ownership)
        tracer.step = self.gate.steps.current
        if self.mode is Mode.REPLAYING:
            tracer.region = "step"
            self._name_tensors(None)
        tracer.start()

    def _name_tensors(self, optimizer: Any) -> None:
        """Tells the tracer which tensors are weights, buffers and optimizer state."""
        assert self.tracer is not None
        if self.models is None or optimizer is None:
            self.models = Models()
        for p, name in self.models.parameters.values():
            self.tracer.give_role(p, "parameter", name)
        for b, name in self.models.buffers.values():
            self.tracer.give_role(b, "buffer", name)

    def _mark_batch(self, batch: Any) -> None:
        assert self.tracer is not None
        self.entry = self.ownership.spots(sys._getframe(2))[0]
        for label, t in tensors_in(batch, "batch"):
            self.tracer.give_role(t, "input", label)

    def _learn_buffers(self) -> None:
        """After the first step the models are there: their buffers are watched from now on."""
        if self.models is None:
            self.models = Models()
            buffers = [b for b, _ in self.models.buffers.values()]
            self.replayer.watch_buffers(buffers)
            self.gate.buffers = [(n, weakref.ref(b), b._version) for b, n in self.models.buffers.values()]

    # From what was seen to a report.

    def _conclude(self, noticed: Noticed, tensors: list[Tensor], events: list[int] | None = None) -> bool:
        """Blames, explains and saves; False where everything seen was put there on purpose."""
        tracer = self.tracer
        assert tracer is not None
        replayed = self.mode is Mode.REPLAYING
        running = tracer.running
        tracer.stop()
        self.models = Models()
        self._name_tensors(None)
        noticed = self._named(noticed, tensors)
        starts = list(events or []) + [e for t in tensors if (e := tracer.last_bad(t)) is not None]
        trace = tracer.trace()
        verdict = blame(trace, dict.fromkeys(starts), loss_is_finite=noticed.what not in ("loss", "output", "value"))
        if verdict.origin is None or (noticed.what == "output" and verdict.innocent):
            if noticed.what == "output":
                if running:
                    tracer.start()
                return False
            verdict = replace(verdict, origin=self._untraced(noticed, tensors))
        self.report = self._compose(noticed, verdict, replayed)
        if verdict.origin is not None:
            causes = explain(verdict.origin, trace, self.report.history)
            self.report = replace(self.report, cause=causes[0], other_causes=tuple(causes[1:4]))
        self.unresolved = replayed and (verdict.origin is None or _came_from_outside(verdict.origin))
        self.mode = Mode.DONE
        self.save(self.report)
        return True

    def _compose(self, noticed: Noticed, verdict: Verdict, replayed: bool) -> Report:
        origin = verdict.origin
        step = self.gate.steps.current if noticed.what != "parameter" else self.gate.steps.current - 1
        if origin is not None and origin.event is not None and origin.event.region in ("step", "between"):
            step = origin.step - (1 if origin.event.region == "between" and origin.phase == "parameter" else 0)
        if origin is not None and origin.phase == "input" and origin.role == "input" and self.entry is not None:
            if origin.event is None or origin.event.region not in ("setup", "data"):
                origin = replace(origin, site=resolve(self.entry), module="", module_type="")
        batch = self._batch()
        rows = origin.event.bad_rows if origin is not None and origin.event is not None else ()
        return Report(
            "nonfinite",
            max(step, 0),
            replace(batch, bad_samples=rows or None) if batch else None,
            origin,
            path=verdict.path,
            noticed=noticed,
            reproduced="deterministic",
            replay="the failing batch was handed out again" if replayed else "every operator was traced as it ran",
            history=self.gate.past(),
            environment=environment(),
        )

    def _untraced(self, noticed: Noticed, tensors: list[Tensor]) -> Origin | None:
        """Bad before anything was traced: a weight or data from outside."""
        if not tensors:
            return None
        s = stat(noticed.name or noticed.what, tensors[0])
        phase = "parameter" if noticed.what == "parameter" else "input"
        return Origin(phase, "", "", inputs=(s,), produced=s, role="parameter" if phase == "parameter" else "unknown", label=noticed.name)

    def _named(self, noticed: Noticed, tensors: list[Tensor]) -> Noticed:
        if noticed.name or self.models is None:
            return noticed
        names = [n for t in tensors if (n := self.models.name(t))]
        return Noticed(noticed.what, names[0] if names else "")

    def _batch(self) -> Batch | None:
        latest = self.replayer.latest
        return Batch(latest.index, batch_size(latest.batch)) if latest is not None else None


def _came_from_outside(origin: Origin) -> bool:
    return origin.phase in ("input", "parameter") and (origin.event is None or not origin.event.born)


def bad_values(error: BaseException) -> list[Tensor]:
    """NaN tensors (and infinite ones that are part of a graph) in the frames that the exception passed."""
    found: list[Tensor] = []
    at = error.__traceback__
    while at is not None and len(found) < 32:
        for value in list(at.tb_frame.f_locals.values()):
            if isinstance(value, torch.nn.Module):
                continue
            found += [t for _, t in tensors_in(value, depth=2) if _is_bad(t)]
        at = at.tb_next
    return found


def _is_bad(t: Tensor) -> bool:
    if is_finite(t):
        return False
    return bool(torch.isnan(t).any()) or (t.requires_grad and t.numel() == 1)


def environment() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform()}
