"""The models of a process and what trains them, in an order that is the same in another process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from firstnan.tensors.names import Slot, find_live_objects, outermost_modules, readable_path
from firstnan.tensors.optimizers import parameters_of


@dataclass(frozen=True)
class Model:
    kind: str
    parameters: dict[str, Tensor]
    slots: dict[str, Slot]
    """Where its buffers are."""

    @classmethod
    def of(cls, root: Module) -> Model:
        named = [(readable_path(n), p) for n, p in root.named_parameters() if not is_lazy(p)]
        slots: dict[str, Slot] = {}
        for path, module in root.named_modules():
            for name in module._buffers:
                label = readable_path(f"{path}.{name}" if path else name)
                slots[label] = Slot(module, name, label)
        return cls(type(getattr(root, "_orig_mod", root)).__name__, dict(named), slots)


@dataclass(frozen=True)
class TrainingObjects:
    models: list[Model]
    optimizers: list[Any]
    scalers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)

    @classmethod
    def find(
        cls, optimizers: Iterable[Any], roots: Mapping[str, Module] | None = None, leaves: Sequence[Tensor] = ()
    ) -> TrainingObjects:
        """The models given, or all models of this process in the order in which the optimizers train them.

        `leaves` are trained tensors that need not belong to a model.
        """
        optimizers = list(optimizers)
        places = {id(p): i for i, p in enumerate(p for o in optimizers for p in parameters_of(o))}
        found = list(roots.values()) if roots is not None else [root for _, root in outermost_modules()]
        models = [Model.of(root) for root in found]
        if roots is None:
            models.sort(key=lambda m: min((places.get(id(p), len(places)) for p in m.parameters.values()), default=0))
        known = {id(p) for m in models for p in m.parameters.values()} | set(places)
        loose = [leaf for leaf in leaves if id(leaf) not in known]
        if loose:
            models.append(Model("", {f"leaf {i}": leaf for i, leaf in enumerate(loose)}, {}))
        scalers, schedulers = find_live_objects(torch.amp.GradScaler), find_live_objects(LRScheduler)
        schedulers = [s for s in schedulers if any(vars(s).get("optimizer") is o for o in optimizers)]
        # A scheduler made of others also loads their state, so it comes last.
        schedulers.sort(key=lambda s: hasattr(s, "_schedulers"))
        return cls(models, optimizers, scalers, schedulers)

    def names(self) -> dict[int, tuple[int, str]]:
        """Parameter id -> the index of its model and its name there."""
        found: dict[int, tuple[int, str]] = {}
        for i, model in enumerate(self.models):
            for name, parameter in model.parameters.items():
                found.setdefault(id(parameter), (i, name))
        return found
