"""Most steps of a tiny model need only a quick check; anything unusual gets the full one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.gate.gradient_checks import QuickCheck


def tiny() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def gradients(model: nn.Module, size: float) -> list[torch.Tensor]:
    for p in model.parameters():
        p.grad = torch.full_like(p, size)
    return [p.grad for p in model.parameters() if p.grad is not None]


def experienced(model: nn.Module, optimizer: Any) -> QuickCheck:
    """A quick check after 64 healthy steps; the next full check is due 64 steps later."""
    quick_check = QuickCheck()
    for _ in range(64):
        assert not quick_check.passes(optimizer, 1.0)
        quick_check.learn(optimizer, gradients(model, 1.0), 1.0)
    return quick_check


def test_a_usual_step_passes_once_enough_were_seen() -> None:
    model, optimizer = tiny()
    assert experienced(model, optimizer).passes(optimizer, 1.0)


@pytest.mark.parametrize("loss", [1.6, -1.6, math.nan, math.inf, None])
def test_an_unusual_loss_does_not_pass(loss: float | None) -> None:
    model, optimizer = tiny()
    assert not experienced(model, optimizer).passes(optimizer, loss)


@pytest.mark.parametrize("size", [4.1, -4.1, math.nan, math.inf])
def test_unusual_gradients_do_not_pass(size: float) -> None:
    model, optimizer = tiny()
    quick_check = experienced(model, optimizer)
    gradients(model, size)
    assert not quick_check.passes(optimizer, 1.0)


def test_another_learning_rate_does_not_pass() -> None:
    model, optimizer = tiny()
    quick_check = experienced(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    assert not quick_check.passes(optimizer, 1.0)


def test_every_64th_step_gets_the_full_check() -> None:
    model, optimizer = tiny()
    quick_check = experienced(model, optimizer)
    passed = [quick_check.passes(optimizer, 1.0) for _ in range(192)]
    assert [i for i, p in enumerate(passed) if not p] == [63, 127, 191]


def test_many_or_large_or_odd_gradients_never_pass() -> None:
    odd = [
        nn.Linear(3, 2).double(),
        nn.Linear(600, 600),
        nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(33)),
    ]
    for model in odd:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        quick_check = experienced(model, optimizer)
        assert not quick_check.passes(optimizer, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_element_trips_in_a_step_that_would_have_passed(value: float) -> None:
    model, optimizer = tiny()
    data = torch.randn(4, 3)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for i, x in enumerate(detector.batches([data] * 90)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert model.weight.grad is not None
            if i == 70:
                before = model.weight.detach().clone()
            if i >= 70:
                model.weight.grad[1, 2] = value
            optimizer.step()
    assert caught.value.report.step == 70
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("layers", [1, 6])
def test_a_bias_is_not_overlooked(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    quick_check = experienced(model, optimizer)
    assert quick_check.passes(optimizer, 1.0)
    bias = model[-1].bias
    assert bias.grad is not None
    bias.grad[1] = math.nan
    assert not quick_check.passes(optimizer, 1.0)
