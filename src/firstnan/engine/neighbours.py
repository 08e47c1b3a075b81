"""Detectors that stand at the same optimizer: while one of them has a step played again the others hold still."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from firstnan.engine.mode import WATCHING, Mode


class Neighbour(Protocol):
    mode: Mode
    optimizers: list[Any]


attached: weakref.WeakSet[Neighbour] = weakref.WeakSet()
"""Everyone who watches something in this process now."""


def is_held(mine: Neighbour) -> bool:
    """Whether another one is having this very step played again, or skipped."""
    return len(attached) > 1 and any(
        other is not mine
        and other.mode is not WATCHING
        and any(one is theirs for one in mine.optimizers for theirs in other.optimizers)
        for other in list(attached)
    )
