"""Traces one step, as a replay or as it runs, and turns the trace into a report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor

from firstnan.engine.conclude import Evidence, is_of_anomaly_mode
from firstnan.engine.handouts import Handouts
from firstnan.gate.gate import Gate
from firstnan.gate.step_counter import StepCounter
from firstnan.observe.line_watch import LineWatch
from firstnan.observe.patches import Patches, as_written, eager
from firstnan.observe.runner import when_imported
from firstnan.observe.sites import Ownership, Spot
from firstnan.records import History, Noticed, Report
from firstnan.tensors.finite import tensors_in
from firstnan.tensors.models import Models, parameters_of, state_tensors
from firstnan.tensors.state import local_variables
from firstnan.tracing.other_threads import OtherThreads
from firstnan.tracing.tracer import Tracer

_NOTHING = contextlib.nullcontext()
_MOST_SECONDS = 10.0
"""How long lines are watched, which takes ten times as long as running them."""


def _variables_with(tensors: list[Tensor], owns: Callable[[CodeType], bool]) -> dict[int, str]:
    """The names of the program's variables that hold these tensors, in the running functions, by the tensor's id."""
    wanted, found = {id(t) for t in tensors}, dict[int, str]()
    frame = sys._getframe(1) if wanted else None
    while frame is not None and wanted - found.keys():
        for name, value in local_variables(frame).items() if owns(frame.f_code) else ():
            if id(value) in wanted:
                found.setdefault(id(value), name)
        frame = frame.f_back
    return found


class Microscope:
    """The tracer, with what is needed to interpret its trace: tensor names, batches, the gate's history."""

    def __init__(
        self, ownership: Ownership, gate: Gate, handouts: Handouts, find_models: Callable[[], Models] = Models
    ) -> None:
        self.ownership, self.gate, self.handouts = ownership, gate, handouts
        self.find_models = find_models
        self.models: Models | None = None
        self.tracer: Tracer | None = None
        self.known_history: History | None = None
        """The steps before the failure, where they are known from the process that has failed."""
        self.lines: LineWatch | None = None
        self.threads: OtherThreads | None = None
        self._entry: Spot | None = None
        self._data: list[tuple[str, Tensor]] = []
        """The data of the step, by its names."""
        self._is_eager = False
        self._scripted = Patches()
        self._call_off: Callable[[], None] = lambda: None

    @property
    def running(self) -> bool:
        return self.tracer is not None and self.tracer.running

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Code run inside this context is our own and not part of the trace."""
        return _NOTHING if self.tracer is None else self.tracer.pause()

    def start(self, *, in_step: bool, block: bool = False) -> Tracer:
        """Records every operator from now on; `in_step` if a step is about to be replayed, `block`: of `trace()`."""
        # Compiled functions run uncompiled; but do not load the compiler just for that.
        self._call_off = when_imported("torch._dynamo", self._force_eager)
        as_written(self._scripted)
        self.tracer = tracer = Tracer(self.ownership, helpers=in_step or block)
        tracer.at(step=self.gate.steps.current, looks_for_training=True)
        if in_step:
            tracer.at(region="step", marks=True)  # It may be replayed once more, to compare.
            self.name_tensors()
        tracer.start()
        return tracer

    def stop(self) -> None:
        """Stops recording; compiled functions run compiled again."""
        self._data = []
        if self.tracer is not None:
            self.tracer.stop()
        self._call_off()
        self._scripted.remove()
        if self._is_eager:
            self._is_eager = False
            eager.release()

    def _force_eager(self) -> None:
        if not self._is_eager:
            self._is_eager = True
            eager.ask()

    def name_tensors(self) -> None:
        """Tells the tracer which tensors are weights and buffers."""
        assert self.tracer is not None
        if self.models is None:
            self.models = self.find_models()
        for p, name in self.models.parameters.values():
            self.tracer.give_role(p, "parameter", name)
        loose = [p for o in list(self.gate.steps.done) for p in parameters_of(o)] + self.gate.leaves
        loose = [p for p in loose if id(p) not in self.models.parameters]  # tensors that belong to no module
        names = _variables_with(loose, self.ownership.owns)
        for p in loose:
            self.tracer.give_role(p, "parameter", names.get(id(p), ""))
        for b, name in self.models.buffers.values():
            self.tracer.give_role(b, "buffer", name)
        if self.find_models is not Models:  # a step may use models that are not watched, such as a reference model
            others, trained = Models(), self.gate.trained_parameters()
            others.tell_apart(trained)
            for key, (p, name) in others.parameters.items():
                if key not in self.models.parameters:
                    said = key in trained or name.endswith(")")
                    self.tracer.give_role(p, "parameter", name if said else f"{name} (not trained)")
        for optimizer in list(self.gate.steps.done):
            for p, kept, t in state_tensors(optimizer):
                _, name = self.models.parameters.get(id(p), (p, "a parameter"))
                self.tracer.give_role(t, "state", f"{kept} of {name}")

    def mark_batch(self, batch: Any, taker: Any) -> None:
        """Tells the tracer which tensors are data, and the frame in which the program takes them."""
        assert self.tracer is not None
        self._entry = self.ownership.spots(taker)[0]
        self._data = []
        for label, t in tensors_in(batch, "batch"):
            self.mark_value(t, label)

    def is_unnamed(self, tensor: Tensor) -> bool:
        """Whether this is neither a weight nor a buffer of a known model."""
        return self.models is None or not self.models.name(tensor)

    def mark_value(self, tensor: Tensor, name: str) -> None:
        """Tells the tracer that this is data, in a variable of the program."""
        assert self.tracer is not None
        self.tracer.give_role(tensor, "input", name)
        self._data.append((name, tensor))

    def drop_gradients(self) -> None:
        for p, _ in self.models.parameters.values() if self.models else ():
            p.grad = None

    def raised(self, error: BaseException | None = None) -> list[int]:
        """The last operator that raised an exception, if any; in anomaly mode, the derivative that it complains of."""
        raws = self.tracer.raws if self.tracer is not None else []
        if is_of_anomaly_mode(error):
            return [i for i, r in enumerate(raws) if r.phase == "backward" and r.finding is not None][-1:]
        return [i for i, r in enumerate(raws) if r.raised][-1:]

    def has_received(self) -> bool:
        """Whether values of other ranks have come into the forward pass."""
        raws = self.tracer.raws if self.tracer is not None else []
        return any(r.phase == "forward" and r.call.func.is_collective for r in raws)

    def evidence(self, noticed: Noticed, tensors: list[Tensor], *, anew: bool = True) -> Evidence:
        if anew or self.models is None:
            self.models = self.find_models()
        self.models.tell_apart(self.gate.trained_parameters())
        return Evidence(
            self.gate, self.handouts, self.models, self.ownership, noticed, tensors, self._entry, self.known_history,
            self.lines, tuple(self._data), self.threads,
        )  # fmt: skip

    def watch_lines(self, seconds: float = _MOST_SECONDS) -> None:
        """Watches the lines of the program too, until its next backward call."""
        self.lines = self.lines or LineWatch(self.ownership, seconds, self.unseen)
        self.lines.begin()

    def watch_threads(self) -> None:
        """Notes what other threads make from now on."""
        self.threads = OtherThreads(self.ownership)
        self.threads.begin()

    def conclude(self, noticed: Noticed, tensors: list[Tensor], events: list[int], how: str) -> Report | None:
        """Finds the origin and the cause; None, and recording continues, if every non-finite value was intended."""
        tracer = self.tracer
        assert tracer is not None
        running = tracer.running
        tracer.stop()
        evidence = self.evidence(noticed, tensors)
        self.name_tensors()
        report = evidence.conclude(tracer, events, how)
        if report is None and running:
            tracer.start()
        return report


class LiveTrace:
    """Tells the microscope's tracer where the program is.

    `from_update` where only what follows so many updates is recorded, after what came before the first step; None
    where everything is. In a `block` of `trace()` all of it is one step, whatever is trained in it.
    """

    def __init__(self, microscope: Microscope, *, from_update: int | None = None, block: bool = False) -> None:
        self._microscope, self._from_update, self._block = microscope, from_update, block
        self.on = False
        self.lines_in = range(0)
        """After how many updates the lines of the program are watched too, up to the next backward call."""

    @property
    def tracer(self) -> Tracer | None:
        return self._microscope.tracer if self.on else None

    def begin(self, *, in_step: bool = False) -> None:
        self.on = True
        tracer = self._microscope.start(in_step=in_step, block=self._block)
        if self._block:
            tracer.at(region="step")  # The names of weights are looked up when there is something to report.

    def fetched(self, fetch: Callable[[Any], Any], iterator: Any) -> Any:
        """Fetches a batch; operators that run meanwhile are marked as data."""
        __tracebackhide__ = True
        tracer = self.tracer
        if tracer is None:
            return fetch(iterator)
        before = tracer.region
        tracer.at(region="data")
        try:
            return fetch(iterator)
        finally:
            tracer.at(region=before)

    def handed_out(self, batch: Any) -> None:
        tracer = self.tracer
        if tracer is not None and tracer.running:
            tracer.follow()
            tracer.at(region="step")
            self._microscope.mark_batch(batch, sys._getframe())

    def backward_begins(self) -> None:
        tracer = self._microscope.tracer if self.on else None
        if tracer is None:
            return
        if self._microscope.lines is not None:
            self._microscope.lines.end()
        if self._block:
            tracer.goes_on()
        else:
            tracer.follow()
            tracer.at(region="step")

    def optimizer_made(self) -> None:
        if self.tracer is not None and not self._block:
            self.tracer.label_setup()

    def update_begins(self, optimizer: Any, closure: bool, norm: float | None, step: int) -> bool:
        """Returns whether the update is known to keep finite parameters finite."""
        tracer = self._microscope.tracer if self.on else None
        if tracer is None:
            return False
        safe = tracer.update_begins(optimizer, closure, norm)
        if self._block:
            # Before its first step an optimizer from before the block is not known, and backward seemed to be the step.
            tracer.at(step=step)
            return safe
        self._microscope.name_tensors()
        return False

    def step_ended(self, by_hand: bool, steps: StepCounter) -> None:
        tracer = self._microscope.tracer if self.on else None
        if tracer is None:
            return
        tracer.update_ended()
        if not self._block:
            # Without an optimizer object, this is where the program updates its weights.
            tracer.at(region="update" if by_hand else "between")
        tracer.forget_healthy()
        tracer.at(step=steps.current)
        if self._block:
            return
        if steps.updates in self.lines_in:
            self._microscope.watch_lines()
        if self._from_update is None or steps.updates >= self._from_update:
            tracer.start()
            tracer.follow()
            tracer.at(marks=bool(self._from_update))  # A requested step may be replayed, to compare.
        else:
            tracer.stop()
