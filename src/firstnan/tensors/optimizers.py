"""What an optimizer trains, its settings, and which of its updates are known to be safe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW
from torch.utils.weak import WeakIdKeyDictionary

from firstnan.tensors.finite import is_plain, norms, plain_norm, readable

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


# Above the first, squares overflow; below the second, eps rounds to zero. bfloat16 has the range of float32.
_HALF_LIMITS = (128.0, 3e-8)
_LIMITS = (1e15, 1e-45)
_RISKY_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "alpha", "rho")

# With settings, gradients, weights and states within these bounds, no operator of these three can overflow float32.
_PROVEN = (SGD, Adam, AdamW)
_LARGEST_GRADIENT = 1e6
_LARGEST_STATE = 1e15
_LARGEST_SETTING = 10.0
_LEAST_EPS = 1e-10
_LARGEST_BETA = 0.99999


def is_torch_optimizer(optimizer: Any) -> bool:
    """Whether this is an optimizer of torch itself, whose updates stay finite with usual settings and gradients."""
    return type(optimizer).__module__.startswith("torch.optim")


def is_risky(optimizer: Any, grad_norm: float | None) -> bool:
    """Whether finite gradients may still give a non-finite update, judged quickly by their norm and the settings."""
    for group in optimizer.param_groups:
        parameters = group["params"]
        half = bool(parameters) and parameters[0].dtype is torch.float16
        largest, least_eps = _HALF_LIMITS if half else _LIMITS
        if grad_norm is not None and not grad_norm < largest:
            return True
        for name in _RISKY_SETTINGS:
            value = group.get(name)
            if value is not None and not -largest < _number(value) < largest:
                return True
        # Adafactor's eps is a pair.
        if isinstance(eps := group.get("eps"), float | int) and not least_eps < eps < largest:
            return True
        for beta in group.get("betas", ()):
            if not -1.0 < _number(beta) < 1.0:
                return True
    return False


def _number(value: Any) -> float:
    """The value of a setting; 0 if it is not a number, or if reading it would wait for a device."""
    if isinstance(value, float | int):
        return value
    return value.item() if isinstance(value, Tensor) and value.is_cpu and value.numel() == 1 else 0.0


def is_safe(optimizer: Any, grad_norm: float | None) -> bool:
    """Whether every operator of this update is certain to stay finite, given its inputs and settings."""
    if type(optimizer) not in _PROVEN or grad_norm is None or not grad_norm < _LARGEST_GRADIENT:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False  # The program's own hooks may do anything.
    if getattr(optimizer, "found_inf", None) is not None or not all(map(_has_usual_settings, optimizer.param_groups)):
        return False  # With `found_inf` the gradients were not checked: the scaler leaves that to the update.
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not all(is_plain(p.grad) for p in trained):
        return False
    states = [item for p in trained for item in optimizer.state.get(p, {}).items() if isinstance(item[1], Tensor)]
    with torch.no_grad():
        size = plain_norm(trained + [value for name, value in states if name != "step"])
    if size is None or not size < _LARGEST_STATE:
        return False
    return all(_is_nonnegative(value) for name, value in states if name.endswith("_sq"))


_nonnegative: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Mean squares known to have no negative element. Updates keep them that way, so each is read once."""


def _is_nonnegative(square: Tensor) -> bool:
    known = square in _nonnegative
    if not known and (square.numel() == 0 or square.min() >= 0):
        known = _nonnegative[square] = True
    return known


def _has_usual_settings(group: dict[str, Any]) -> bool:
    settings = [group.get(name, 0.0) for name in _RISKY_SETTINGS]
    if not all(isinstance(value, float | int) and abs(value) <= _LARGEST_SETTING for value in settings):
        return False
    betas = group.get("betas", ())
    if not all(isinstance(beta, float | int) and 0.0 <= beta <= _LARGEST_BETA for beta in betas):
        return False
    return bool(group.get("eps", 1.0) >= _LEAST_EPS) and not group.get("differentiable")
