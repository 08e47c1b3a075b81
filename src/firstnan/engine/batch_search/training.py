"""A model, and everything in the process that trains it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.engine.batch_search.result import Seen
from firstnan.records import Noticed
from firstnan.tensors.finite import is_finite, stat, tensors_in
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import parameters_of


class Training:
    """The model, its parameters by name, and the optimizers, schedules and scalers that belong to it."""

    def __init__(self, model: Module, optimizer: Any) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if any(is_lazy(p) for p in model.parameters()):
            raise ValueError("the model has lazy parameters: call it once first, to initialise them")
        self.model, self.models = model, Models({"": model})
        there = find_live_objects(Optimizer, LRScheduler, torch.amp.GradScaler)
        found = [o for o in there if isinstance(o, Optimizer) and self._is_trained_by(o)]
        self.optimizers = _given(optimizer) or found
        self.all_optimizers = list({id(o): o for o in (*self.optimizers, *found)}.values())
        """All optimizers of the model, including those inside a wrapper and those that were not passed."""
        self.scalers = [o for o in there if isinstance(o, torch.amp.GradScaler)]
        self.schedulers = [
            o for o in there if isinstance(o, LRScheduler) and vars(o).get("optimizer") in self.all_optimizers
        ]

    def _is_trained_by(self, optimizer: Any) -> bool:
        return "param_groups" in vars(optimizer) and any(
            id(p) in self.models.parameters for p in parameters_of(optimizer)
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p, _ in self.models.parameters.values()]

    @property
    def outer_schedulers(self) -> list[Any]:
        """The schedulers that are not inside another one."""
        inner = {id(part) for s in self.schedulers for part in getattr(s, "_schedulers", ())}
        return [s for s in self.schedulers if id(s) not in inner]

    def bad_state(self, *, optimizers: bool) -> Seen | None:
        """The first non-finite weight or buffer, or optimizer state if `optimizers`."""
        for what, name, tensor, infinity_is_meant in self._tensors(optimizers):
            if not is_finite(tensor) and not (infinity_is_meant and not bool(torch.isnan(tensor).any())):
                return Seen(Noticed(what, name), stat(name, tensor))
        return None

    def _tensors(self, optimizers: bool) -> Iterator[tuple[str, str, Tensor, bool]]:
        for parameter, name in self.models.parameters.values():
            yield "parameter", name, parameter, not parameter.requires_grad
        for buffer, name in self.models.buffers.values():
            yield "buffer", name, buffer, True
        for optimizer in self.optimizers if optimizers else ():
            for parameter, state in optimizer.state.items():
                for place, tensor in tensors_in(state):
                    yield "optimizer state", f"{self.models.name(parameter)}{place}", tensor, False


def _given(optimizer: Any) -> list[Any]:
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for one in given:
        if not hasattr(one, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(one).__name__}")
    return given
