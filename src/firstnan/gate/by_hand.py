"""Updates that a program writes itself, without the step of an optimizer: what it trains, and at what rate."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import graph_leaves, leaves_below

_SAMPLE = 1024
"""Elements of one trained tensor that are compared from step to step."""
_FITS = 0.02
"""An update that differs by more than this share from a multiple of the gradient has no single rate."""
_CERTAIN = 2
"""So many times the weights have to change between two backward calls without the step of an optimizer."""
_FEWEST = 4
"""Elements of a tensor below which the rule of an update cannot be told."""
_DIFFERENT = 3
"""In the updates before this one, several rules explain an update with different rates."""
_EXACT = 1e-3
"""Rules that leave less than this share of an update unexplained explain it equally well."""
_LEAST_PART = 0.2
"""The share of an update that has to come from the new gradient, else its factor cannot be told."""
_MOST_TRIED = 16
"""Updates after which no further rule is tried, if none has fitted."""
_NEAREST = 8
"""Trained tensors among which one is chosen while it is undecided who makes the updates."""
_MOST_WAITED = 32
"""Backward calls before the first step of an optimizer after which nothing is expected any more."""
_MOST_BAD = 30
"""Bad gradients in a row, each cleared without an update, after which a program is failing that never made any.

A loss scale that a program halves by itself, from 2**32 on, is found before."""


class HandWritten:
    """The tensors that backward writes gradients to, and how the program changes them afterwards."""

    def __init__(self) -> None:
        self.parameters: list[weakref.ref[Tensor]] = []
        """Those of the models: parts of them may start training later."""
        self.certain = False
        """There are optimizers, but the program updates its weights without them."""
        self._leaves: list[weakref.ref[Tensor]] = []
        self._sample: _Sample | None = None
        self._rules = UpdateRules()
        self._changes = self._backwards = self._cleared = 0
        self._nearest: list[weakref.ref[Tensor]] = []
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
        gradients = sorted((leaf.grad for leaf in self.leaves if leaf.grad is not None), key=Tensor.numel)
        return any(bool(gradient.any()) for gradient in gradients[:2])  # that of a single number may be 0

    # Whether the program updates its weights itself although there are optimizers.

    @property
    def is_undecided(self) -> bool:
        return not self.certain and self._backwards < _MOST_WAITED

    def backward_without_step(self) -> int | None:
        """Another backward begins, and no optimizer has made a step so far; returns the number of updates by hand."""
        self._backwards += 1
        if self._cleared and any(_is_bad(leaf.grad) for ref in self._nearest if (leaf := ref()) is not None):
            self._cleared = 0  # the next gradients are added to them
        self._changes += self._has_changed()
        self.certain = self._changes >= _CERTAIN
        return self._changes if self.certain else None

    def note_a_few(self, roots: list[Tensor]) -> list[Tensor]:
        """Keeps a part of one of the tensors that backward wrote gradients to, of those nearest to the loss.

        Returns the bad gradients of a program that has cleared many such in a row, and made no update.
        """
        nearest = list(islice(leaves_below(roots), _NEAREST))
        gradients = [leaf.grad for leaf in nearest]
        self.note(nearest, gradients)
        # Not at the first call: a healthy program's update follows, and a device would be waited for.
        bad = [g for g in gradients if g is not None and _is_bad(g)] if self._backwards > 1 else []
        self._cleared, self._nearest = self._cleared + 1 if bad else 0, [weakref.ref(leaf) for leaf in nearest]
        return bad if self._cleared >= _MOST_BAD else []

    def _has_changed(self) -> bool:
        part = self._part()
        return part is not None and self._sample is not None and not torch.equal(part, self._sample.values)

    # The rate of the updates.

    def note(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Keeps a part of the weights and gradients before the program makes its update."""
        self._sample = None
        best = 0
        for i in range(len(tensors) - 1, -1, -1):
            tensor, gradient = tensors[i], gradients[i]
            size = tensor.numel()
            # Of the small ones the largest: a single bias may have no gradient.
            rank = _SAMPLE + size if size <= _SAMPLE else _SAMPLE
            if rank > best and gradient is not None and _is_comparable(tensor, gradient):
                best, at, chosen = rank, i, gradient
        if best:
            self._sample = _Sample(at, weakref.ref(tensors[at]), _first(tensors[at]).clone(), _first(chosen).clone())

    def gradients_clipped(self) -> None:
        """The program has scaled its gradients: the update uses those."""
        sample = self._sample
        tensor = sample.tensor() if sample is not None else None
        if sample is not None and tensor is not None and tensor.grad is not None:
            sample.gradient = _first(tensor.grad).clone()

    def rate(self, tensors: Sequence[Tensor] = ()) -> float | None:
        """The learning rate of the last update, if that was by a known rule: see `UpdateRules`.

        `tensors` are those that have taken the place of the former ones, in an update that makes new ones.
        """
        part, sample, self._sample = self._part(tensors), self._sample, None
        if part is None or sample is None:
            self._rules = UpdateRules()
            return None
        moved, gradient = (part - sample.values).double(), sample.gradient.double()
        # The weights are rounded, so a small update is known less exactly.
        rounding = torch.finfo(part.dtype).eps * float(part.double().norm())
        if self._rules.count and (self._rules.index != sample.index or self._rules.size != part.numel()):
            self._rules = UpdateRules()
        self._rules.index = sample.index
        return self._rules.rate(moved, gradient, rounding)

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
            given, rows = {id(t) for t in targets}, outputs[0].shape[:1] if outputs else ()
            of_rows = len(targets) == 1 and bool(rows) and targets[0].shape[:1] == rows  # of samples, by `vmap`
            known = not of_rows and all(id(leaf) in given for leaf in leaves_below(outputs))
            self._covers[place] = known
        return known or not (self._leaves or any(self._covers.values()))


class UpdateRules:
    """Reads the rate of updates by hand: a multiple of the gradient, momentum, or a ratio of averages as in Adam.

    Each rule is followed with the gradients of every update; one that explains an update gives its rate.
    """

    def __init__(self) -> None:
        self.index = 0
        """Which of the trained tensors is compared."""
        self.size = 0
        self.count = 0
        """Updates so far."""
        self._moved: Tensor | None = None
        self._rules = [
            *(_Averages(b1, b2) for b1 in (0.9, 0.5) for b2 in (0.999, 0.99, 0.95)),
            *(_Averages(0.0, b2) for b2 in (0.99, 0.9)),
            _Averages(0.0, None),
        ]
        self._fitted = False

    def rate(self, moved: Tensor, gradient: Tensor, rounding: float) -> float | None:
        """The rate of one update that changed the weights by `moved`; `rounding` is what their precision hides."""
        before, self._moved = self._moved, moved
        self.count, self.size = self.count + 1, moved.numel()
        size, square = float(moved.norm()), float(gradient.norm()) ** 2
        if not 0.0 < square < math.inf or not 0.0 < size < math.inf:
            self._rules = []
            return None
        exact = size > 8 * rounding
        found = _multiple(moved, gradient, rounding) if exact else None
        if found is not None or moved.numel() < _FEWEST:
            self._follow(moved, gradient, rounding)
            return found
        found = self._follow(moved, gradient, rounding) if exact else None
        if found is None and exact and not self._fitted and before is not None and before.shape == moved.shape:
            found = _with_momentum(moved, before, gradient, rounding)
        return found

    def _follow(self, moved: Tensor, gradient: Tensor, rounding: float) -> float | None:
        """The rate by the rule of averages that explains the update best; all of them are carried on.

        None if several explain it with different rates, as in the first update.
        """
        if not self._rules or (not self._fitted and self.count > _MOST_TRIED):
            self._rules = []
            return None
        tried = [(rule, _fit(moved, rule.direction(gradient, self.count))) for rule in self._rules]
        allowed = _FITS * float(moved.norm()) + rounding
        fits = [(rule, rate, left) for rule, (rate, left) in tried if left <= allowed]
        if not fits:
            return None
        least = min(left for _, _, left in fits)
        fits = [fit for fit in fits if fit[2] <= 4 * least + rounding + _EXACT * float(moved.norm())]
        rates = [rate for _, rate, _ in fits]
        if self.count < _DIFFERENT or max(rates) - min(rates) > _FITS * max(rates):
            return None
        self._fitted = True
        if self.count > 2 * _DIFFERENT:
            self._rules = [rule for rule, _, _ in fits]
        return rates[0]


class _Averages:
    """The direction of Adam, RMSprop or Adagrad: an average of the gradients by the root of that of their squares."""

    def __init__(self, first: float, second: float | None) -> None:
        self._first, self._second = first, second
        self._mean: Tensor | float = 0.0
        self._square: Tensor | float = 0.0

    def direction(self, gradient: Tensor, count: int) -> Tensor:
        """The direction of an update with this gradient, the `count`-th."""
        b1, b2 = self._first, self._second
        mean = self._mean * b1 + gradient * (1 - b1)
        square = (
            self._square * b2 + gradient.square() * (1 - b2) if b2 is not None else self._square + gradient.square()
        )
        self._mean, self._square = mean, square
        if b1 and b2 is not None:  # Adam corrects the averages for their start at 0, RMSprop does not
            return mean / (1 - b1**count) / ((square / (1 - b2**count)).sqrt() + 1e-8)
        return mean / (square.sqrt() + 1e-8)


def _fit(moved: Tensor, direction: Tensor) -> tuple[float, float]:
    """The rate that fits an update by a direction best, and what it leaves unexplained."""
    square = float(direction.norm()) ** 2
    if not 0.0 < square < math.inf:
        return 0.0, math.inf
    rate = -float(moved @ direction) / square
    return rate, float((moved + rate * direction).norm())


def _multiple(moved: Tensor, direction: Tensor, rounding: float) -> float | None:
    """The rate, if an update was a multiple of a direction."""
    rate, left = _fit(moved, direction)
    return rate if left <= _FITS * float(moved.norm()) + rounding else None


def _with_momentum(moved: Tensor, before: Tensor, gradient: Tensor, rounding: float) -> float | None:
    """The rate, if an update was a share of the update before and a multiple of the gradient."""
    both = torch.stack([before, -gradient], dim=1)
    scale = both.norm(dim=0)
    if not bool(torch.isfinite(scale).all()) or not bool(scale.all()):
        return None
    # Nearly parallel directions leave the rate open.
    cosine = float(before @ gradient) / float(scale.prod())
    if abs(cosine) > 0.9999:
        return None
    share, rate = (torch.linalg.lstsq(both / scale, moved[:, None]).solution[:, 0] / scale).tolist()
    left = float((moved - share * before + rate * gradient).norm())
    size = float(moved.norm())
    fits = left <= _FITS * size + rounding and rate * float(gradient.norm()) >= _LEAST_PART * size
    return float(rate) if fits and share > 0 else None


def _is_bad(gradient: Tensor | None) -> bool:
    return gradient is not None and not is_finite(gradient)


@dataclass
class _Sample:
    """A part of one trained tensor, before the program updates it."""

    index: int
    tensor: weakref.ref[Tensor]
    values: Tensor
    gradient: Tensor


def _is_comparable(tensor: Tensor, gradient: Tensor) -> bool:
    """Whether a tensor and its gradient can be compared cheaply."""
    if gradient.shape != tensor.shape or not tensor.numel():
        return False
    return all(_is_simple(t) and t.is_contiguous() for t in (tensor, gradient))


def _is_simple(t: Tensor) -> bool:
    kind, usual = type(t), t.dtype in (torch.float32, torch.float64)
    return (kind is Tensor or kind is torch.nn.Parameter) and usual and t.is_cpu and t.layout is torch.strided


def _first(tensor: Tensor) -> Tensor:
    """Empty if its memory was freed, as `fully_shard` does with weights that are needed again later."""
    return tensor.detach().view(-1)[: _SAMPLE if tensor.untyped_storage().nbytes() else 0]
