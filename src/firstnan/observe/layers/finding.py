"""What the layer watch reports, and the interface it reports to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Phase = Literal["forward", "backward"]
What = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class LayerFinding:
    """A non-finite input or output of a layer."""

    layer: str
    paths: tuple[str, ...]
    layer_type: str
    call: int
    """Which call of the layer in this step, counted from 0."""
    phase: Phase
    what: What
    """In backward, `output` is the gradient that the layer received, `input` the one that it passed on."""
    place: str
    """Where the tensor is inside its container; empty for a bare tensor."""
    tensor: Tensor | None
    """None if the tensor was freed before its values were known."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    thread: str
    in_step: bool


class Sink(Protocol):
    """Receives the findings; several threads may call it at once."""

    def layer_event(self, found: LayerFinding) -> None: ...

    def magnitude(
        self, layer: str, phase: str, dtype: torch.dtype, norm: float, low: float, high: float, *shares: float
    ) -> None:
        """How large an output or a gradient is; `shares`: those of zeros and of subnormal numbers, if counted."""
