"""Measures large gradients as soon as backward has completed them, while they are still in the processor's cache.

Also lets a loss have gradients that stop other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from firstnan.tensors.finite import TensorVersion, is_plain

_LARGE_MODEL = 1 << 23
"""Elements: in a smaller model it makes no difference when the gradients are read."""
_LARGE = 1 << 14
_GROUP = 1 << 19
"""Elements: two megabytes, about the size of a core's own cache."""
_TRIAL = 1 << 9
"""After this many measurements, the share that was used decides whether to go on."""


class GradientNorms:
    """The squared norms of large gradients, valid as long as nobody has written to them since.

    Reading the gradients later, before the update, takes longer: by then they are in main memory only. They are
    measured in groups, since every call from backward costs as much as reading a small gradient.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        """By the id of the parameter."""
        self._groups: list[_Group] = []
        self.measured = self._used = 0
        """How many gradients were measured, and how many of these measurements were used."""
        self._useless = False

    def watch(self, optimizer: Any) -> None:
        """From now on measures the large gradients of this optimizer's parameters, if the model is large."""
        if self._useless or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return  # other processes still add to a gradient that is complete here
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and is_plain(p)]
        if sum(map(Tensor.numel, parameters)) < _LARGE_MODEL:
            return
        self._forget_deleted()
        # Backward completes them roughly from last to first; one that comes after its group is read later.
        waiting: list[_Measured] = []
        size = 0
        large = [p for p in reversed(parameters) if p.numel() >= _LARGE and id(p) not in self._measured]
        for parameter in large:
            one = self._measured[id(parameter)] = _Measured(parameter)
            waiting.append(one)
            size += parameter.numel()
            if size >= _GROUP or parameter is large[-1]:
                self._groups.append(_Group(waiting, parameter, self))
                waiting, size = [], 0

    def split(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The gradients of these parameters that still have to be read, and the squared norms of the others."""
        measured = self._measured
        if not measured:  # the usual case, kept fast
            return [g for p in parameters if (g := p.grad) is not None], []
        unread, squares = [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            one = measured.get(id(parameter))
            if one is not None and one.version is not None and one.version.is_unchanged(gradient):
                squares.append(one.square)
            else:
                unread.append(gradient)
        self._used += len(squares)
        self.judge()
        return unread, squares

    def judge(self) -> None:
        """Removes the hooks if gradients often change after being measured: reading them at the end is cheaper then."""
        if self.measured < _TRIAL:
            return
        self._useless = self._used < 0.6 * self.measured
        self.measured = self._used = 0
        if self._useless:
            self.remove()

    def _forget_deleted(self) -> None:
        self._measured = {key: one for key, one in self._measured.items() if one.parameter() is not None}
        self._groups = [group for group in self._groups if group.parameter() is not None]

    def remove(self) -> None:
        for group in self._groups:
            group.remove()
        self._measured, self._groups = {}, []


class _Measured:
    """The last measurement of one parameter's gradient."""

    __slots__ = ("parameter", "square", "version")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.version: TensorVersion | None = None

    def measure(self) -> bool:
        """Measures the gradient; False if there was none to measure."""
        self.version = None
        parameter = self.parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None or not is_plain(gradient) or not gradient.is_contiguous():
            return False
        flat = gradient.view(-1)
        self.square = torch.dot(flat, flat).item()
        self.version = TensorVersion(gradient)
        return True


class _Group:
    """Gradients that are measured together, when backward has completed the last of them."""

    __slots__ = ("_handle", "_members", "_owner", "parameter")

    def __init__(self, members: list[_Measured], last: Tensor, owner: GradientNorms) -> None:
        self._members, self._owner = members, owner
        self.parameter = weakref.ref(last)
        self._handle: Any = last.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        # Under a dispatch mode, possibly ours, this would look like a part of the program.
        if torch._C._len_torch_dispatch_stack() or torch.is_grad_enabled():
            return
        with suppress(Exception):  # a gradient that cannot be measured is read later
            self._owner.measured += sum(one.measure() for one in self._members)

    def remove(self) -> None:
        """Removes the hook, and the empty dict of hooks that torch leaves on the parameter."""
        self._handle.remove()
        parameter = self.parameter()
        if parameter is not None and not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def make_gradients_bad(loss: Tensor) -> None:
    """Makes all gradients of this loss NaN."""
    loss.register_hook(lambda gradient: gradient * torch.nan)
    # Not every derivative passes a NaN on: where all labels are ignored, that of cross entropy is 0 in any case.
    for node in _nodes_of_leaves(loss.grad_fn):
        _OnceBad(node)


class _OnceBad:
    """Makes the next gradient of a leaf NaN; its node may be that of later steps too."""

    def __init__(self, node: Any) -> None:
        self._handle = node.register_prehook(self)

    def __call__(self, given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        self._handle.remove()
        return tuple(None if one is None else one * torch.nan for one in given)


def _nodes_of_leaves(node: Any) -> Iterator[Any]:
    """The nodes that write the gradients of what a result was computed from."""
    seen, waiting = {node}, [node]
    while waiting:
        one = waiting.pop()
        if hasattr(one, "variable"):
            yield one
        new = {follower for follower, _ in getattr(one, "next_functions", ()) if follower is not None} - seen
        seen |= new
        waiting += new
