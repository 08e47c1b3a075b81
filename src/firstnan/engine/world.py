"""The processes that train together: which one this is, and whether it trains alone."""

from __future__ import annotations

from typing import NamedTuple

import torch


class World(NamedTuple):
    rank: int = 0
    size: int = 1

    @property
    def is_alone(self) -> bool:
        """Whether a step can be replayed: other processes would not take part in its collectives."""
        return self.size == 1


def world() -> World:
    """As it is now: a program joins others at any time."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return World(distributed.get_rank(), distributed.get_world_size())
    return World()
