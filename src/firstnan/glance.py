"""The cheapest look at the gradients of a tiny model, where a step takes less than a millisecond."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from firstnan.finite import reads_are_free

_FEW = 32
_SMALL = 1 << 17
_EVERY = 4
_LEARNING = 64
_AGAIN = 256
_JUMP = 4.0
_RISE = 1.5


class Glance:
    """Adds the gradients up: a sum is finite only if every element is, and it jumps when they do.

    It costs half of a norm. The norm itself is computed in every fourth step, and when the sum or the loss has risen.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._usual = 0.0
        """The largest sum, by magnitude, of steps in which the norm was computed too."""
        self._loss = math.inf
        self._applies = False

    def suffices(self, gradients: list[Tensor], loss: float | None) -> bool:
        """Whether everything is finite and nothing asks for the norm."""
        self._steps += 1
        due = self._steps % _EVERY == 0 or self._steps <= _LEARNING
        if due:
            self._applies = _are_few_and_small(gradients)
        if not self._applies:
            return False
        total = 0.0
        for gradient in gradients:
            total += gradient.sum().item()
        size = abs(total)
        risen = loss is not None and abs(loss) > _RISE * self._loss
        if not due and not risen and size <= _JUMP * self._usual:
            return True
        if size < math.inf:
            self._usual = size if self._steps % _AGAIN == 0 else max(size, self._usual)
        if loss is not None and due:
            self._loss = abs(loss)
        return False


def _are_few_and_small(gradients: list[Tensor]) -> bool:
    return (
        0 < len(gradients) <= _FEW
        and all(map(is_plain, gradients))
        and reads_are_free(gradients[0])
        and sum(map(Tensor.numel, gradients)) <= _SMALL
    )


def is_plain(t: Tensor) -> bool:
    """An ordinary float32 tensor in main memory, which the quickest functions take as it is."""
    kind = type(t)
    return (kind is Tensor or kind is torch.nn.Parameter) and t.dtype is torch.float32 and t.is_cpu and not t.is_sparse
