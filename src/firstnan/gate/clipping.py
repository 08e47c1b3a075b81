"""Gradient norms that the program has computed itself, with `clip_grad_norm_`."""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor

from firstnan.tensors.finite import is_plain
from firstnan.tensors.versions import TensorVersion

_LARGE = 1 << 18
"""Elements: for a smaller model, reading the gradients again is cheaper than remembering their versions."""
_LAST = 4


class Clipping:
    """Remembers the norm of clipped gradients, as long as nobody has written to them since.

    A norm is finite only if every element is, and clipping makes no element larger, so the gate need not read them.
    """

    def __init__(self) -> None:
        self._norm: TensorVersion | None = None
        """The 2-norm that torch computed last."""
        self._normed: list[int] = []
        """The ids of its gradients."""
        self._clipped: deque[tuple[dict[int, TensorVersion], float]] = deque(maxlen=_LAST)

    def norm_computed(self, gradients: list[Tensor], norm: Tensor) -> None:
        """`norm` is the 2-norm of all these gradients."""
        # Reading a norm on a device would wait for the device.
        self._norm, self._normed = TensorVersion(norm) if is_plain(norm) else None, list(map(id, gradients))

    def gradients_clipped(self, parameters: list[Tensor], max_norm: float | Tensor, norm: Tensor) -> None:
        """The gradients of these parameters had this norm and were scaled down to at most `max_norm`."""
        if self._norm is None or not self._norm.is_unchanged(norm):
            return
        gradients = [g for p in parameters if (g := p.grad) is not None]
        size, limit = norm.item(), float(max_norm)
        if list(map(id, gradients)) != self._normed or not math.isfinite(size) or not limit >= 0:
            return
        if sum(map(Tensor.numel, gradients)) >= _LARGE and all(map(is_plain, gradients)):
            self._clipped.append(({id(g): TensorVersion(g) for g in gradients}, size * min(1.0, limit / (size + 1e-6))))

    def norm_of(self, parameters: list[Tensor]) -> float | None:
        """The norm of the gradients of all these parameters, if it is known from clipping."""
        if not self._clipped:
            return None
        gradients = [g for p in parameters if (g := p.grad) is not None]
        for known, norm in reversed(self._clipped):
            if len(known) == len(gradients) and all(id(g) in known and known[id(g)].is_unchanged(g) for g in gradients):
                return norm
        return None
