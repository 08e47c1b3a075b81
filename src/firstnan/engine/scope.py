"""Which models and optimizers a session watches: those it was given, or all that the process has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import reaches


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
