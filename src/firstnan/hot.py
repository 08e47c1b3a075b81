"""Large gradients, measured the moment they are complete, while they are still in the processor's cache."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import is_plain

_LARGE_MODEL = 1 << 20
"""Elements: the gradients of a smaller one are still in the cache when the update begins."""
_LARGE = 1 << 16


class HotGradients:
    """Knows the squared norms of large gradients, as long as nobody has written to them since.

    Reading them later, before the update, takes about twice as long: by then they are in main memory only.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        """By parameter."""

    def watch(self, optimizer: Any) -> None:
        """Measures the large gradients of the optimizer's parameters from now on, if there are many numbers in all."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return  # other processes add to a gradient that is complete here
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and is_plain(p)]
        if sum(map(Tensor.numel, parameters)) < _LARGE_MODEL:
            return
        self._measured = {key: one for key, one in self._measured.items() if one.parameter() is not None}
        new = [p for p in parameters if p.numel() >= _LARGE and id(p) not in self._measured]
        self._measured |= {id(p): _Measured(p, p is new[0]) for p in new}

    def sorted(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of these parameters that are still to be measured, and the squared norms of the others."""
        cold, squares = [], []
        measured = self._measured
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            one = measured.get(id(parameter)) if measured else None
            if one is not None and one.is_of(gradient):
                squares.append(one.square)
            else:
                cold.append(gradient)
        return cold, squares

    def remove(self) -> None:
        for one in self._measured.values():
            one.remove()
        self._measured = {}


class _Measured:
    """The gradient of one parameter, measured whenever it is complete. It is not kept alive."""

    __slots__ = ("_address", "_gradient", "_handle", "_number", "_probes", "_version", "parameter", "square")

    def __init__(self, parameter: Tensor, probes: bool) -> None:
        self.parameter = weakref.ref(parameter)
        self._gradient: weakref.ref[Tensor] | None = None
        self._probes, self._number = probes, 0.0
        self._handle: Any = parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        self._gradient = None
        gradient = parameter.grad
        # Under a dispatch mode, which may be ours, this would look like part of the program.
        if gradient is None or not gradient.is_cpu or torch._C._len_torch_dispatch_stack() or torch.is_grad_enabled():
            return
        try:
            flat = gradient.view(-1)
            self.square = torch.dot(flat, flat)
            self._version, self._address = gradient._version, gradient.data_ptr()
            if self._probes:
                self._number = _first_number(self._address)
            self._gradient = weakref.ref(gradient)
        except Exception:
            pass  # sparse, or in another way unusual: it is read later

    def is_of(self, gradient: Tensor) -> bool:
        """Whether this is the gradient that was measured, as it was then."""
        if self._gradient is None or self._gradient() is not gradient or self._version != gradient._version:
            return False
        # Who writes through `.data` changes no version, but puts other numbers there, or changes them all.
        if self._address != gradient.data_ptr():
            return False
        return not self._probes or self._number == _first_number(self._address)

    def remove(self) -> None:
        """Takes the hook off; torch leaves an empty dict of them behind, which goes too."""
        self._handle.remove()
        parameter = self.parameter()
        if parameter is not None and not parameter._post_accumulate_grad_hooks:
            parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def _first_number(address: int) -> float:
    return ctypes.c_float.from_address(address).value
