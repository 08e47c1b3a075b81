"""The cheapest check of the gradients of a tiny model, whose step takes less than a millisecond."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from firstnan.tensors.finite import is_plain, reads_are_free

_FEW = 32
_SMALL = 1 << 18
_EVERY = 64
_LEARNING = 64
_JUMP = 4.0
_RISE = 1.5


class QuickCheck:
    """Checks only the sum of the gradients: it is finite only if every element is, and it jumps when they do.

    A sum costs half as much as a norm. The full check runs in the first steps, in every 64th step, and whenever the
    sum or the loss rises or the learning rate changes.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sum = 0.0
        """The largest recent sum, by magnitude, of the fully checked steps."""
        self._loss = 0.0
        self._rate: Any = None
        self.applies = False

    def passes(self, optimizer: Any, loss: float | None) -> bool:
        """Whether everything is finite and this step needs no full check."""
        self._steps += 1
        if not self.applies or self._steps % _EVERY == 0 or loss is None or not abs(loss) <= _RISE * self._loss:
            return False
        for group in optimizer.param_groups:
            if group.get("lr") is not self._rate:
                return False
        return abs(self._total(optimizer)) <= _JUMP * self._sum  # False for a NaN

    def learn(self, optimizer: Any, gradients: list[Tensor], loss: float | None) -> None:
        """After a full check that found nothing: remembers the usual sum, loss and learning rate."""
        if not _are_few_and_small(gradients):
            self.applies = False
            return
        # The usual values change slowly as the model learns.
        self._sum = max(0.95 * self._sum, abs(self._total(optimizer)))
        self._loss = max(0.95 * self._loss, abs(loss)) if loss is not None else self._loss
        self._rate = optimizer.param_groups[0].get("lr")
        self.applies = self._steps >= _LEARNING

    def _total(self, optimizer: Any) -> float:
        total = 0.0
        vectors: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.dim() == 1:
                    vectors.append(gradient)
                else:
                    total += gradient.sum().item()
        for vector in [torch.cat(vectors)] if len(vectors) > 3 else vectors:
            total += vector.sum().item()
        return total


def _are_few_and_small(gradients: list[Tensor]) -> bool:
    return (
        0 < len(gradients) <= _FEW
        and all(map(is_plain, gradients))
        and reads_are_free(gradients[0])
        and sum(map(Tensor.numel, gradients)) <= _SMALL
    )
