"""Updates that may produce non-finite weights by themselves, and updates that cannot."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import is_risky, is_safe

Make = Callable[[Any], optim.Optimizer]
PROVEN: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD foreach": lambda p: optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "AdamW fused": lambda p: optim.AdamW(p, 0.01, fused=True),
}
OTHERS: dict[str, Make] = {
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "Adafactor": lambda p: optim.Adafactor(p, 0.01),
    "LBFGS": lambda p: optim.LBFGS(p, 0.1),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
}


def with_gradients(make: Make, steps: int = 2, dtype: torch.dtype = torch.float32) -> optim.Optimizer:
    """In the middle of a training: there are states, and gradients for the next update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).to(dtype)
    optimizer = make(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.randn(5, 4, dtype=dtype)).pow(2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    closure()
    return optimizer


def first_state(optimizer: optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = next(iter(optimizer.state.values()))
    return state


# Risky updates.


@pytest.mark.parametrize("name", [*PROVEN, *OTHERS])
def test_usual_settings_are_not_risky(name: str) -> None:
    optimizer = with_gradients((PROVEN | OTHERS)[name])
    assert not is_risky(optimizer, 1e3)
    assert not is_risky(optimizer, None)
    assert is_risky(optimizer, 1e16)
    assert is_risky(optimizer, nan)


@pytest.mark.parametrize(
    ("settings", "risky"),
    [
        ({"lr": inf}, True),
        ({"lr": torch.tensor(nan)}, True),
        ({"lr": torch.tensor(1e-3)}, False),
        ({"lr": 1e20}, True),
        ({"eps": 0}, True),
        ({"eps": nan}, True),
        ({"eps": 1e-30}, False),
        ({"betas": (0.9, 1.0)}, True),
        ({"betas": (0.9, nan)}, True),
        ({"weight_decay": inf}, True),
        ({"growth_rate": inf}, False),  # no setting of torch's own
    ],
)
def test_settings_that_make_an_update_risky(settings: dict[str, Any], risky: bool) -> None:
    optimizer = optim.Adam(nn.Linear(2, 2).parameters())
    optimizer.param_groups[0].update(settings)
    assert is_risky(optimizer, 1.0) == risky


def test_adam_in_float16_divides_by_an_eps_that_is_zero() -> None:
    model = nn.Linear(2, 2).half()
    optimizer = optim.Adam(model.parameters(), foreach=False)
    assert is_risky(optimizer, 1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert model.weight.isnan().all()  # which is why
    assert not is_risky(optim.Adam(model.parameters(), eps=1e-4), 1.0)
    assert is_risky(optim.Adam(model.parameters(), eps=1e-4), 300.0)  # squares overflow


# Safe updates.


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", PROVEN)
def test_usual_updates_are_safe(name: str, steps: int) -> None:
    assert is_safe(with_gradients(PROVEN[name], steps), 1.0)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_is_known_of_other_optimizers(name: str) -> None:
    assert not is_safe(with_gradients(OTHERS[name]), 1.0)


def test_nothing_is_known_of_what_inherits_from_one_of_them() -> None:
    class Own(optim.Adam):
        pass

    assert not is_safe(with_gradients(Own), 1.0)


@pytest.mark.parametrize("norm", [None, nan, inf, 1e6, 1e20])
def test_not_with_large_or_unknown_gradients(norm: float | None) -> None:
    assert not is_safe(with_gradients(PROVEN["Adam"]), norm)


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": inf}, {"lr": nan}, {"lr": 11.0}, {"lr": -11.0}, {"lr": torch.tensor(0.1)}, {"eps": 0.0}, {"eps": 1e-20},
        {"eps": nan}, {"betas": (0.9, 1.0)}, {"betas": (1.0, 0.9)}, {"betas": (-0.1, 0.9)}, {"betas": (0.9, nan)},
        {"weight_decay": 1e3}, {"weight_decay": nan}, {"differentiable": True},
    ],
)  # fmt: skip
def test_not_with_extreme_settings(settings: dict[str, Any]) -> None:
    optimizer = with_gradients(PROVEN["Adam"])
    optimizer.param_groups[-1].update(settings)
    assert not is_safe(optimizer, 1.0)


@pytest.mark.parametrize("value", [nan, inf, 1e16, 1e30])
@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq", "weight", "bias of the last layer"])
def test_not_with_bad_or_huge_weights_and_states(which: str, value: float) -> None:
    optimizer = with_gradients(PROVEN["Adam"])
    weights = optimizer.param_groups[0]["params"]
    target = {"weight": weights[0], "bias of the last layer": weights[-1]}.get(which)
    if target is None:
        target = first_state(optimizer)[which]
    with torch.no_grad():
        target.view(-1)[-1] = value
    assert not is_safe(optimizer, 1.0)


def test_not_with_a_negative_square() -> None:
    """Nobody computes one; a file that is loaded may hold one."""
    optimizer = with_gradients(PROVEN["Adam amsgrad"])
    assert is_safe(optimizer, 1.0)
    saved = optimizer.state_dict()
    saved["state"][0]["max_exp_avg_sq"] = -torch.ones(3, 4)
    optimizer.load_state_dict(saved)
    assert not is_safe(optimizer, 1.0)
    assert not is_safe(optimizer, 1.0)


def test_a_weight_without_a_gradient_has_no_part_in_it() -> None:
    optimizer = with_gradients(PROVEN["Adam"])
    with torch.no_grad():
        weight = optimizer.param_groups[0]["params"][0]
        weight[0, 0], weight.grad = inf, None
    assert is_safe(optimizer, 1.0)


@pytest.mark.parametrize("hook", ["register_step_pre_hook", "register_step_post_hook"])
def test_not_with_hooks_of_the_program(hook: str) -> None:
    optimizer = with_gradients(PROVEN["SGD"])
    getattr(optimizer, hook)(lambda *_: None)
    assert not is_safe(optimizer, 1.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_only_ordinary_tensors(dtype: torch.dtype) -> None:
    assert not is_safe(with_gradients(PROVEN["SGD"], dtype=dtype), 1.0)


def test_not_with_sparse_gradients() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optim.SGD(table.parameters(), 0.1)
    table(torch.tensor([1, 2])).sum().backward()
    assert not is_safe(optimizer, 1.0)


def test_not_where_a_scaler_leaves_the_decision_to_the_update() -> None:
    optimizer: Any = with_gradients(PROVEN["AdamW fused"])
    optimizer.found_inf = torch.tensor(0.0)
    assert not is_safe(optimizer, 1.0)


class Finite(TorchDispatchMode):
    """Every result of every operator is finite."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, list | tuple) else [out]:
            assert not isinstance(value, Tensor) or is_finite(value), func
        for value in args[0] if args and isinstance(args[0], list) else args[:1]:
            assert not isinstance(value, Tensor) or is_finite(value), func
        self.operators += 1
        return out


ADAM = {
    "lr": [10.0, -10.0, 1e-3], "eps": [1e-10, 1e-8], "weight_decay": [10.0, 0.0],
    "betas": list(itertools.product([0.0, 0.9, 0.99999], repeat=2)), "amsgrad": [False, True],
    "maximize": [False, True], "foreach": [False, True],
}  # fmt: skip
SGD = {
    "lr": [10.0, -10.0, 1e-3], "momentum": [10.0, 0.9, 0.0], "weight_decay": [10.0, 0.0],
    "dampening": [0.0, 10.0, -10.0], "maximize": [False, True], "foreach": [False, True],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(150))
def test_a_safe_update_stays_finite_in_every_operator_at_the_ends_of_what_is_allowed(seed: int) -> None:
    pick = random.Random(seed)
    kind: Any = pick.choice([optim.SGD, optim.Adam, optim.AdamW])
    settings = {name: pick.choice(values) for name, values in (SGD if kind is optim.SGD else ADAM).items()}
    weight = nn.Parameter(torch.zeros(64))
    optimizer = kind([weight], **settings | {"lr": 0.1})
    weight.grad = torch.zeros(64)
    optimizer.step()  # makes the states
    optimizer.param_groups[0]["lr"] = settings["lr"]

    def extreme(*sizes: float) -> Tensor:
        signs = torch.tensor([pick.choice([-1.0, 1.0, 0.0]) for _ in range(64)])
        return signs * pick.choice(sizes)

    weight.data = extreme(3e13, 1.0)
    weight.grad = extreme(1e5, 1e-18, 1e-38)
    for name, value in optimizer.state[weight].items():
        if name == "step":
            value.fill_(pick.choice([0.0, 1.0, 1e6]))
        elif isinstance(value, Tensor):
            value.copy_(extreme(3e13, 1e-40, 0.0).abs() if "sq" in name else extreme(3e13, 1e-40, 1.0))
    assert is_safe(optimizer, torch.linalg.vector_norm(weight.grad).item())
    with Finite() as mode:
        optimizer.step()
    assert mode.operators > 0
    assert isfinite(weight.detach().double().norm().item())
