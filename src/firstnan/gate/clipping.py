"""What the program itself finds out about its gradients: `clip_grad_norm_` measures them all."""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor

from firstnan.tensors.finite import is_plain
from firstnan.tensors.versions import Unwritten

_LARGE = 1 << 18
"""Elements: the gradients of a smaller model are read sooner than remembered."""
_LAST = 4


class Clipping:
    """Remembers the norm of gradients that were clipped, as long as nobody has written to them since.

    A norm is finite only if every element is, and clipping makes none larger: nothing is left to be read.
    """

    def __init__(self) -> None:
        self._norm: Unwritten | None = None
        """The 2-norm that torch computed last."""
        self._normed: list[int] = []
        """The identities of the gradients that it is of."""
        self._clipped: deque[tuple[dict[int, Unwritten], float]] = deque(maxlen=_LAST)

    def normed(self, gradients: list[Tensor], norm: Tensor) -> None:
        """`norm` is the 2-norm of all of these."""
        # To read one on a device would wait for it.
        self._norm, self._normed = Unwritten(norm) if is_plain(norm) else None, list(map(id, gradients))

    def clipped(self, parameters: list[Tensor], max_norm: float | Tensor, norm: Tensor) -> None:
        """The gradients of these parameters, of this norm, were multiplied so that it is at most `max_norm`."""
        if self._norm is None or not self._norm.is_still(norm):
            return
        gradients = [g for p in parameters if (g := p.grad) is not None]
        size, limit = norm.item(), float(max_norm)
        if list(map(id, gradients)) != self._normed or not math.isfinite(size) or not limit >= 0:
            return
        if sum(map(Tensor.numel, gradients)) >= _LARGE and all(map(is_plain, gradients)):
            self._clipped.append(({id(g): Unwritten(g) for g in gradients}, size * min(1.0, limit / (size + 1e-6))))

    def norm_of(self, parameters: list[Tensor]) -> float | None:
        """The norm of the gradients of all these parameters, if it is known."""
        if not self._clipped:
            return None
        gradients = [g for p in parameters if (g := p.grad) is not None]
        for known, norm in reversed(self._clipped):
            if len(known) == len(gradients) and all(id(g) in known and known[id(g)].is_still(g) for g in gradients):
                return norm
        return None
