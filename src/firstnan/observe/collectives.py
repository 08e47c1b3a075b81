"""What the other ranks have contributed to the collectives of a step: kept for a child that replays it alone.

Only calls that are over when they return, and only so many bytes of a step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MOST_BYTES = 1 << 24
_RESULTS = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "recv": "tensor",
    "scatter": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_to_all_single": "output",
}
"""The first argument of each, which holds the result."""
NAMES = tuple(_RESULTS)


class _Contribution:
    """The result of a call; of a sum also what this rank has given."""

    def __init__(self, result: list[Tensor], own: Tensor | None) -> None:
        self.result, self.own = [t.detach().clone() for t in result], own


class Collectives:
    """The results of the last two rounds; a round ends with an update."""

    def __init__(self) -> None:
        self.is_replaying = self._is_inside = False
        """Whether this is a forked child that replays a step; and whether a call is under way."""
        self._rounds: list[dict[Any, list[_Contribution]]] = [{}, {}]
        self._round, self._bytes = -1, 0
        self._calls: dict[Any, int] = {}

    def call(self, original: Callable[..., Any], args: Any, kwargs: Any, round_: int, unseen: Any) -> Any:
        """Calls a collective and keeps the result; in a child, the other ranks contribute what they did before."""
        name = original.__name__
        given = args[0] if args else kwargs.get(_RESULTS[name])
        tensors = [given] if isinstance(given, Tensor) else list(given or ())
        if self._is_inside or not all(type(t) in _PLAIN and t.device.type == "cpu" for t in tensors):
            return original(*args, **kwargs)
        with unseen():
            sums = name == "all_reduce" and _operation(*args, **kwargs) == torch.distributed.ReduceOp.SUM
            own = tensors[0].detach().clone() if sums and tensors[0].nbytes <= _MOST_BYTES else None
        self._is_inside = True  # several may watch the same program
        try:
            result = original(*args, **kwargs)
        finally:
            self._is_inside = False
        over = result is None or name == "recv"
        if not over or torch.distributed.distributed_c10d._world.pg_coalesce_state:
            return result
        key = (name, _place(), tuple((t.shape, t.dtype) for t in tensors))
        if self.is_replaying:
            known = self._next(key)
            with unseen(), torch.no_grad(), contextlib.suppress(RuntimeError):  # a view that must not be written
                if known is not None:
                    self._contribute(name, tensors, own, known, kwargs.get("group"))
        else:
            with unseen():
                self._keep(key, tensors, own, round_)
        return result

    def _keep(self, key: Any, tensors: list[Tensor], own: Tensor | None, round_: int) -> None:
        if round_ != self._round:
            self._rounds, self._round, self._bytes = [self._rounds[1], {}], round_, 0
        self._bytes += sum(t.nbytes for t in tensors)
        if self._bytes <= _MOST_BYTES:
            self._rounds[1].setdefault(key, []).append(_Contribution(tensors, own))

    def _next(self, key: Any) -> _Contribution | None:
        """What was kept of this call: those of the same kind at the same place come in the same order."""
        known = self._rounds[1].get(key) or self._rounds[0].get(key)
        self._calls[key] = number = self._calls.get(key, -1) + 1
        return known[number % len(known)] if known else None

    @staticmethod
    def _contribute(name: str, tensors: list[Tensor], own: Tensor | None, known: _Contribution, group: Any) -> None:
        """Writes what came from the others, as far as it was finite."""
        size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
        before = known.result
        if name == "all_gather_into_tensor":
            tensors, before = list(tensors[0].chunk(size)), list(before[0].chunk(size))
        for i, (tensor, was) in enumerate(zip(tensors, before, strict=True)):
            if name.startswith("all_gather") and i == rank:
                continue
            if own is not None and known.own is not None and not torch.equal(own, known.own):
                was = was + (own - known.own)
            is_finite = was.isfinite() if was.is_floating_point() else None
            tensor.detach().copy_(was if is_finite is None else torch.where(is_finite, was, tensor))


_PLAIN = (Tensor, torch.nn.Parameter)
collectives = Collectives()
"""Those of this process; a child has what its parent has kept."""


def _operation(tensor: Any = None, op: Any = None, *args: Any, **kwargs: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if op is None else op


def _place() -> tuple[str, int]:
    """The line of the program that calls."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
