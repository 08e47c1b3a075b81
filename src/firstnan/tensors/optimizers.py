"""Optimizers: their parameters, gradients and settings; and the leaves of an autograd graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from firstnan.tensors.finite import norms, readable

_SETTINGS = (
    "lr",
    "initial_lr",
    "eps",
    "betas",
    "momentum",
    "weight_decay",
    "alpha",
    "rho",
    "max_iter",
    "amsgrad",
    "nesterov",
    "maximize",
)


def largest_gradient(optimizer: Any) -> tuple[Tensor, float]:
    """The parameter with the largest gradient norm, and its share of the squared norm of all gradients."""
    found = [(p, g) for p in parameters_of(optimizer) if (g := readable(p.grad)) is not None and g.numel()]
    sizes = norms([g.double() for _, g in found]).tolist()
    at = max(range(len(sizes)), key=sizes.__getitem__)
    # Relative to the largest one, so nothing overflows.
    return found[at][0], 1 / math.hypot(*(size / sizes[at] for size in sizes)) ** 2 if sizes[at] else math.nan


def drop_gradients(optimizer: Any) -> None:
    """Makes the next update of this optimizer a no-op."""
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def describe(optimizer: Any) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """The optimizer's class name, and the settings of its first parameter group."""
    group = optimizer.param_groups[0] if optimizer.param_groups else {}
    settings = []
    for name in _SETTINGS:
        value = group.get(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if value is not None:
            settings.append((name, list(value) if isinstance(value, tuple) else value))
    return type(optimizer).__name__, tuple(settings)


def reaches(roots: list[Tensor], parameters: set[int]) -> bool:
    """Whether one of these parameters (by id) is in the graph below the roots."""
    return any(id(leaf) in parameters for leaf in leaves_below(roots))


def graph_leaves(roots: list[Tensor]) -> list[Tensor]:
    """Every leaf tensor below these roots that requires a gradient and has one."""
    return [leaf for leaf in leaves_below(roots) if leaf.grad is not None]


def leaves_below(roots: list[Tensor]) -> Iterator[Tensor]:
    """Every leaf tensor below these roots that requires a gradient."""
    seen: set[Any] = set()
    stack: list[Any] = [r.grad_fn for r in roots if r.grad_fn is not None]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        stack += [n for n, _ in node.next_functions]


def parameters_of(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def learning_rate_of(optimizer: Any) -> float | None:
    value = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
    return float(value) if value is not None else None
