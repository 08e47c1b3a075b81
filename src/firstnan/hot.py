"""Large gradients, measured the moment they are complete, while they are still in the processor's cache."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import is_plain

_LARGE = 1 << 16


class HotGradients:
    """Knows the squared norms of large gradients, as long as nobody has written to them since.

    Reading them later, before the update, takes more than twice as long: by then they are in main memory only.
    """

    def __init__(self) -> None:
        self._squares: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """By parameter: its gradient, the version that was measured, and the sum of the squares."""
        self._parameters: list[tuple[weakref.ref[Tensor], Any]] = []

    def watch(self, optimizer: Any, accumulated: Callable[[Tensor], None]) -> None:
        """Has `accumulated` called for every large parameter of the optimizer whenever its gradient is complete."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return  # other processes add to a gradient that is complete here
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.numel() >= _LARGE and is_plain(parameter) and parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(accumulated)
                self._parameters.append((weakref.ref(parameter), handle))

    def measure(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None and is_plain(gradient) and gradient.is_contiguous():
            flat = gradient.detach().view(-1)
            self._squares[id(parameter)] = (weakref.ref(gradient), gradient._version, torch.dot(flat, flat))

    def sorted(self, parameters: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """The gradients of these parameters, those of them that are still to be measured, the norms of the others."""
        gradients, cold, norms = [], [], []
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            gradients.append(gradient)
            norm = self.norm(parameter, gradient)
            if norm is None:
                cold.append(gradient)
            else:
                norms.append(norm)
        return gradients, cold, norms

    def norm(self, parameter: Tensor, gradient: Tensor) -> float | None:
        """That of this gradient of this parameter, if it is known."""
        known = self._squares.get(id(parameter))
        if known is None or known[0]() is not gradient or known[1] != gradient._version:
            return None
        return math.sqrt(known[2].item())

    def remove(self) -> None:
        """Takes the hooks off; torch leaves an empty dict of them behind, which goes too."""
        for ref, handle in self._parameters:
            handle.remove()
            parameter = ref()
            if parameter is not None and not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        self._parameters, self._squares = [], {}
