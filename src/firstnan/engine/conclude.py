"""Turns a finished trace into a Report: blame, a search in the Dataset, causes, notes."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isinf, prod
from time import time
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from firstnan.diagnose.blame import Verdict, blame
from firstnan.diagnose.rules import divergence, explain, received, transient
from firstnan.diagnose.rules.data import wrapped_integers
from firstnan.engine import isolation
from firstnan.engine.data_origin import bad_rows, find_maker, made_by
from firstnan.engine.handouts import Handouts
from firstnan.engine.ranks import world
from firstnan.engine.rates import with_rate_sites
from firstnan.engine.samples.cut import Cut, CutError, Maker
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm
from firstnan.observe.collectives import collectives
from firstnan.observe.compiler import was_used
from firstnan.observe.line_watch import LineWatch
from firstnan.observe.sites import Ownership, Spot, names_read_on, resolve
from firstnan.records import Batch, History, NaNEvent, Noticed, OpEvent, Origin, Report, Role, Site, StepRecord, Trace
from firstnan.records.operator_families import LINEAR, LOSSES
from firstnan.records.words import came_with_numbers
from firstnan.repair import propose
from firstnan.tensors.finite import histogram, is_finite, stat, tensors_in
from firstnan.tensors.models import Models
from firstnan.tensors.state import sample_count
from firstnan.tracing.examine import MOST_ROWS
from firstnan.tracing.other_threads import OtherThreads
from firstnan.tracing.recording import Difference
from firstnan.tracing.tracer import Tracer

BAD_DATA = ("nan_input", "nan_label")
DIVERGENCE = ("divergence_lr", "exploding_gradient")
UNKNOWN = "no sample is known to be responsible"
DIVERGED = f"{UNKNOWN}: training diverged"
_TELLING = re.compile(r"\b(nans?|infs?|infinit[ey]|(non-?|not )finite|gradients?|overflow)\b", re.IGNORECASE)
FIRST = "training had diverged before this step: these samples are only the first to exceed the limit"
_FROM_ELSEWHERE = (
    "the value was computed where operators are not recorded: in a thread that was running already, in code that is "
    "not Python, or before the step"
)
AS_IT_RAN = "every operator was traced as it ran"
"""How a trace was made if nothing was replayed."""


@dataclass(frozen=True)
class Evidence:
    """Everything known when something non-finite was noticed."""

    gate: Gate
    handouts: Handouts
    models: Models
    ownership: Ownership
    noticed: Noticed
    tensors: list[Tensor]
    entry: Spot | None = None
    """Where the program gets its batches."""
    known: History | None = None
    """The steps before, where the gate has seen others since."""
    lines: LineWatch | None = None
    """The lines of the program before its first step, where they were watched."""
    data: Sequence[tuple[str, Tensor]] = ()
    """The data of the step, by its names."""
    threads: OtherThreads | None = None
    """What other threads have made, where that was noted."""

    @property
    def is_updated(self) -> bool:
        """Whether the update of the step was made: the next step has begun."""
        return self.noticed.what in ("parameter", "state", "buffer")

    @property
    def step(self) -> int:
        return self.gate.steps.latest if self.is_updated else self.gate.steps.current

    def preliminary(self, *, brief: bool = False) -> Report:
        """The report before anything was traced; `brief`: without the steps before."""
        return Report(
            "nonfinite",
            self.step,
            self.batch(None, Trace()),
            noticed=self._named(),
            notes=self._skips(),
            history=History() if brief else self.known or self.gate.past(self.ownership, updated=self.is_updated),
            environment=environment(),
        )

    def conclude(self, tracer: Tracer, events: list[int], how: str) -> Report | None:
        """The report, or None if every non-finite value was intended."""
        starts = events + [e for t in self.tensors if (e := tracer.last_bad(t)) is not None]
        trace = tracer.trace(self.models.parts())
        finite = self.noticed.what not in ("loss", "output", "value")
        verdict = blame(trace, dict.fromkeys(starts), loss_is_finite=finite)
        if self.noticed.what == "output" and (verdict.origin is None or verdict.innocent):
            return None
        if verdict.origin is None:
            verdict = replace(verdict, origin=self._untraced())
        elif self.threads is None and is_from_elsewhere(verdict.origin, tracer):
            return self._not_recorded(verdict.origin, how)
        seen, steps = verdict.origin, trace
        verdict, trace = self._look_into_dataset(verdict, trace)
        verdict = self._look_at_threads(self._look_at_lines(verdict), tracer)
        origin = self._as_stored(self._at_the_loop(verdict.origin))
        notes = [*self._skips()]
        if tracer.trouble:
            notes.append(f"not every operator could be recorded ({tracer.trouble})")
        batch, step = None, self._step_of(origin, tracer.step, replayed=how != AS_IT_RAN)
        try:
            made = origin.produced if origin is not None else None
            batch = self.batch(origin, trace, tracer.modules.size_with(made.shape[0] if made and made.shape else None))
            # That is the batch of the step that noticed it; a scaler's first skipped step is not the one at hand.
            if step != self.step and self.handouts.latest is not None and self.gate.skipping_since is None:
                batch = self.handouts.batch_after(step) if self.gate.optimizers == 1 else None
            elif self._is_of_validation(origin, trace):
                batch = None
        except Exception as error:  # a problem with the batch must not cost more than the information about its samples
            notes.append(f"the samples of the batch could not be examined ({type(error).__name__}: {error})")
        report = replace(
            self.preliminary(),
            step=step,
            batch=batch,
            origin=origin,
            path=verdict.path,
            reproduced="not_replayed" if how == AS_IT_RAN else "deterministic",
            replay=how,
            notes=tuple(notes),
        )
        if origin is None:
            return report
        report = replace(report, history=self._with_rate_sites(report.history))
        causes = explain(origin, trace, report.history)
        if causes[0].slug in BAD_DATA and seen is not None and infinite_number(seen) is None:
            # Whether it is an input or a target depends on where the step reads it, not on the Dataset.
            found = explain(self._named_as(origin, self._in_batch(seen)), steps, report.history)
            causes = [c for c in found if c.slug in BAD_DATA] or causes
            causes[0] = replace(causes[0], why=causes[0].why + wrapped_integers(origin))
        remedies = propose(origin, trace, report.history, causes)
        report = without_guesses(replace(report, cause=causes[0]))
        return replace(report, cause=causes[0], other_causes=tuple(causes[1:4]), remedies=remedies)

    @staticmethod
    def _named_as(made: Origin, seen: Origin) -> Origin:
        """Bad data with the name of the variable in which it was made, if that is all of it."""
        whole = made.produced is not None and seen.produced is not None and made.produced.shape == seen.produced.shape
        return replace(seen, label=made.label) if whole and not seen.label else seen

    def _in_batch(self, seen: Origin) -> Origin:
        """Bad data as it is in the batch: what has made it may have seen one sample, or a layer a view of it."""
        blamed, event = self.handouts.blamed, seen.event
        if blamed is None or event is None or (event.region not in ("setup", "data") and seen.role != "input"):
            return seen
        bad = [(label, t) for label, t in tensors_in(blamed.batch, "batch") if not is_finite(t)]
        found = [(label, t) for label, t in bad if label == seen.label or len(bad) == 1]
        return replace(seen, label=found[0][0], produced=stat(*found[0])) if found else seen

    def _not_recorded(self, origin: Origin, how: str) -> Report:
        """The report of a value that was computed, but not by an operator that was recorded: its cause is unknown."""
        site = origin.site
        read = f"; `{site.code}` ({os.path.basename(site.file)}:{site.line}) reads it first" if site is not None else ""
        return replace(
            self.preliminary(),
            reproduced="not_replayed" if how == AS_IT_RAN else "deterministic",
            replay=how,
            notes=(*self._skips(), _FROM_ELSEWHERE + read),
        )

    def _skips(self) -> tuple[str, ...]:
        """What a gradient scaler did about it until now."""
        gate = self.gate
        if gate.skipping_since is None or self.noticed.what != "gradient":
            return ()
        text = f"the gradient scaler has skipped every update since step {gate.skipping_since}"
        return (f"{text}; its scale is {gate.scale:g}, and the gradients are non-finite without it too",)

    def _with_rate_sites(self, history: History) -> History:
        try:
            return with_rate_sites(history, self.gate.with_history(updated=self.is_updated), self.ownership)
        except Exception:  # an object of the program that does not like to be looked at, or another source than was run
            return history

    def _step_of(self, origin: Origin | None, under_way: int, *, replayed: bool) -> int:
        """The step of the origin; `under_way` is the number under which the latest operators were recorded.

        With several optimizers it was a guess, and now it is known whose step it is.
        """
        event = origin.event if origin is not None else None
        if self.gate.skipping_since is not None and self.noticed.what == "gradient":
            return self.gate.skipping_since
        if origin is None or event is None or event.region in ("setup", "data"):
            return self.step
        # What the program writes into its weights after an update still belongs to that update's step.
        afterwards = event.region == "between" and origin.phase == "parameter" and not event.uninitialized
        # Weights that are lost when the gradients of a step are computed: what led to it was before that step.
        lost = self.noticed.what == "parameter" and origin.step == under_way and not replayed
        by_hand = event.region == "update" and (origin.phase in ("parameter", "optimizer") or lost)
        known = not replayed or not self.is_updated
        if known and origin.step == under_way and not (afterwards or by_hand) and self.gate.optimizers > 1:
            return self.step
        return max(origin.step - (afterwards or by_hand), 0)

    def _is_of_validation(self, origin: Origin | None, trace: Trace) -> bool:
        """Whether bad data was not read by the training step: its batch is finite."""
        if origin is None or origin.event is None or not trace.is_read_outside_training(origin.event):
            return False
        blamed = self.handouts.blamed
        return blamed is not None and all(is_finite(t) for _, t in tensors_in(blamed.batch))

    def _at_the_loop(self, origin: Origin | None) -> Origin | None:
        """Bad data enters where the program gets its batch, not where the first operator reads it."""
        if origin is None or origin.event is None or origin.role != "input" or self.entry is None:
            return origin
        if origin.event.region in ("setup", "data"):
            return origin
        return replace(origin, site=resolve(self.entry), module="", module_type="")

    def _as_stored(self, origin: Origin | None) -> Origin | None:
        """A bad weight in its own shape: a layer may read a view, such as the transposed weight of a Linear."""
        read = origin.produced if origin is not None and came_from_outside(origin) else None
        if origin is None or read is None or origin.role not in ("parameter", "buffer"):
            return origin
        kept = self.models.parameters if origin.role == "parameter" else self.models.buffers
        found = [t for t, name in kept.values() if name == origin.label]
        own = replace(stat(origin.label, found[0]), histogram=read.histogram) if len(found) == 1 else read
        if (own.shape, own.first_index) == (read.shape, read.first_index) or (own.nan, own.inf) != (read.nan, read.inf):
            return origin  # it was read as it is, or in part, or has changed since
        return replace(origin, inputs=(own,), produced=own)

    def _look_into_dataset(self, verdict: Verdict, trace: Trace) -> tuple[Verdict, Trace]:
        """For bad data from a Dataset: the line in the Dataset that creates it, if it is created again."""
        origin, handout = verdict.origin, self.handouts.blamed
        if origin is None or origin.phase != "input" or handout is None:
            return verdict, trace
        if not came_from_outside(origin) and not _passes_on(origin, handout.batch):
            return verdict, trace
        found = find_maker(self.handouts.fetched_by(handout), handout, self.ownership)
        if found is None:
            return verdict, trace
        arrived = replace(origin.produced, name=origin.label) if origin.produced else None
        read_at = self._entry_site() or origin.site
        return replace(verdict, origin=replace(found[0], arrived=arrived, read_at=read_at)), found[1]

    def _entry_site(self) -> Site | None:
        return resolve(self.entry) if self.entry is not None else None

    def _look_at_lines(self, verdict: Verdict) -> Verdict:
        """For numbers that came into torch from Python or numpy: the line that made them, if lines were watched."""
        origin = verdict.origin
        if origin is None or origin.site is None or self.lines is None:
            return verdict
        if infinite_number(origin) is not None:
            return replace(verdict, origin=self._number_made_by(origin, origin.site, self.lines))
        if "lift_fresh" not in origin.aten:
            return verdict
        line = self.lines.source_of(origin.site.file, origin.site.line)
        blamed = self.handouts.blamed
        if line is None:  # it went through a library, as rows of a table do, or was read in a later step only
            held = self._held() if blamed is None else tensors_in(blamed.batch)
            line = self.lines.source_in(t for _, t in held)
        if line is None:
            return verdict
        made, arrived = made_by(line), replace(origin.produced, name=origin.label) if origin.produced else None
        if made.site is None or (made.site.file, made.site.line) == (origin.site.file, origin.site.line):
            return verdict
        read_at = origin.read_at or origin.site
        return replace(verdict, origin=replace(made, arrived=arrived, read_at=read_at, step=origin.step))

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """The non-finite data in the variables of the functions that run."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if self.ownership.owns(frame.f_code):
                found = (pair for v in list(frame.f_locals.values()) for pair in tensors_in(v, depth=2))
                yield from ((name, t) for name, t in found if not t.requires_grad and not is_finite(t))
            frame = frame.f_back

    def _look_at_threads(self, verdict: Verdict, tracer: Tracer) -> Verdict:
        """For a tensor that was made in another thread: the line there."""
        origin = verdict.origin
        if origin is None or origin.event is None or origin.role != "unknown" or self.threads is None:
            return verdict
        self.threads.end()
        spot = self.threads.maker_of_read(tracer, origin.event.index)
        if spot is None:
            return verdict
        made = replace(origin, site=resolve(spot), read_at=origin.site, module="", module_type="")
        return replace(verdict, origin=made)

    def _number_made_by(self, origin: Origin, site: Site, lines: LineWatch) -> Origin:
        """For an infinite number that the program keeps in a variable or attribute: the line that assigns it."""
        names, number = names_read_on(site), infinite_number(origin)
        found = [one for one in lines.lines if one.name in names and one.is_number and float(one.value) == number]
        if not found or found[0].is_literal or len({one.spot for one in found}) > 1:
            return origin
        return replace(made_by(found[0]), role=None, read_at=site, step=origin.step)

    def _untraced(self) -> Origin | None:
        """The origin of a value that was bad before anything was traced: a weight, or external data."""
        if not self.tensors:
            return None
        name = self._named().name
        s = replace(stat(name or self.noticed.what, self.tensors[0]), histogram=histogram(self.tensors[0]))
        if self.is_updated and self.noticed.what != "buffer":
            role: Role = "state" if self.noticed.what == "state" else "parameter"
            return Origin("parameter", "", "", inputs=(s,), produced=s, role=role, label=name)
        return Origin("input", "", "", inputs=(s,), produced=s, role="unknown", label=name)

    def _named(self) -> Noticed:
        if self.noticed.name:
            return self.noticed
        names = [n for t in self.tensors if (n := self.models.name(t))]
        return Noticed(self.noticed.what, names[0] if names else "")

    def batch(self, origin: Origin | None, trace: Trace, given: int | None = None) -> Batch | None:
        """The failing batch; without a loader only the number of samples the model was `given` is known."""
        latest = self.handouts.blamed
        batch, index = (latest.batch, latest.index) if latest is not None else (None, None)
        size = sample_count(batch, latest.indices) if latest is not None else given
        if latest is None and size is not None and not _are_averaged(size, trace):
            return None
        if size is not None:
            rows = _bad_samples(origin, trace, batch, size) if origin else None
            return self._in_dataset(Batch(index, size, rows, unit=unit_of(self.data, size)))
        size = _averaged(trace)
        rows = _bad_samples(origin, trace, None, size) if origin is not None and size is not None else None
        # These are probably samples, but not certainly, so only a few rows are reported; 64 is as many as are kept.
        few = rows is not None and size is not None and 0 < len(rows) < min(size, 16)
        return Batch(None, size, rows, unit=unit_of(self.data, size or 0)) if few else None

    def _in_dataset(self, batch: Batch) -> Batch:
        """The batch with the dataset indices of its bad samples; a child may fetch samples again for that."""
        latest = self.handouts.blamed
        iterator = self.handouts.fetched_by(latest) if latest is not None else None
        if latest is None or iterator is None or not batch.bad_samples or len(self.handouts.of_this_step()) > 1:
            return batch  # with several loaders, these rows may be those of another one
        maker = Maker.of(iterator)
        told = maker.located(batch, latest.indices)
        if told is not batch or batch.size is None or not isolation.is_child():
            return told
        try:
            found = maker.in_dataset(batch.bad_samples, Cut(latest.batch, batch.size), latest.indices)
        except CutError:
            return batch
        return maker.with_elements(replace(batch, dataset_indices=found)) if found else batch


def is_from_elsewhere(origin: Origin, tracer: Tracer) -> bool:
    """Whether the value at the origin is the result of operators that were not recorded."""
    event = origin.event
    return (
        origin.phase == "input"
        and origin.role == "unknown"
        and event is not None
        and tracer.reads_from_elsewhere(event.index)
    )


def without_guesses(report: Report) -> Report:
    """Training that diverges, or a gradient that overflows, fails with any sample: only confirmed ones are named.

    So it is where rows of several ranks are mixed.
    """
    batch, cause = report.batch, report.cause
    if batch is not None and batch.bad_samples and not batch.confirmed and collectives.moves_rows:
        return replace(report, batch=Batch(batch.index, batch.size, None, replays=batch.replays, unit=batch.unit))
    if batch is None or not batch.bad_samples or cause is None or cause.slug not in DIVERGENCE:
        return report
    if batch.confirmed:
        return replace(report, batch=replace(batch, note=FIRST)) if cause.slug == "divergence_lr" else report
    note = DIVERGED if cause.slug == "divergence_lr" else UNKNOWN
    kept = Batch(batch.index, batch.size, None, replays=batch.replays, note=note, unit=batch.unit)
    return replace(report, batch=kept)


def came_from_another_rank(report: Report) -> Report:
    """The report of a step that was finite when this rank computed it alone."""
    here = world()
    how = "the step was replayed without the other ranks, and was finite"
    return replace(report, cause=received(here.rank, here.size), replay=how)


def not_repeated(report: Report, difference: Difference | None = None) -> Report:
    """The report of a step that failed once and was finite another time, from the same state."""
    how = "The step was finite when replayed with the same batch, random numbers, buffers and weights"
    how += ", but without the compiler" if was_used() else ""
    own = difference.whose == "program" if difference is not None else None
    found = transient(how, difference.text if difference else "", programs_own=own)
    known = [c for c in (report.cause, *report.other_causes) if c is not None and c.slug != found.slug]
    # A difference in the program, or unwritten memory, explains both results; hardware nondeterminism does not.
    first = bool(known) and (bool(own) or known[0].slug == "uninitialized_memory")
    causes = [known[0], found, *known[1:]] if first else [found, *known]
    notes = (f"the step was finite when replayed; {found.evidence[0]}",) if first and difference is not None else ()
    return replace(
        report, reproduced="transient", cause=causes[0], other_causes=tuple(causes[1:]), notes=report.notes + notes
    )


def _bad_samples(origin: Origin, trace: Trace, batch: Any, size: int) -> tuple[int, ...] | None:
    """The samples that the origin points to; none if it points to most of them, since then no sample is to blame."""
    rows: tuple[int, ...] = ()
    if origin.phase in ("parameter", "optimizer"):
        return None  # rows of a weight are not samples
    if origin.event is not None and any(e.op in _COUNTS for e in trace.feeding(origin.event, 4)):
        return None  # nor are classes
    if batch is not None and origin.event is not None and not _reads_batch(origin.event, trace):
        return None
    if size == 1 and origin.phase in ("forward", "backward"):
        return (0,)
    if origin.phase == "input" and batch is not None:
        rows = bad_rows(batch, size)
    elif origin.event is not None and origin.produced is not None and origin.produced.shape[:1] == (size,):
        rows = origin.event.bad_rows
    elif origin.event is not None and origin.phase in ("forward", "input"):
        rows = _rows_after(origin.event, trace, size)
    if len(rows) == MOST_ROWS < size and origin.phase != "input":
        return None  # the list may go on: the trace keeps only the first of them
    return rows if 0 < len(rows) <= max(1, size // 2) else None


def rows_at(origin: Origin, size: int) -> tuple[int, ...]:
    """The bad rows at the origin if it has one for each sample and few are bad, whatever they depend on."""
    event = origin.event
    rows = event.bad_rows if event is not None and any(o.bad and o.shape[:1] == (size,) for o in event.outputs) else ()
    return rows if len(rows) <= size // 2 else ()


def _reads_batch(event: OpEvent, trace: Trace) -> bool:
    """Whether the event depends on the batch, other than by weights; also if the trace shows nobody who reads it."""
    if event.region != "step":
        return True
    seen, stack = {event.index}, [event]
    while stack:
        at = stack.pop()
        if at.role == "input":
            return True
        before = {at.forward}
        for operand in at.inputs:
            if operand.role == "input":
                return True
            if operand.role not in _LEARNED:
                before |= {operand.producer, *operand.also}
        new = {i for i in before if i is not None} - seen
        seen |= new
        stack += [trace.events[i] for i in new]
    return not any(operand.role == "input" for e in trace.events for operand in e.inputs)


_COUNTS = ("bincount", "histc")
"""What has a row for each class or range of numbers."""
_LEARNED = ("parameter", "buffer", "state")


def _are_averaged(size: int, trace: Trace) -> bool:
    """Whether the rows a model was called with may be samples: some loss is computed from that many numbers, or more.

    A model that is called with one row may be called once per sample; then the loss is computed from more numbers.
    """
    losses = [e for e in trace.events if e.phase == "forward" and e.grad and e.outputs and not e.outputs[0].shape]
    numbers = [prod(i.stat.shape) for e in losses for i in e.inputs[:1] if i.stat is not None and i.stat.shape]
    if size <= 1:
        return size == 1 and set(numbers) == {1}
    return not numbers or any(n % size == 0 for n in numbers)


def _averaged(trace: Trace) -> int | None:
    """The number of samples if no model was called with them: the rows of the tensor that the loss was reduced from."""
    for event in reversed(trace.events):
        read = event.inputs[0].stat if event.inputs and event.op in ("mean", "sum") else None
        if (
            event.phase == "forward"
            and event.grad
            and not event.module_type  # a model's own mean is over anything, as the nodes of a graph
            and read is not None
            and len(read.shape)
            and not event.outputs[0].shape
        ):
            return None if _is_prediction(event, trace) else read.shape[0]
    return None


def _is_prediction(total: OpEvent, trace: Trace) -> bool:
    """Whether a loss compares this sum with a target: then it is one sample's, as the energy of all pairs of atoms."""
    near, differences = {total.index}, set[int]()
    for event in (e for e in trace.events[total.index + 1 :] if e.phase == "forward" and e.grad):
        read = {i.producer for i in event.inputs}
        if (event.op in LOSSES and read & near) or (event.op not in LINEAR | {"ones_like"} and read & differences):
            return True
        if read & differences or (event.op in ("sub", "rsub") and read & near):
            differences.add(event.index)
        elif read & near:
            near.add(event.index)
    return False


def _rows_after(event: OpEvent, trace: Trace, size: int) -> tuple[int, ...]:
    """The bad rows of the first tensor on the path that has one row per sample."""
    reached = {event.index}
    for later in trace.events[event.index + 1 :]:
        if any(i.guilty and not reached.isdisjoint((i.producer, *i.also)) for i in later.inputs):
            reached.add(later.index)
            if later.phase == "forward" and any(o.bad and o.shape[:1] == (size,) for o in later.outputs):
                return later.bad_rows
    return ()


def came_from_outside(origin: Origin) -> bool:
    """Whether the trace only shows that the value was bad, not what created it."""
    if origin.phase not in ("input", "parameter"):
        return False
    event = origin.event
    if event is None:
        return origin.site is None
    return not (event.born or event.on_purpose or event.uninitialized)


def _passes_on(origin: Origin, batch: Any) -> bool:
    """Whether numbers that came back into torch are bad in the rows in which the batch was: numpy passed them on."""
    made, event = origin.produced, origin.event
    if made is None or event is None or not made.shape or not came_with_numbers(origin):
        return False
    return bool(event.bad_rows) and event.bad_rows == bad_rows(batch, made.shape[0])


def infinite_number(origin: Origin) -> float | None:
    """The infinite number, not a tensor, that the operator was given by chance."""
    event = origin.event
    if event is None or event.on_purpose or origin.phase != "forward" or origin.op not in ("mul", "div"):
        return None
    return next((v for _, v in event.scalars if isinstance(v, float) and isinf(v)), None)


def environment() -> dict[str, Any]:
    runner = {"runner": "pytest"} if "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ else {}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "platform": platform.platform()}
    return {**versions, **runner}


def bad_values(error: BaseException) -> list[Tensor]:
    """NaN tensors (and infinite ones that are part of a graph) in the frames of the exception's traceback."""
    found: list[Tensor] = []
    at = error.__traceback__
    while at is not None and len(found) < 32:
        frame = at.tb_frame
        # In a notebook a cell has the variables of all others; only those that it uses can be the reason.
        used = frame.f_code.co_names if frame.f_locals is frame.f_globals else frame.f_locals
        for value in [frame.f_locals[name] for name in list(used) if name in frame.f_locals]:
            if not isinstance(value, torch.nn.Module):
                found += [t for _, t in tensors_in(value, depth=2) if _is_bad(t)]
        at = at.tb_next
    return found


def tells_of_numbers(error: BaseException) -> bool:
    """Whether an exception says that a number is not finite, as the program's own check of its gradients does."""
    return isinstance(error, ArithmeticError) or _TELLING.search(str(error)) is not None


def is_of_anomaly_mode(error: BaseException | None) -> bool:
    """Whether torch's own anomaly mode has raised this, for a derivative that is NaN."""
    return isinstance(error, RuntimeError) and "returned nan values in its" in str(error)


def is_numeric(error: Exception, known: Sequence[Tensor] = ()) -> bool:
    """Whether a step that raised this failed because of its numbers; not those that were `known` before."""
    numbers = isinstance(error, ArithmeticError) or "LinAlgError" in type(error).__name__ or is_of_anomaly_mode(error)
    return numbers or any(all(t is not one for one in known) for t in bad_values(error))


def _is_bad(t: Tensor) -> bool:
    if is_finite(t):
        return False
    return bool(torch.isnan(t).any()) or (t.requires_grad and t.numel() == 1)


def diverged(alarm: Alarm, history: History, last: StepRecord) -> Report:
    """The report of a training that diverged and stayed finite: the steps around the explosion, and the `last` one."""
    assert alarm.since is not None
    site = history.made_at or history.stepped_at or history.rate_set_at
    origin = Origin("optimizer", "", "", site=site, step=alarm.since)
    cause = divergence(history, alarm.since, alarm.before, str(alarm.weights or ""), last)
    return Report(
        "diverged",
        alarm.since,
        origin=origin,
        cause=cause,
        remedies=propose(origin, Trace(), history, [cause]),
        noticed=Noticed("loss"),
        events=(event_of(alarm),),
        history=history,
        environment=environment(),
    )


def event_of(alarm: Alarm) -> NaNEvent:
    return NaNEvent("explosion", alarm.text, alarm.step, grad_norm=alarm.norm, time=time())


_GRAPH = re.compile(r"edge|adj|laplac|graph", re.IGNORECASE)
_TEXT = re.compile(r"(^|[^a-z])(input_ids|tokens?|texts?|chars?|words?|sentences?|documents?)([^a-z]|$)", re.IGNORECASE)


def unit_of(data: Iterable[tuple[str, Tensor]], size: int) -> str:
    """What the `size` rows are, by the names and shapes of the step's data."""
    for name, t in data:
        if _GRAPH.search(name) and t.dim() == 2 and _connects(t, size):
            return "node"
        if _TEXT.search(name) and not t.is_floating_point() and t.numel() == size:
            return "token"
    return "sample"


def _connects(t: Tensor, size: int) -> bool:
    """Whether this is a matrix between `size` nodes, or a list of edges between them."""
    if tuple(t.shape) == (size, size):
        return True
    pairs = 2 in t.shape and t.layout is torch.strided and not t.is_floating_point() and t.dtype != torch.bool
    return pairs and t.numel() > 0 and 0 <= int(t.min()) <= int(t.max()) < size
