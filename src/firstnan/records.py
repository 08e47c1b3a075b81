"""Plain frozen records that every room shares, and their JSON form; nothing here knows torch."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FORMAT = "firstnan-report"
VERSION = 1

Phase = Literal["forward", "backward", "optimizer", "input", "parameter"]
InFloat64 = Literal["finite", "nonfinite"]
Role = Literal["parameter", "buffer", "input", "constant", "gradient", "state", "unknown"]


@dataclass(frozen=True, slots=True)
class TensorStat:
    """One tensor in a line: `min`, `max` and `smallest` (the least magnitude) are over its finite elements."""

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
    """Where the first non-finite element is; None where there is none."""
    binary: bool = False
    """Every finite element is 0 or 1, as in a mask."""

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
    """The whole lines of the statement, as they stand in the file; the first is line `source_line`."""
    source_line: int | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """What one operator read: `producer` is the index of the event that wrote it, None if it came from outside."""

    name: str
    stat: TensorStat | None = None
    """Full statistics where the event is non-finite; only `min` and `max`, or nothing, where it is healthy."""
    producer: int | None = None
    role: Role | None = None
    """What a tensor from outside the trace is."""
    label: str = ""
    """Its readable name: `encoder.0.weight`, `batch[1]`."""
    guilty: bool = False
    """Its own non-finite elements are (some of) those that the operator handed on."""
    also: tuple[int, ...] = ()
    """Guilty: earlier events that left other non-finite elements in the same memory; `producer` is the last."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One operator call, as it was seen."""

    index: int
    op: str
    """The name people know: `log`, `softmax`, `linear`; for aten's own name see `aten`."""
    aten: str
    phase: Literal["forward", "backward", "optimizer"]
    step: int
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[TensorStat, ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()
    """Arguments that are no tensors, by name: numbers, dims, flags."""
    site: Site | None = None
    library_site: Site | None = None
    """The innermost frame where that is not the user's own code."""
    module: str = ""
    module_type: str = ""
    node: str | None = None
    """Backward: the autograd node that ran, `LogBackward0`."""
    forward: int | None = None
    """Backward: index of the forward event whose node this is, if it was traced."""
    born: int = 0
    """Non-finite elements written here although everything that fed them was finite."""
    nan_from_inf: int = 0
    """NaN elements made here out of an infinity (inf - inf, 0 * inf, inf / inf)."""
    on_purpose: bool = False
    """A constant infinity or NaN that the program asked for: `full(-inf)`, `masked_fill(mask, -inf)`."""
    uninitialized: bool = False
    """The memory was never written (`torch.empty`)."""
    witness: tuple[tuple[str, float], ...] = ()
    """The values that the operator read and wrote at the first bad element, where they line up."""
    bad_rows: tuple[int, ...] = ()
    """Indices along the first dimension that hold the elements born here (at most 64)."""
    raised: str | None = None
    """The operator raised this instead of returning."""
    in_python_backward: bool = False
    """Ran inside a user's own `autograd.Function.backward` (or a tensor hook)."""
    region: Literal["setup", "data", "step", "between", "update"] = "step"
    """Before the first step, while a batch was fetched, inside a step, after an update before the next step, or
    (without an optimizer object) after backward, where the program updates its weights itself."""
    role: Role | None = None
    """What the memory is that was written, where the program gave it a role: a parameter, a batch..."""
    label: str = ""
    grad: bool = False
    """Recorded for autograd: the result takes part in training."""
    in_float64: InFloat64 | None = None
    """What the same call gives in float64, where something was born here: finite means only the type was too narrow."""

    @property
    def bad(self) -> int:
        return sum(o.bad for o in self.outputs)


@dataclass(frozen=True, slots=True)
class Trace:
    """The operators of one step (or two) in order; `events[i].index == i`."""

    events: tuple[OpEvent, ...] = ()

    def producers(self, event: OpEvent) -> list[OpEvent]:
        """The events that wrote what this one read, in the order of its inputs."""
        return [self.events[i.producer] for i in event.inputs if i.producer is not None]

    def feeding(self, event: OpEvent, depth: int = 8) -> list[OpEvent]:
        """Everything up to `depth` operators back, nearest first, each once."""
        seen, wave, out = {event.index}, [event], []
        for _ in range(depth):
            wave = [p for e in wave for p in self.producers(e)]
            wave = list({p.index: p for p in wave if p.index not in seen}.values())
            seen.update(p.index for p in wave)
            out += wave
        return out


@dataclass(frozen=True, slots=True)
class Noticed:
    """Where the value was seen first: `what` is loss, gradient, parameter, buffer, output, value or exception."""

    what: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What the gate knows of one healthy step."""

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    param_norm: float | None = None


@dataclass(frozen=True, slots=True)
class LayerTrack:
    """The magnitudes of one layer over the last steps, oldest first: outputs (forward) or gradients (backward)."""

    layer: str
    phase: Literal["forward", "backward"]
    steps: tuple[int, ...] = ()
    norm: tuple[float, ...] = ()
    max_abs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """The last steps before the failure, oldest first, the failing one last if it is known."""

    steps: tuple[StepRecord, ...] = ()
    optimizer: str = ""
    settings: tuple[tuple[str, Any], ...] = ()
    """The optimizer's numbers of its first group: lr, eps, betas, momentum."""
    layers: tuple[LayerTrack, ...] = ()
    """Where statistics were kept: the layers that grew most, the first to do so first."""
    made_at: Site | None = None
    """Where the program makes this optimizer, where it calls its step, and where it calls backward."""
    stepped_at: Site | None = None
    backward_at: Site | None = None


@dataclass(frozen=True, slots=True)
class NaNEvent:
    """One thing that the detector noticed, as data."""

    kind: Literal["nonfinite", "spike", "explosion", "clipped", "skipped", "rolled_back"]
    message: str
    """One readable line."""
    step: int | None = None
    """None where it is no part of a training step: inference, another thread."""
    batch: int | None = None
    epoch: int | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    what: Literal["input", "output", "loss", "gradient", "parameter", "buffer"] | None = None
    """Which tensor; in backward `output` is the gradient that a layer was given and `input` the one it handed on."""
    layer: str = ""
    """Readable path of the layer, or the name of the parameter or buffer."""
    paths: tuple[str, ...] = ()
    """Every path of a layer that several parents share."""
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

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values."""
        from firstnan.report.json import event_to_dict

        return event_to_dict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> NaNEvent:
        """The event that `to_dict` wrote; ReportError where the data is anything else."""
        from firstnan.report.json import event_from_dict

        return event_from_dict(data)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the causal value was born, in the words of the report."""

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
    """Phase input, made inside a Dataset: the part of the batch as it reached the step; its name is the label there."""
    step: int = 0


@dataclass(frozen=True, slots=True)
class Cause:
    slug: str
    title: str
    why: str
    evidence: tuple[str, ...] = ()
    confidence: float = 0.5


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change of the program that should help, and what trying it showed."""

    title: str
    diff: str = ""
    """Unified, against the user's own files."""
    tried: bool = False
    failing_step_finite: bool | None = None
    steps_finite_after: int | None = None
    why: str = ""
    """One sentence: what it does to the numbers."""
    kind: Literal["code", "setting", "data"] = "code"
    loss_change: float | None = None
    """The largest relative change of the loss in the healthy steps before the failing one."""
    note: str = ""
    """Why it was not tried, or how it failed."""

    @property
    def proven(self) -> bool:
        """Tried, with the failing step and the steps after it finite."""
        return self.tried and bool(self.failing_step_finite) and self.steps_finite_after is not None


@dataclass(frozen=True, slots=True)
class PathStep:
    """One operator on the way from the origin to where the value was noticed."""

    op: str
    line: int | None
    file: str = ""
    code: str = ""
    module: str = ""
    phase: str = "forward"
    library: str = ""


@dataclass(frozen=True, slots=True)
class Feature:
    """One unusual value of a bad sample, beside the range of the other samples at the same place."""

    sample: int
    member: str
    """Which tensor of the batch: `batch[0]`."""
    index: tuple[int, ...] | None
    """Where in the sample; None where all its values there are alike, and `low` and `high` are over all places."""
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Batch:
    index: int | None = None
    size: int | None = None
    bad_samples: tuple[int, ...] | None = None
    """Positions in the batch; None where no single sample is to blame, or it is not known."""
    confirmed: bool = False
    """Replays have shown it: these samples fail without the others, and without them the step is finite."""
    dataset_indices: tuple[int, ...] | None = None
    """What the bad samples are in the data set, where the sampler has told."""
    features: tuple[Feature, ...] = ()
    replays: int = 0
    """How often the step was played again to find them."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was found; `verdict` is "nonfinite" or "clean"."""

    verdict: Literal["nonfinite", "clean"]
    step: int | None = None
    batch: Batch | None = None
    origin: Origin | None = None
    cause: Cause | None = None
    other_causes: tuple[Cause, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    path: tuple[PathStep, ...] = ()
    noticed: Noticed | None = None
    reproduced: Literal["deterministic", "transient", "not_replayed"] = "not_replayed"
    replay: str = ""
    """How the trace was made, in words: "the failing batch was handed out again"."""
    events: tuple[NaNEvent, ...] = ()
    history: History = field(default_factory=History)
    rank: int = 0
    world_size: int = 1
    environment: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What is weaker than it could be, in plain words."""
    capsule: str = ""
    """The file that holds the failing step, for `firstnan replay`."""

    def with_(self, **changes: Any) -> Report:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, section by section."""
        from firstnan.report.json import to_dict

        return to_dict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Report:
        from firstnan.report.json import from_dict

        return from_dict(data)


def plain(value: Any) -> Any:
    """`value` with tuples as lists and non-finite numbers as the strings "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return str(value)


def number(value: Any) -> Any:
    """The inverse of `plain` for one number."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def dumps(value: Any) -> str:
    return json.dumps(plain(value), indent=1, allow_nan=False)
