"""What the other ranks have contributed to the collectives of a step: kept for a child that replays it alone.

Only calls that are over when they return, and only so many bytes of a step.
"""

from __future__ import annotations

import contextlib
from types import FrameType
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


class _Call:
    """A call that is under way: its tensors, and of a sum what this rank gives."""

    def __init__(self, name: str, tensors: list[Tensor], group: Any, place: tuple[str, int]) -> None:
        self.name, self.tensors, self.group = name, tensors, group
        self.own: Tensor | None = None
        self.key = (name, place, tuple((t.shape, t.dtype) for t in tensors))


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

    @property
    def moves_rows(self) -> bool:
        """Whether the replay has got rows of other ranks in between its own: they are not its samples."""
        return any(key[0].startswith(("all_to_all", "all_gather")) for key in self._calls)

    @property
    def has_results(self) -> bool:
        return any(self._rounds)

    def begin(self, name: str, args: Any, kwargs: Any, round_: int, frame: FrameType) -> _Call | None:
        """Before a collective is called: what is to be kept of it; None if nothing is, or several watch the program."""
        if round_ != self._round and not self.is_replaying:
            self._rounds, self._round, self._bytes = [self._rounds[1], {}], round_, 0
        given = args[0] if args else kwargs.get(_RESULTS[name])
        tensors = [given] if isinstance(given, Tensor) else list(given or ())
        if self._is_inside or not all(map(_can_be_kept, tensors)):
            return None
        sums = name == "all_reduce" and _operation(*args, **kwargs) == torch.distributed.ReduceOp.SUM
        if not self.is_replaying:
            self._bytes += sum(t.nbytes for t in tensors)
            if self._bytes > _MOST_BYTES:
                return None
        call = _Call(name, tensors, kwargs.get("group"), _place(frame))
        call.own = tensors[0].detach().clone() if sums else None
        self._is_inside = True
        return call

    def end(self, call: _Call, result: Any) -> None:
        """Keeps the result; in a child, the other ranks contribute what they did before."""
        is_over = result is None or call.name == "recv"
        if not is_over or torch.distributed.distributed_c10d._world.pg_coalesce_state:
            return
        if not self.is_replaying:
            self._rounds[1].setdefault(call.key, []).append(_Contribution(call.tensors, call.own))
            return
        known = self._next(call.key)
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # a view that must not be written
            if known is not None:
                self._contribute(call, known)

    def left(self) -> None:
        """The call has returned or raised."""
        self._is_inside = False

    def _next(self, key: Any) -> _Contribution | None:
        """What was kept of this call: those of the same kind at the same place come in the same order."""
        known = self._rounds[1].get(key) or self._rounds[0].get(key)
        self._calls[key] = number = self._calls.get(key, -1) + 1
        return known[number % len(known)] if known else None

    @staticmethod
    def _contribute(call: _Call, known: _Contribution) -> None:
        """Writes what came from the others, as far as it was finite."""
        size, rank = torch.distributed.get_world_size(call.group), torch.distributed.get_rank(call.group)
        tensors, before, own = call.tensors, known.result, call.own
        if call.name == "all_gather_into_tensor":
            tensors, before = list(tensors[0].chunk(size)), list(before[0].chunk(size))
        for i, (tensor, was) in enumerate(zip(tensors, before, strict=True)):
            if call.name.startswith("all_gather") and i == rank:
                continue
            if own is not None and known.own is not None and not torch.equal(own, known.own):
                was = was + (own - known.own)
            is_finite = was.isfinite() if was.is_floating_point() else None
            tensor.detach().copy_(was if is_finite is None else torch.where(is_finite, was, tensor))


collectives = Collectives()
"""Those of this process; a child has what its parent has kept."""


def _can_be_kept(t: Any) -> bool:
    plain = type(t) in (Tensor, torch.nn.Parameter)
    return plain and t.device.type == "cpu" and t.layout is torch.strided


def _operation(tensor: Any = None, op: Any = None, *args: Any, **kwargs: Any) -> Any:
    return torch.distributed.ReduceOp.SUM if op is None else op


def _place(frame: FrameType) -> tuple[str, int]:
    """The line of the program that calls."""
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
