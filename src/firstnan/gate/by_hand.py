"""Updates that a program writes itself, without the step of an optimizer: what it trains, and at what rate."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firstnan.tensors.models import graph_leaves, leaves_below

_SAMPLE = 1024
"""Elements of one trained tensor that are compared from step to step."""
_FITS = 0.02
"""An update that differs by more than this share from a multiple of the gradient has no single rate."""
_CERTAIN = 2
"""So many times the weights have to change between two backward calls without the step of an optimizer."""
_MOST_WAITED = 32
"""Backward calls before the first step of an optimizer after which nothing is expected any more."""


class HandWritten:
    """The tensors that backward writes gradients to, and how the program changes them afterwards."""

    def __init__(self) -> None:
        self.parameters: list[weakref.ref[Tensor]] = []
        """Those of the models: parts of them may start training later."""
        self.certain = False
        """There are optimizers, but the program updates its weights without them."""
        self._leaves: list[weakref.ref[Tensor]] = []
        self._sample: _Sample | None = None
        self._changes = self._backwards = 0
        self._covers: dict[object, bool] = {}
        """By the place of a `torch.autograd.grad`: whether it is with respect to all that its result depends on."""

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for ref in self._leaves if (leaf := ref()) is not None]

    def gradients_written(self, roots: list[Tensor]) -> list[Tensor]:
        """The tensors that backward wrote gradients to; the graph is walked again only if some were replaced."""
        alive = self.leaves
        replaced = not alive or len(alive) != len(self._leaves) or any(leaf.grad is None for leaf in alive)
        known = {id(leaf) for leaf in alive}
        joined = [p for ref in self.parameters if (p := ref()) is not None and p.grad is not None]
        new = [leaf for leaf in (graph_leaves(roots) if replaced else joined) if id(leaf) not in known]
        self._leaves = [weakref.ref(leaf) for leaf in alive + new]
        return alive + new

    def is_accumulating(self) -> bool:
        """Whether the next backward adds to gradients that were not cleared."""
        leaves = [leaf for leaf in self.leaves if leaf.grad is not None]
        if not leaves:
            return False
        smallest = min((leaf.grad for leaf in leaves if leaf.grad is not None), key=Tensor.numel)
        return bool(smallest.any())

    # Whether the program updates its weights itself although there are optimizers.

    @property
    def is_undecided(self) -> bool:
        return not self.certain and self._backwards < _MOST_WAITED

    def backward_without_step(self) -> int | None:
        """Another backward begins, and no optimizer has made a step so far; returns the number of updates by hand."""
        self._backwards += 1
        self._changes += self._has_changed()
        self.certain = self._changes >= _CERTAIN
        return self._changes if self.certain else None

    def _has_changed(self) -> bool:
        part = self._part()
        return part is not None and self._sample is not None and not torch.equal(part, self._sample.values)

    # The rate of the updates.

    def note(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Keeps a part of the weights and gradients before the program makes its update."""
        self._sample = None
        fit = [i for i, (t, g) in enumerate(zip(tensors, gradients, strict=True)) if _is_comparable(t, g)]
        if fit:
            # Of the small ones the largest: a single bias may have no gradient.
            at = max(fit, key=lambda i: (tensors[i].numel() <= _SAMPLE, min(tensors[i].numel(), _SAMPLE), i))
            gradient = gradients[at]
            assert gradient is not None
            self._sample = _Sample(at, weakref.ref(tensors[at]), _first(tensors[at]).clone(), _first(gradient).clone())

    def gradients_clipped(self) -> None:
        """The program has scaled its gradients: the update uses those."""
        sample = self._sample
        tensor = sample.tensor() if sample is not None else None
        if sample is not None and tensor is not None and tensor.grad is not None:
            sample.gradient = _first(tensor.grad).clone()

    def rate(self, tensors: Sequence[Tensor] = ()) -> float | None:
        """The learning rate of the last update, if that was a multiple of the gradient.

        `tensors` are those that have taken the place of the former ones, in an update that makes new ones.
        """
        part, sample, self._sample = self._part(tensors), self._sample, None
        if part is None or sample is None:
            return None
        moved, gradient = (part - sample.values).double(), sample.gradient.double()
        size, square = float(moved.norm()), float(gradient.norm()) ** 2
        if not 0.0 < square < math.inf or not 0.0 < size < math.inf:
            return None
        rate = -float(moved @ gradient) / square
        # The weights are rounded, so a small update is known less exactly.
        rounding = torch.finfo(part.dtype).eps * float(part.double().norm())
        fits = float((moved + rate * gradient).norm()) <= _FITS * size + rounding
        return rate if fits and size > 8 * rounding else None

    def _part(self, tensors: Sequence[Tensor] = ()) -> Tensor | None:
        """The values now of what was kept."""
        sample = self._sample
        if sample is None:
            return None
        tensor = sample.tensor()
        if tensors and all(t is not tensor for t in tensors):
            tensor = tensors[sample.index] if sample.index < len(tensors) else None
        part = _first(tensor) if tensor is not None and tensor.is_contiguous() else None
        return part if part is not None and part.shape == sample.values.shape else None

    # Gradients that are returned instead of written.

    def is_step(self, place: object, outputs: list[Tensor], targets: list[Tensor]) -> bool:
        """Whether a `torch.autograd.grad` is for an update: with respect to all that the result depends on.

        A gradient with respect to an input alone (saliency, an attack, a derivative in a loss) is not.
        """
        known = self._covers.get(place)
        if known is None:
            given = {id(t) for t in targets}
            known = self._covers[place] = all(id(leaf) in given for leaf in leaves_below(outputs))
        return known or not (self._leaves or any(self._covers.values()))


@dataclass
class _Sample:
    """A part of one trained tensor, before the program updates it."""

    index: int
    tensor: weakref.ref[Tensor]
    values: Tensor
    gradient: Tensor


def _is_comparable(tensor: Tensor, gradient: Tensor | None) -> bool:
    """Whether a tensor and its gradient can be compared cheaply."""
    if gradient is None or gradient.shape != tensor.shape or not tensor.numel():
        return False
    return all(_is_simple(t) and t.is_contiguous() for t in (tensor, gradient))


def _is_simple(t: Tensor) -> bool:
    kind, usual = type(t), t.dtype in (torch.float32, torch.float64)
    return (kind is Tensor or kind is torch.nn.Parameter) and usual and t.is_cpu and t.layout is torch.strided


def _first(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1)[:_SAMPLE]
