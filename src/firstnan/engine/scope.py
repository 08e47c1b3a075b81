"""Which models and optimizers a session watches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Module

from firstnan.tensors.models import Models, parameters_of, reaches


@dataclass(frozen=True)
class Scope:
    roots: Mapping[str, Module] | None = None
    """Prefix of the names -> model; None: every model of the process."""
    optimizers: list[Any] | None = None
    """None: every optimizer that makes a step. If it is empty, those that are made for these models are added."""

    def models(self) -> Models:
        """The models as they are now."""
        return Models(self.roots)

    def adopt(self, optimizer: Any) -> bool:
        """Adds an optimizer that was made for these models; False if it trains others."""
        if self.roots is None or self.optimizers is None:
            return False
        own = {id(p) for root in self.roots.values() for p in root.parameters()}
        if all(id(p) not in own for p in parameters_of(optimizer)):
            return False
        self.optimizers.append(optimizer)
        return True

    def is_trained_by(self, loss: list[Tensor], models: Models | None) -> bool:
        """Whether this loss trains the models: that of another model does not count."""
        graphs = [r for r in loss if r.grad_fn is not None]
        if self.roots is None or models is None or not graphs or reaches(graphs, set(models.parameters)):
            return True
        # Layers may have been added since.
        own = {id(p) for root in self.roots.values() for p in root.parameters()}
        return own != set(models.parameters) and reaches(graphs, own)
