"""Weights that are spread over ranks (`fully_shard`): gathered by all ranks together, for replays by each alone."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.ranks import meet, world
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


def unreduced(model: Any) -> list[tuple[str, Tensor]]:
    """In a child, the gradients that this rank has computed for all of the weights, which nobody reduces there."""
    return [(readable_path(name), p.grad) for name, p in model.named_parameters() if p.grad is not None]


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


@contextlib.contextmanager
def gathered(where: str, optimizers: Iterable[Any]) -> Iterator[Any]:
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
