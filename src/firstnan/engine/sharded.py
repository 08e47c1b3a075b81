"""Weights that are spread over ranks (`fully_shard`): gathered by all ranks together, for replays by each alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from firstnan.engine.ranks import meet, world
from firstnan.gate.gate import Trip
from firstnan.records import Noticed
from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import outermost_modules, parameters_of, readable_path


def are_sharded(optimizers: Iterable[Any]) -> bool:
    """Whether a rank holds only a part of the weights, so a step needs all of them."""
    return not world().is_alone and any(hasattr(p, "device_mesh") for one in optimizers for p in parameters_of(one))


_PATIENCE = datetime.timedelta(seconds=120)


def are_gathered(optimizers: Iterable[Any]) -> bool:
    """Whether the weights are put together for every step; with tensor parallelism each rank computes with its part."""
    kind = _sharded_kind()
    return are_sharded(optimizers) and any(
        isinstance(module, kind) for _, root in outermost_modules() for module in root.modules()
    )


def any_rank_says(bad: bool, optimizer: Any) -> bool:
    """Whether any of the ranks that share these weights has found something: each sees only its own part.

    One number is exchanged, in the place where all of them make the same update.
    """
    distributed = sys.modules["torch.distributed"]
    mesh = next(p.device_mesh for p in parameters_of(optimizer) if hasattr(p, "device_mesh"))
    flag = torch.tensor([float(bad)], device=mesh.device_type)
    for i in range(mesh.ndim):
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group=mesh.get_group(i), async_op=True).wait(_PATIENCE)
    return bool(flag.item())


class SpreadWeights:
    """Weights that are spread over ranks: all of them are on this rank for a replay, never for an update."""

    def __init__(self) -> None:
        self._spread: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._meetings: Counter[int | None] = Counter()
        """How often the ranks have met in each step."""
        self._model: Any = None
        """The model whose weights are all here."""
        self._returned = contextlib.ExitStack()
        """Gives them back to their ranks."""

    def are_spread(self, optimizer: Any) -> bool:
        """Whether ranks have to decide on this update together: each sees only a part of its gradients."""
        known = self._spread.get(optimizer)
        if known is None:
            known = self._spread[optimizer] = are_sharded([optimizer])
        return known

    @property
    def are_here(self) -> bool:
        """Whether all of the weights are here."""
        return self._model is not None

    def gather(self, step: int | None, optimizers: Iterable[Any]) -> bool:
        """Waits for the other ranks; whether all of the weights are here now."""
        self._meetings[step] += 1
        self._model = self._returned.enter_context(_gathered(f"step {step}/{self._meetings[step]}", optimizers))
        return self.are_here

    def scatter(self) -> None:
        """Each rank holds its own part again."""
        self._model = None
        self._returned.close()

    def unreduced(self) -> list[Trip]:
        """What is bad, in a child, in this rank's gradients of all of the weights: nobody reduces them there."""
        found = [(name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None]
        bad = [(name, gradient) for name, gradient in found if not is_finite(gradient)]
        tensors = [gradient for _, gradient in bad]
        return [Trip(Noticed("gradient", readable_path(bad[0][0])), tensors, before_update=True)] if bad else []


@contextlib.contextmanager
def _gathered(where: str, optimizers: Iterable[Any]) -> Iterator[Any]:
    """All of the weights on every rank, if all ranks have come to the same place: the model, or None.

    Every rank that fails in this step has to come here.
    """
    model = _sharded_model(optimizers)
    if model is None or not meet(where):
        yield None
        return
    modules = [module for module in model.modules() if isinstance(module, _sharded_kind())]
    process = os.getpid()
    for module in modules:
        module.unshard()
    try:
        yield model
    finally:
        for module in modules if os.getpid() == process else ():  # a child that replays the step needs them
            module.reshard()


def _sharded_model(optimizers: Iterable[Any]) -> Any:
    """The model that these optimizers train; None if there are several, whose order may be another on other ranks."""
    trained = {id(p) for one in optimizers for p in parameters_of(one) if hasattr(p, "device_mesh")}
    roots = [root for _, root in outermost_modules() if any(id(p) in trained for p in root.parameters())]
    found = [root for root in roots if any(isinstance(module, _sharded_kind()) for module in root.modules())]
    return found[0] if len(found) == 1 else None


def _sharded_kind() -> Any:
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
