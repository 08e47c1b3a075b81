"""What a detector noticed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from firstnan.records.codec import decode, encode_record
from firstnan.records.trace import TensorStat


@dataclass(frozen=True, slots=True)
class NaNEvent:
    """One thing that the detector noticed, as data."""

    kind: Literal["nonfinite", "spike", "explosion", "clipped", "skipped", "rolled_back"]
    message: str
    """One readable line."""
    step: int | None = None
    """None outside training steps: inference, another thread."""
    batch: int | None = None
    epoch: int | None = None
    phase: Literal["forward", "backward", "optimizer"] | None = None
    what: Literal["input", "output", "loss", "gradient", "parameter", "buffer"] | None = None
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

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON values."""
        return encode_record(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> NaNEvent:
        """The event that `to_dict` wrote; ReportError where the data is anything else."""
        return decode(NaNEvent, data, "event")
