"""The processes that train together: this one's rank, and whether a step can be replayed by it alone."""

from __future__ import annotations

import torch


def is_alone() -> bool:
    """Whether this process trains by itself: others would not take part in the collectives of a replay."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
