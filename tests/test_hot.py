"""Large gradients are measured while they are hot; what is written to them afterwards is seen all the same."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.hot import HotGradients


def large() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def test_the_norm_is_that_of_all_gradients() -> None:
    model, optimizer = large()
    detector = NaNDetector(model, optimizer)
    with detector:
        for x in detector.batches([torch.randn(8, 600)] * 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            whole = math.hypot(*(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
            optimizer.step()
            assert detector._session is not None
            assert detector._session.gate.norm == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("write", ["in place", "replaced", "accumulated", "through a view"])
def test_what_is_written_after_backward_is_seen(write: str) -> None:
    model, optimizer = large()
    weight = model[0].weight
    before = weight.detach().clone()
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.randn(8, 600)] * 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            assert weight.grad is not None
            if write == "in place":
                weight.grad[3, 3] = math.inf
            elif write == "replaced":
                weight.grad = weight.grad / 0
            elif write == "accumulated":
                (weight * torch.full_like(weight, math.nan)).sum().backward()
            else:
                weight.grad.view(-1)[7:8].log_().sub_(math.inf)
            optimizer.step()
    assert torch.equal(weight, before)


def test_nothing_is_left_on_the_parameters() -> None:
    model, optimizer = large()
    with NaNDetector(model, optimizer):
        assert model[0].weight._post_accumulate_grad_hooks
        assert model[0].bias._post_accumulate_grad_hooks is None  # small ones are read with the others
    assert all(p._post_accumulate_grad_hooks is None for p in model.parameters())


def test_hooks_of_the_program_stay() -> None:
    model, optimizer = large()
    seen: list[int] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(1))
    with NaNDetector(model, optimizer):
        model(torch.randn(2, 600)).sum().backward()
    model(torch.randn(2, 600)).sum().backward()
    assert seen == [1, 1]


def test_gradients_are_not_kept_alive() -> None:
    hot = HotGradients()
    parameter = nn.Parameter(torch.ones(600, 600))
    parameter.grad = torch.ones(600, 600)
    hot.measure(parameter)
    gradient = parameter.grad
    assert hot.sorted([parameter]) == ([gradient], [], [600.0])
    del gradient
    parameter.grad = None
    assert hot._squares[id(parameter)][0]() is None
    parameter.grad = torch.ones(600, 600)
    assert hot.sorted([parameter])[1:] == ([parameter.grad], [])
