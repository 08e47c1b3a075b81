"""What a report is made of: origin, cause, remedies, history, batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from firstnan.records.events import NaNEvent
from firstnan.records.trace import OpEvent, Phase, Role, Site, TensorStat


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
    edits: tuple[Edit, ...] = ()
    """What `diff` shows, as data; empty in reports of older versions."""

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
