"""The learning rate of updates that a program writes itself, read from the weights and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firstnan.gate.by_hand import HandWritten

STEPS = 30
Update = Callable[[Tensor, float, int, dict[str, Tensor]], None]


def rates_read(update: Update, rate: Callable[[int], float], size: int = 40) -> list[float | None]:
    """What is read of a rate in every step of a training with this update."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, generator=generator)
    watched, state, found = HandWritten(), {}, []
    for step in range(STEPS):
        weight.grad = weight * torch.rand(size, generator=generator) + torch.randn(size, generator=generator)
        watched.note([weight], [weight.grad])
        update(weight, rate(step), step + 1, state)
        found.append(watched.rate())
    return found


def plain(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    assert weight.grad is not None
    weight -= rate * weight.grad


def momentum(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    assert weight.grad is not None
    state["v"] = 0.9 * state.get("v", torch.zeros_like(weight)) + weight.grad
    weight -= rate * state["v"]


def adam(weight: Tensor, rate: float, count: int, state: dict[str, Tensor], b1: float = 0.9, b2: float = 0.999) -> None:
    assert weight.grad is not None
    m = state["m"] = b1 * state.get("m", torch.zeros_like(weight)) + (1 - b1) * weight.grad
    v = state["v"] = b2 * state.get("v", torch.zeros_like(weight)) + (1 - b2) * weight.grad**2
    weight -= rate * (m / (1 - b1**count)) / ((v / (1 - b2**count)).sqrt() + 1e-8)


def adam_of_gans(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    adam(weight, rate, count, state, 0.5, 0.999)


def rmsprop(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    assert weight.grad is not None
    v = state["v"] = 0.99 * state.get("v", torch.zeros_like(weight)) + 0.01 * weight.grad**2
    weight.addcdiv_(weight.grad, v.sqrt().add_(1e-8), value=-rate)


def adagrad(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    assert weight.grad is not None
    v = state["v"] = state.get("v", torch.zeros_like(weight)) + weight.grad**2
    weight -= rate * weight.grad / (v.sqrt() + 1e-10)


def adam_without_corrected_eps(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    assert weight.grad is not None
    m, v = state.setdefault("m", torch.zeros_like(weight)), state.setdefault("v", torch.zeros_like(weight))
    m.mul_(0.9).add_(weight.grad, alpha=0.1)
    v.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
    size = rate * math.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    weight.addcdiv_(m, v.sqrt().add_(1e-8), value=-size)


def the_same(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    weight -= rate * torch.arange(len(weight))


def noise(weight: Tensor, rate: float, count: int, state: dict[str, Tensor]) -> None:
    weight -= rate * torch.randn(weight.shape, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("update", [plain, momentum, adam, adam_of_gans, rmsprop, adagrad, adam_without_corrected_eps])
@pytest.mark.parametrize("factor", [1.0, 1.3], ids=["constant", "rising"])
def test_the_rate_in_use_is_read(update: Update, factor: float) -> None:
    found = rates_read(update, lambda step: 0.01 * factor**step)
    told = [(step, rate) for step, rate in enumerate(found) if rate is not None]
    assert [rate for _, rate in told] == [pytest.approx(0.01 * factor**step, rel=0.02) for step, _ in told]
    assert len(told) >= STEPS - 3  # in the first updates several rules agree


@pytest.mark.parametrize("update", [noise, the_same])
def test_no_rate_is_read_of_an_update_by_another_rule(update: Update) -> None:
    assert rates_read(update, lambda step: 0.01) == [None] * STEPS


def test_the_rule_of_a_single_number_is_not_guessed() -> None:
    assert all(rate is None or rate > 0 for rate in rates_read(plain, lambda step: 0.01, size=1))
