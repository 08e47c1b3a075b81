"""What a detector was told to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from firstnan.capsule import Wanted

Policy = Literal["raise", "warn", "skip", "rollback"]


@dataclass(frozen=True)
class Settings:
    policy: Policy
    streak: int
    """More bad steps in a row than this end training."""
    snapshot_every: int
    guard: Literal["warn", "clip", "off"]
    max_grad_norm: float | None
    capsules: Wanted | None = None
