"""Which models and optimizers a session watches, and which processes train together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from firstnan.tensors.models import Models, reaches


@dataclass(frozen=True)
class Scope:
    roots: Mapping[str, Module] | None = None
    """Prefix of the names -> model; None: every model of the process."""
    optimizers: Sequence[Any] | None = None
    """None: every optimizer that makes a step."""

    def models(self) -> Models:
        """The models as they are now."""
        return Models(self.roots)

    def is_trained_by(self, loss: list[Tensor], models: Models | None) -> bool:
        """Whether this loss trains the models: that of another model does not count."""
        graphs = [r for r in loss if r.grad_fn is not None]
        return self.roots is None or models is None or not graphs or reaches(graphs, set(models.parameters))


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
