"""What the layer watch tells, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Phase = Literal["forward", "backward"]
What = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor of a layer that is not finite."""

    layer: str
    paths: tuple[str, ...]
    layer_type: str
    call: int
    """Which call of the layer in this step, counted from 0."""
    phase: Phase
    what: What
    """Backward: `output` is the gradient that the layer was given, `input` the one that it handed on."""
    place: str
    """Where inside the container the tensor is; empty for a tensor by itself."""
    tensor: Tensor | None
    """None where the verdict came so late that the tensor is gone."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    thread: str
    in_step: bool


class Sink(Protocol):
    """Who is told; several threads may call it at once."""

    def layer_event(self, found: Found) -> None: ...

    def magnitude(self, layer: str, phase: str, norm: float, low: float, high: float) -> None: ...
