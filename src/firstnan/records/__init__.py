"""The records that every room shares: frozen dataclasses of plain values, and where their JSON is not their fields."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from firstnan.records.codec import (
    FORMS,
    Form,
    ReportError,
    decode,
    decode_value,
    encode,
    encode_record,
    field_at,
    prepare,
)

Phase = Literal["forward", "backward", "optimizer", "input", "parameter"]
InFloat64 = Literal["finite", "nonfinite"]
Role = Literal["parameter", "buffer", "input", "constant", "gradient", "state", "unknown"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often the finite values of a tensor occur: `counts[i]` of them are from `edges[i]` to `edges[i + 1]`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    log: bool = False
    """The bins grow away from 0, since the values span many orders of magnitude."""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError("a histogram must have one edge more than counts")


@dataclass(frozen=True, slots=True)
class TensorStat:
    """Statistics of one tensor: `min`, `max` and `smallest` (the least magnitude) are over its finite elements."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    min: float | None = None
    max: float | None = None
    smallest: float | None = None
    zeros: int = 0
    negative: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    first_index: tuple[int, ...] | None = None
    """Where the first non-finite element is; None if there is none."""
    binary: bool = False
    """Every finite element is 0 or 1, as in a mask."""
    histogram: Histogram | None = None
    """Only of what the operator at the origin read."""

    @property
    def inf(self) -> int:
        return self.posinf + self.neginf

    @property
    def bad(self) -> int:
        return self.nan + self.posinf + self.neginf

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Site:
    """A place in source: lines count from 1, columns from 0 (in characters), `code` is the expression there."""

    file: str
    line: int
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    function: str = ""
    code: str = ""
    source: tuple[str, ...] = ()
    """The lines of the statement as they are in the file; the first is line `source_line`."""
    source_line: int | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """What one operator read: `producer` is the index of the event that wrote it, None if it came from outside."""

    name: str
    stat: TensorStat | None = None
    """Full statistics if the event is non-finite; only `min` and `max`, or nothing, if it is healthy."""
    producer: int | None = None
    role: Role | None = None
    """What a tensor from outside the trace is."""
    label: str = ""
    """Its readable name: `encoder.0.weight`, `batch[1]`."""
    guilty: bool = False
    """The operator passed on (some of) its non-finite elements."""
    also: tuple[int, ...] = ()
    """If guilty: earlier events that left other non-finite elements in the same memory; `producer` is the last."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One operator call."""

    index: int
    op: str
    """The familiar name: `log`, `softmax`, `linear`; the name in aten is `aten`."""
    aten: str
    phase: Literal["forward", "backward", "optimizer"]
    step: int
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[TensorStat, ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()
    """Arguments other than tensors, by name: numbers, dims, flags."""
    site: Site | None = None
    library_site: Site | None = None
    """The innermost frame, if that is not the user's code."""
    module: str = ""
    module_type: str = ""
    node: str | None = None
    """Backward: the autograd node that ran, `LogBackward0`."""
    forward: int | None = None
    """Backward: index of the forward event whose node this is, if that was traced."""
    born: int = 0
    """Non-finite elements created here: everything they were computed from was finite."""
    nan_from_inf: int = 0
    """NaN elements created here from an infinity (inf - inf, 0 * inf, inf / inf)."""
    on_purpose: bool = False
    """A constant infinity or NaN that the program asked for: `full(-inf)`, `masked_fill(mask, -inf)`."""
    uninitialized: bool = False
    """The memory was never written (`torch.empty`)."""
    witness: tuple[tuple[str, float], ...] = ()
    """The values that the operator read and wrote at the first bad element, if their shapes match."""
    witness_index: tuple[int, ...] | None = None
    """Where that element is: of those created here, not of those that were bad before."""
    bad_rows: tuple[int, ...] = ()
    """Indices along the first dimension of the elements created here (at most 64)."""
    raised: str | None = None
    """The operator raised this instead of returning."""
    in_python_backward: bool = False
    """Ran inside the `backward` of a user's `autograd.Function` (or a tensor hook)."""
    region: Literal["setup", "data", "step", "body", "between", "update"] = "step"
    """Before the first step, while a batch was fetched, inside a step, inside a loop's body that makes its own data,
    between an update and the next step, or (without an optimizer object) after backward, where the program updates its
    weights itself."""
    role: Role | None = None
    """What the written memory is, if the program gave it a role: a parameter, a batch..."""
    label: str = ""
    grad: bool = False
    """Recorded by autograd: the result takes part in training."""
    in_float64: InFloat64 | None = None
    """What the same call returns in float64, if it created bad elements; finite: only the type was too narrow."""

    @property
    def bad(self) -> int:
        return sum(o.bad for o in self.outputs)

    @property
    def edits_weight(self) -> str:
        """The name of the parameter that the program itself, not an optimizer, reads and writes here; or empty."""
        mine = self.role == "parameter" and self.phase == "forward" and not self.grad
        read = any(i.role == "parameter" and i.label == self.label for i in self.inputs)
        return self.label if mine and read else ""


@dataclass(frozen=True, slots=True)
class Trace:
    """The operators of one step (or two) in order; `events[i].index == i`."""

    events: Sequence[OpEvent] = ()

    def producers(self, event: OpEvent) -> list[OpEvent]:
        """The events that wrote what this one read, in the order of its inputs."""
        return [self.events[i.producer] for i in event.inputs if i.producer is not None]

    def feeding(self, event: OpEvent, depth: int = 8) -> list[OpEvent]:
        """The events up to `depth` operators before this one, nearest first, each once."""
        seen, wave, out = {event.index}, [event], []
        for _ in range(depth):
            wave = [p for e in wave for p in self.producers(e)]
            wave = list({p.index: p for p in wave if p.index not in seen}.values())
            seen.update(p.index for p in wave)
            out += wave
        return out

    def is_read_outside_training(self, event: OpEvent) -> bool:
        """Whether bad data of this event, or what was made of it, is first read between two steps, or by a layer that
        computes without gradients: probably by a validation."""
        carriers, events = {event.index}, self.events[event.index + 1 :]
        for other in events if event.region in ("setup", "data") else ():
            if any(i.guilty and i.producer in carriers for i in other.inputs):
                if other.region not in ("setup", "data"):
                    return other.region == "between" or (bool(other.module_type) and not other.grad)
                carriers.add(other.index)
        return False


_LAST_NODE = "torch::autograd::AccumulateGrad"
"""Writes a gradient, and calls the hooks that get it."""
_WRAPPERS = ("torch/_compile.py", "torch/_tensor.py", "torch/_ops.py", "torch/utils/_contextlib.py")
"""Library files that only wrap what the user called."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """Where it was seen first: `what` is loss, gradient, parameter, state, buffer, output, value or exception."""

    what: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the gate knows about one healthy step."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    param_norm: float | None = None
    update_ratio: float | None = None
    """The norm of the update divided by that of the weights; measured now and then."""
    scale: float | None = None
    """That of a gradient scaler."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Several steps of long ago as one: means, and the last that is known of what changes slowly."""

    step: int
    """The first of them."""
    steps: int
    """How many they are."""
    loss: float | None = None
    loss_max: float | None = None
    grad_norm: float | None = None
    grad_norm_max: float | None = None
    lr: float | None = None
    param_norm: float | None = None
    update_ratio: float | None = None
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The largest number of a layer in several steps of long ago, the first of which is `step`."""

    step: int
    steps: int
    max_abs: float


@dataclass(frozen=True, slots=True)
class LayerTrack:
    """The magnitudes of one layer over the last steps, oldest first: outputs (forward) or gradients (backward)."""

    layer: str
    phase: Literal["forward", "backward"]
    steps: tuple[int, ...] = ()
    norm: tuple[float, ...] = ()
    max_abs: tuple[float, ...] = ()
    dtype: str = ""
    share_steps: tuple[int, ...] = ()
    """The steps in which the shares of zeros and of subnormal numbers were measured."""
    zeros: tuple[float, ...] = ()
    subnormal: tuple[float, ...] = ()
    earlier: tuple[LayerSpan, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.norm) == len(self.max_abs):
            raise ValueError("steps, norm and max_abs must have the same length")
        if not len(self.share_steps) == len(self.zeros) == len(self.subnormal):
            raise ValueError("share_steps, zeros and subnormal must have the same length")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Something that moves towards where it is no longer finite, as it looked in one step."""

    what: Literal["loss", "gradient", "layer", "scale", "weights", "operator", "variance", "attention"]
    name: str
    """The layer; the operator and its place; for others, what the program calls the optimizer."""
    kind: str
    """The dtype that ends at the limit; else "scale", "growth", "jump", "updates", "rate", "min", "max", "entropy" or
    "eps". For "rate" the limit is the lowest loss."""
    limit: float
    now: float
    in_steps: int | None
    """How many steps after `since_step` the limit is reached, between `low` and `high`; None if that is not known."""
    low: int | None
    high: int | None
    since_step: int
    withdrawn: int | None = None
    """The step in which it had turned."""


@dataclass(frozen=True, slots=True)
class Headroom:
    """The nearest that an operator came to where its result is no longer finite, in the steps that were sampled."""

    op: str
    file: str
    line: int
    code: str
    argument: Literal["min", "max"]
    """Whether the value is the smallest or the largest that was read."""
    value: float
    step: int
    limit: float


@dataclass(frozen=True, slots=True)
class OptimizerHistory:
    """The last steps of one optimizer, oldest first."""

    steps: tuple[StepRecord, ...] = ()
    optimizer: str = ""
    """Its class; empty if the program updates its weights by hand."""
    settings: tuple[tuple[str, Any], ...] = ()
    """The settings of the optimizer's first group: lr, eps, betas, momentum."""
    made_at: Site | None = None
    """Where the program creates this optimizer, calls its step, and calls backward."""
    stepped_at: Site | None = None
    backward_at: Site | None = None
    rate_set_at: Site | None = None
    """Where the program sets the learning rate that was in use: an assignment, a schedule, an update by hand."""
    name: str = ""
    """What the program calls the optimizer: `opt_d`; empty if that is not known."""
    earlier: tuple[StepSpan, ...] = ()
    """The steps before these, oldest first; the older, the more of them in one entry."""
    first_step: int = 0
    """The number of its first step: not 0 if others made steps before it was created, such as in an earlier phase."""


@dataclass(frozen=True, slots=True)
class History(OptimizerHistory):
    """The last steps before the failure, of the optimizer whose step failed; the failing one is last if it is known."""

    layers: tuple[LayerTrack, ...] = ()
    """If statistics were kept: the layers that grew most, in the order in which they began to grow."""
    others: tuple[OptimizerHistory, ...] = ()
    """Those of the program's other optimizers, each with its own steps."""

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0].step} to {self.steps[-1].step}" if self.steps else "no steps"
        return f"<History: {steps}{f' of {self.optimizer}' if self.optimizer else ''}>"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the first bad value was created, as the report describes it."""

    phase: Phase
    op: str
    aten: str
    event: OpEvent | None = None
    """The event itself (for a backward origin the backward one)."""
    forward_event: OpEvent | None = None
    """For a backward origin: the forward operator whose derivative it is."""
    site: Site | None = None
    module: str = ""
    module_type: str = ""
    inputs: tuple[TensorStat, ...] = ()
    produced: TensorStat | None = None
    role: Role | None = None
    label: str = ""
    """Phases input and parameter: which tensor it is."""
    arrived: TensorStat | None = None
    """Phase input, created inside a Dataset: that part of the batch as it reached the step; its name is the label."""
    step: int = 0
    read_at: Site | None = None
    """If it was created before the step: where the step reads it first."""

    def __repr__(self) -> str:
        from firstnan.records.words import place

        what = " ".join(filter(None, (self.phase, self.op or self.label)))
        return f"<Origin: {what}{f', at {place(self.site)}' if self.site else ''}>"

    @property
    def edits_gradient(self) -> bool:
        """Whether the program computed with gradients itself, after backward and before the update."""
        return self.phase == "backward" and self.role == "gradient"

    @property
    def came_back(self) -> TensorStat | None:
        """Phase backward: what the operator made in the forward pass, if another one's derivative read it."""
        event, forward = self.event, self.forward_event
        if event is None or forward is None or event.forward in (None, forward.index):
            return None
        return next((o for o in forward.outputs if o.bad), None)

    @property
    def gradient_hook(self) -> str:
        """The function of a library, such as a communication hook, that was given the finished gradients; or empty."""
        last = self.phase == "backward" and self.event is not None and self.event.node == _LAST_NODE
        return self.library_site.function if last and self.library_site is not None else ""

    @property
    def library_site(self) -> Site | None:
        """The library code that the user's line called; for a derivative, that of the forward line."""
        event = self.event
        if self.phase == "backward" and not self.edits_gradient and not (event and event.in_python_backward):
            # Below a backward operator there is only the autograd engine, but below the last of all a hook may run.
            event = self.forward_event or (event if event and event.node == _LAST_NODE else None)
        if event is not None and self.read_at is not None and self.read_at == event.site:
            return None  # the event has only read it
        site = event.library_site if event else None
        return None if site is None or site.file.replace(os.sep, "/").endswith(_WRAPPERS) else site


@dataclass(frozen=True, slots=True)
class Cause:
    slug: str
    title: str
    why: str
    evidence: tuple[str, ...] = ()
    confidence: float = 0.5
    link: str | None = None
    """Its page in the documentation; None for a rule of the user's."""

    def __repr__(self) -> str:
        return f"<Cause {self.slug}: {self.title}>"


@dataclass(frozen=True, slots=True)
class Edit:
    """One replacement in a source file: `old` is the text between the two positions, `new` takes its place.

    Lines count from 1, columns from 0 and in characters. An insertion has an empty `old`, a deletion an empty `new`.
    Both texts end their lines with a newline character; the file keeps its own line ends and its encoding.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class LossRecord:
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change to the program that should help, and the result of trying it."""

    title: str
    diff: str = ""
    """Unified, against the user's files."""
    tried: bool = False
    failing_step_finite: bool | None = None
    steps_finite_after: int | None = None
    """How many steps after the failing one were finite; None if one of them was not."""
    why: str = ""
    """One sentence: how it changes the numbers."""
    kind: Literal["code", "setting", "data"] = "code"
    loss_change: float | None = None
    """The largest relative change of the loss in the healthy steps before the failing one."""
    note: str = ""
    """Why it was not tried, or how the trial failed."""
    edits: tuple[Edit, ...] = ()
    """What `diff` shows, as data; empty in reports of older versions."""
    up_to: Literal["", "loop", "program"] = ""
    """What the trial has reached the end of; "": it was ended before."""
    fails_in: int | None = None
    """The later step that is not finite with it."""
    losses: tuple[LossRecord, ...] = ()
    """The losses of the trial, at most 200 of them."""

    def __repr__(self) -> str:
        return f"<Remedy: {self.title}{' (proven)' if self.proven else ''}>"

    @property
    def proven(self) -> bool:
        """Tried, with the failing step and the steps after it finite."""
        return self.tried and bool(self.failing_step_finite) and self.steps_finite_after is not None


@dataclass(frozen=True, slots=True)
class PathStep:
    """One operator on the path from the origin to where the value was noticed."""

    op: str
    line: int | None
    file: str = ""
    code: str = ""
    module: str = ""
    phase: str = "forward"
    library: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """One unusual value of a bad sample, and the range of the other samples at the same position."""

    sample: int
    member: str
    """Which tensor of the batch: `batch[0]`."""
    index: tuple[int, ...] | None
    """Where in the sample; None if all its values are equal, and then `low` and `high` are over all positions."""
    value: float
    low: float
    high: float
    apart: int = 0
    """How many other samples have numbers so extreme that they are left out of the range."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A sample that looks like an image, reduced to at most 64 by 64 pixels."""

    width: int
    height: int
    channels: int
    """1: grey; 3: red, green and blue; 4: with opacity."""
    pixels: str
    """Row by row, one byte per channel, in base64; the least finite value of the batch is black, the largest white.

    Pixels that are not finite are red."""


@dataclass(frozen=True, slots=True)
class SampleValues:
    """What a bad sample holds in one tensor of the batch: its first numbers, and a picture of it if it is an image."""

    sample: int
    member: str
    shape: tuple[int, ...]
    values: tuple[float, ...] = ()
    preview: Preview | None = None


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a dataset that a loader reads through others: a subset, a split, a concatenation, a wrapper."""

    dataset: str
    """The class of the dataset that holds it."""
    index: int
    """Its index there."""
    part: str = ""
    """Which of several datasets of that class: `.datasets[1]`."""


@dataclass(frozen=True, slots=True)
class Batch:
    index: int | None = None
    size: int | None = None
    bad_samples: tuple[int, ...] | None = None
    """Positions in the batch; None if no single sample is responsible, or if that is unknown."""
    confirmed: bool = False
    """Replays showed that these samples fail without the others, and that the step is finite without them."""
    dataset_indices: tuple[int, ...] | None = None
    """Dataset indices of the bad samples, if the sampler gave them."""
    features: tuple[Feature, ...] = ()
    replays: int = 0
    """How many replays of the step it took to find them."""
    note: str = ""
    elements: tuple[Element, ...] = ()
    """Where the bad samples are stored, if not in the dataset of the loader itself."""
    unit: str = "sample"
    """What a row of this batch is: a sample, a node of a graph, a token of a text."""
    values: tuple[SampleValues, ...] = ()
    """What the first bad samples hold."""

    def __repr__(self) -> str:
        shown = ("index", "size", "bad_samples", "confirmed", "dataset_indices", "replays", "note")
        known = [(name, getattr(self, name)) for name in shown if getattr(self, name) not in (None, "")]
        return f"Batch({', '.join(f'{name}={value!r}' for name, value in known)})"


@dataclass(frozen=True, slots=True)
class LoopTurn:
    """One of the program's loops around the failing call, and how far it was."""

    file: str
    line: int
    variable: str
    """The variable that counts its turns: `epoch`."""
    value: int
    iteration: int | None = None
    """Which turn it was, counted from 0; None if it is not known where the variable began."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found; `verdict` is "nonfinite", "diverged" (the loss exploded, but is finite) or "clean"."""

    verdict: Literal["nonfinite", "diverged", "clean"]
    step: int | None = None
    batch: Batch | None = None
    origin: Origin | None = None
    cause: Cause | None = None
    other_causes: tuple[Cause, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    path: tuple[PathStep, ...] = ()
    noticed: Noticed | None = None
    reproduced: Literal["deterministic", "similar", "transient", "not_replayed"] = "not_replayed"
    """`similar`: a replay failed in the same place, but with other numbers than the step had."""
    replay: str = ""
    """How the trace was made, in words: "the failing batch was handed out again"."""
    events: tuple[NaNEvent, ...] = ()
    history: History = field(default_factory=History)
    rank: int = 0
    world_size: int = 1
    ranks: tuple[RankFinding, ...] = ()
    """What each rank has found, where several train together."""
    environment: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Limits of this report, in words."""
    capsule: str = ""
    """The file with the failing step, for `firstnan replay`."""
    loops: tuple[LoopTurn, ...] = ()
    """The loops that the step was made in, the outermost first, as far as they count."""
    forecast: tuple[Forecast, ...] = ()
    """What was expected to overflow, the first warning first."""
    headroom: tuple[Headroom, ...] = ()
    """The nearest misses of risky operators, the nearest first."""

    def __repr__(self) -> str:
        from firstnan.records.words import headline

        slug = f" [{self.cause.slug}]" if self.cause else ""
        return f"<Report: {headline(self)}{slug}>"

    def _repr_html_(self) -> str:
        """The report as a notebook shows it."""
        from importlib import import_module  # the page is made in a room below, and only if a notebook asks for it

        return str(import_module("firstnan.report.page").render_card(self))

    def with_(self, **changes: Any) -> Report:
        return replace(self, **changes)

    def with_other_numbers(self) -> Report:
        """The report of a replay that failed where the step did, but computed with other numbers."""
        batch = self.batch
        if batch is not None:  # its rows are those of the replay
            batch = Batch(batch.index, batch.size, unit=batch.unit)
        return replace(self, reproduced="similar", batch=batch)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return encode_record(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        """The report that `to_dict` wrote; ReportError where the data is anything else."""
        return decode(Report, data)


@dataclass(frozen=True, slots=True)
class RankFinding:
    """What one of several processes that train together has found."""

    rank: int
    what: Literal["created", "received", "noticed", "transient", "unknown"]
    """The value was created there; came from another rank; was noticed, no more; was not there when the rank replayed
    its step; the rank did not say."""
    step: int | None = None
    where: str = ""
    """File and line, if it was created there."""


@dataclass(frozen=True, slots=True)
class NaNEvent:
    """One thing that the detector noticed, as data."""

    kind: Literal[
        "nonfinite",
        "spike",
        "explosion",
        "clipped",
        "skipped",
        "rolled_back",
        "scale",
        "replicas",
        "forecast",
        "withdrawn",
    ]
    message: str
    """One readable line."""
    step: int | None = None
    """None outside training steps: inference, another thread."""
    batch: int | None = None
    epoch: int | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    what: Literal["input", "output", "loss", "gradient", "parameter", "state", "buffer"] | None = None
    """Which tensor; in backward, `output` is the gradient a layer receives and `input` the one it passes on."""
    layer: str = ""
    """Readable path of the layer, or the name of the parameter or buffer."""
    paths: tuple[str, ...] = ()
    """All paths of a layer that several parents share."""
    layer_type: str = ""
    call: int = 0
    """Which call of the layer in this step, counted from 0."""
    tensor: TensorStat | None = None
    """Counts of NaN and Inf, shape, dtype, first index, range; its name is the place inside a container."""
    grad_norm: float | None = None
    thread: str = ""
    rank: int = 0
    time: float = 0.0
    """Seconds since 1970."""

    def __repr__(self) -> str:
        return f"<NaNEvent {self.kind}: {self.message}>"

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values."""
        return encode_record(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> NaNEvent:
        """The event that `to_dict` wrote; ReportError where the data is anything else."""
        return decode(NaNEvent, data, "event")


# --- JSON, where it is not simply the fields ----------------------------------------------------------------------

FORMAT = "firstnan-report"
VERSION = 1
MOST_DIMS = 64
"""As many as torch itself allows."""


# --- Report: its format and version come first -------------------------------------------------------------------


def _write_version(report: Report) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION}


def _check_version(data: dict[str, Any], where: str) -> None:
    if data.get("format") != FORMAT:
        raise ReportError(f'not a firstnan report: "format" must be "{FORMAT}"')
    version = decode_value(int, data.get("version"), field_at(where, "version"))
    if version < 1:
        raise ReportError("not a firstnan report: version must be 1 or more, got 0")
    if version > VERSION:
        raise ReportError(
            f"written by a newer firstnan (report version {version}, this one reads {VERSION}): upgrade firstnan"
        )


# --- TensorStat: the sum of both infinities, and a short form without a shape ------------------------------------


def _write_infinities(stat: TensorStat) -> dict[str, Any]:
    return {"inf": stat.inf}


def _check_dims(data: dict[str, Any], where: str) -> None:
    for name in ("shape", "first_index"):
        if isinstance(dims := data.get(name), list) and len(dims) > MOST_DIMS:
            raise ReportError(f"{where}.{name} has {len(dims)} dimensions: the limit is {MOST_DIMS}")


def _read_short_form(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    """The short form has `of`, the number of elements, for the shape, and `inf` for `posinf` and `neginf`."""

    def count(name: str) -> int:
        return decode_value(int | None, data.get(name), f"{where}.{name}") or 0

    found: dict[str, Any] = {"name": "", "dtype": ""}
    if "shape" not in values:
        found["shape"] = (count("of"),)
    if "posinf" not in values:
        found["posinf"] = max(0, count("inf") - values.get("neginf", 0))
    return found


# --- History: the optimizer's settings as an object --------------------------------------------------------------


def _write_settings(history: OptimizerHistory) -> dict[str, Any]:
    return {"settings": encode(dict(history.settings))}


def _read_settings(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    settings = decode_value(dict[str, Any] | None, data.get("settings"), f"{where}.settings")
    return {"settings": tuple((settings or {}).items())}


# --- Origin: its place in source flattened, and of its event only what a reader needs ----------------------------
# The whole trace, `arrived` included, stays with the process that made it.

_NO_PLACE = dict.fromkeys(("file", "line", "column", "end_column", "function", "code"))


@dataclass(frozen=True, slots=True)
class _Argument:
    """A (name, value) pair as an object."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class _Number:
    name: str
    value: float


def _write_origin(origin: Origin) -> dict[str, Any]:
    event, produced = origin.event or OpEvent(0, "", "", "forward", 0), origin.produced
    return {
        "backward_node": event.node,
        **(encode(origin.site) if origin.site else _NO_PLACE),
        "produced": produced and {**encode(produced), "of": produced.numel},
        "witness": encode([_Argument(*pair) for pair in event.witness]),
        "witness_index": encode(event.witness_index),
        "scalars": encode([_Argument(*pair) for pair in event.scalars]),
        "library": encode(origin.library_site),
        "raised": event.raised,
        "in_python_backward": event.in_python_backward,
        "in_float64": event.in_float64,
    }


def _read_origin(data: dict[str, Any], where: str, values: dict[str, Any]) -> dict[str, Any]:
    def part(name: str, hint: Any) -> Any:
        return decode_value(hint, data.get(name), f"{where}.{name}")

    phase = values.get("phase")
    running: Any = phase if phase in ("backward", "optimizer") else "forward"
    blank = OpEvent(0, values.get("op", ""), values.get("aten", ""), running, values.get("step", 0))
    event = replace(
        blank,
        node=part("backward_node", str | None),
        witness=tuple((one.name, one.value) for one in part("witness", tuple[_Number, ...] | None) or ()),
        witness_index=part("witness_index", tuple[int, ...] | None),
        scalars=tuple((one.name, one.value) for one in part("scalars", tuple[_Argument, ...] | None) or ()),
        library_site=part("library", Site | None),
        raised=part("raised", str | None),
        in_python_backward=bool(part("in_python_backward", bool | None)),
        in_float64=part("in_float64", InFloat64 | None),
    )
    forward = None
    if phase == "backward" and event.library_site and not event.in_python_backward:
        forward = replace(blank, phase="forward", library_site=event.library_site)
    return {
        "event": None if event == blank else event,
        "forward_event": forward,
        "site": None if data.get("file") is None else decode(Site, data, where),
    }


FORMS.update(
    {
        Report: Form(first=("format", "version"), write=_write_version, check=_check_version),
        TensorStat: Form(
            first=("name", "shape", "dtype", "min", "max", "smallest", "zeros", "negative", "nan", "inf"),
            write=_write_infinities,
            check=_check_dims,
            read=_read_short_form,
        ),
        OptimizerHistory: (
            settings := Form(
                own=("settings",), first=("optimizer", "settings"), write=_write_settings, read=_read_settings
            )
        ),
        History: settings,
        Origin: Form(
            own=("event", "forward_event", "site", "arrived"),
            first=(
                *("phase", "op", "aten", "backward_node"),
                *(field.name for field in fields(Site)),
                *("module", "module_type", "produced"),
            ),
            write=_write_origin,
            read=_read_origin,
        ),
    }
)
for _record in (Report, NaNEvent, _Argument, _Number):
    prepare(_record)
