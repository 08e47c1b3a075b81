"""Large gradients, measured soon after they are complete, while they are still in the processor's cache."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from firstnan.tensors.finite import is_plain
from firstnan.tensors.versions import Unwritten

_LARGE_MODEL = 1 << 23
"""Elements: with the gradients of a smaller one it makes no difference when they are read."""
_LARGE = 1 << 14
_GROUP = 1 << 19
"""Elements: two megabytes, about what the cache next to a processor holds."""
_TRIAL = 1 << 9
"""Measurements after which they are judged by how many were of use."""


class HotGradients:
    """Knows the squared norms of large gradients, as long as nobody has written to them since.

    Reading them later, before the update, takes longer: by then they are in main memory only. They are measured in
    groups, since every call out of backward costs as much as reading a small gradient.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        """By parameter."""
        self._groups: list[_Group] = []
        self.taken = self._used = 0
        """How many were measured, and how many of these measurements were of use."""
        self._useless = False

    def watch(self, optimizer: Any) -> None:
        """Measures the large gradients of the optimizer's parameters from now on, if there are many numbers in all."""
        if self._useless or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return  # other processes add to a gradient that is complete here
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and is_plain(p)]
        if sum(map(Tensor.numel, parameters)) < _LARGE_MODEL:
            return
        self._forget_the_dead()
        # Backward completes them from the last to the first, more or less; who comes after its group is read later.
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

    def sorted(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[float]]:
        """The gradients of these parameters that are still to be measured, and the squared norms of the others."""
        cold, squares = [], []
        measured = self._measured
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            one = measured.get(id(parameter)) if measured else None
            if one is not None and one.unwritten is not None and one.unwritten.is_still(gradient):
                squares.append(one.square)
            else:
                cold.append(gradient)
        self._used += len(squares)
        self.judge()
        return cold, squares

    def judge(self) -> None:
        """Where each is written to again, or added to by several backwards, reading them once at the end is cheaper."""
        if self.taken < _TRIAL:
            return
        self._useless = self._used < 0.6 * self.taken
        self.taken = self._used = 0
        if self._useless:
            self.remove()

    def _forget_the_dead(self) -> None:
        self._measured = {key: one for key, one in self._measured.items() if one.parameter() is not None}
        self._groups = [group for group in self._groups if group.parameter() is not None]

    def remove(self) -> None:
        for group in self._groups:
            group.remove()
        self._measured, self._groups = {}, []


class _Measured:
    """The gradient of one parameter as it was measured last."""

    __slots__ = ("parameter", "square", "unwritten")

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = weakref.ref(parameter)
        self.unwritten: Unwritten | None = None

    def measure(self) -> bool:
        """Whether there was something to measure."""
        self.unwritten = None
        parameter = self.parameter()
        gradient = parameter.grad if parameter is not None else None
        if gradient is None or not is_plain(gradient) or not gradient.is_contiguous():
            return False
        flat = gradient.view(-1)
        self.square = torch.dot(flat, flat).item()
        self.unwritten = Unwritten(gradient)
        return True


class _Group:
    """Gradients that are measured together, when backward has completed the last of them."""

    __slots__ = ("_all", "_handle", "_members", "parameter")

    def __init__(self, members: list[_Measured], last: Tensor, all_of_them: HotGradients) -> None:
        self._members, self._all = members, all_of_them
        self.parameter = weakref.ref(last)
        self._handle: Any = last.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        # Under a dispatch mode, which may be ours, this would look like part of the program.
        if torch._C._len_torch_dispatch_stack() or torch.is_grad_enabled():
            return
        with suppress(Exception):  # what cannot be measured is read later
            self._all.taken += sum(one.measure() for one in self._members)

    def remove(self) -> None:
        """Takes the hook off; torch leaves an empty dict of them behind, which goes too."""
        self._handle.remove()
        parameter = self.parameter()
        if parameter is not None and not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
