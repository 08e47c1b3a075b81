"""What a trace is made of: statistics of tensors, places in source, operator calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["forward", "backward", "optimizer", "input", "parameter"]
InFloat64 = Literal["finite", "nonfinite"]
Role = Literal["parameter", "buffer", "input", "constant", "gradient", "state", "unknown"]


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
    bad_rows: tuple[int, ...] = ()
    """Indices along the first dimension of the elements created here (at most 64)."""
    raised: str | None = None
    """The operator raised this instead of returning."""
    in_python_backward: bool = False
    """Ran inside the `backward` of a user's `autograd.Function` (or a tensor hook)."""
    region: Literal["setup", "data", "step", "between", "update"] = "step"
    """Before the first step, while a batch was fetched, inside a step, between an update and the next step, or
    (without an optimizer object) after backward, where the program updates its weights itself."""
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
