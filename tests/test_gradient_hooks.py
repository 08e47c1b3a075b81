"""Large gradients are measured right after backward; later writes to them are still noticed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.observe.gradient_hooks import GradientNorms
from spoiled import WAYS, spoil


@pytest.fixture(autouse=True)
def _smaller_models_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("firstnan.observe.gradient_hooks._LARGE_MODEL", 1 << 20)


def large() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 1000), nn.Tanh(), nn.Linear(1000, 600, bias=False), nn.Linear(600, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def measured(shape: tuple[int, ...] = (1024, 1024)) -> tuple[nn.Parameter, GradientNorms]:
    """A parameter whose gradient, all ones, was measured when backward made it."""
    parameter = nn.Parameter(torch.zeros(shape))
    norms = GradientNorms()
    norms.watch(torch.optim.SGD([parameter]))
    parameter.sum().backward()
    return parameter, norms


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


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_what_is_written_after_backward_is_seen(how: str, layer: int) -> None:
    model, optimizer = large()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.randn(8, 600)] * 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            # Code that writes through `.data` does so with all of them.
            for weight in model.parameters() if how == "data" else [model[layer].weight]:
                spoil(how, weight)
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_gradient_that_was_clipped_has_the_norm_that_it_has_now() -> None:
    model, optimizer = large()
    detector = NaNDetector(model, optimizer)
    with detector:
        for x in detector.batches([torch.randn(8, 600)]):
            (100 * model(x)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            assert detector._session is not None
            assert detector._session.gate.norm == pytest.approx(0.5, rel=1e-3)


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


def test_what_is_known_is_not_read_again() -> None:
    parameter, norms = measured()
    unread, squares = norms.split([parameter])
    assert unread == []
    assert squares == [2.0**20]


def test_small_models_are_read_when_all_gradients_are_there() -> None:
    parameter, norms = measured((512, 512))
    assert parameter._post_accumulate_grad_hooks is None
    assert norms.split([parameter]) == ([parameter.grad], [])


def test_gradients_are_not_kept_alive() -> None:
    parameter, norms = measured()
    one = norms._measured[id(parameter)]
    assert one.version is not None
    assert one.version._tensor() is parameter.grad
    parameter.grad = None
    assert one.version._tensor() is None
    parameter.grad = torch.ones(1024, 1024)
    assert norms.split([parameter])[1] == []


@pytest.mark.parametrize("kind", ["sparse", "of a second derivative"])
def test_unusual_gradients_are_read_later(kind: str) -> None:
    parameter = nn.Parameter(torch.ones(4096, 512))
    norms = GradientNorms()
    norms.watch(torch.optim.SGD([parameter]))
    if kind == "sparse":
        nn.functional.embedding(torch.tensor([1, 5]), parameter, sparse=True).sum().backward()
    else:
        parameter.square().sum().backward(create_graph=True)
    unread, squares = norms.split([parameter])
    assert len(unread) == 1
    assert unread[0] is parameter.grad
    assert squares == []
    parameter.grad = None  # a gradient with a graph holds on to its own parameter


def test_hooks_of_models_that_are_gone_are_forgotten() -> None:
    norms = GradientNorms()
    for _ in range(5):
        norms.watch(torch.optim.SGD([nn.Parameter(torch.zeros(1024, 1024))]))
    assert len(norms._measured) == 1


@pytest.mark.parametrize("factor", [0.5, math.nan])
def test_a_write_through_data_invalidates_the_measurement(factor: float) -> None:
    parameter, norms = measured()
    assert parameter.grad is not None
    parameter.grad.data.mul_(factor)
    assert norms.split([parameter])[1] == []


def written_again(steps: int, clips: str, micro: int) -> GradientNorms:
    """Trains with `micro` backwards a step, and with clipping after them or not."""
    model, optimizer = large()
    with NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.randn(8, 600)] * steps):
            optimizer.zero_grad()
            for _ in range(micro):
                model(x).square().mean().backward()
            if clips == "by hand":
                torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
            elif clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert detector._session is not None
        found = detector._session.gate.gradient_norms
        hooked = any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert hooked == bool(found._measured)
    return found


@pytest.mark.parametrize(
    ("clips", "micro", "useless"), [("", 1, False), ("by hand", 1, True), ("by norm", 1, True), ("", 4, True)]
)
def test_measuring_stops_if_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, clips: str, micro: int, useless: bool
) -> None:
    monkeypatch.setattr("firstnan.observe.gradient_hooks._TRIAL", 8)
    assert written_again(12, clips, micro)._useless == useless


def test_gradients_that_arrive_after_their_group_are_read_later() -> None:
    first, second = nn.Parameter(torch.ones(600, 600)), nn.Parameter(torch.ones(1000, 1000))
    norms = GradientNorms()
    norms.watch(torch.optim.SGD([second, first]))  # the group of the first ends with the second
    (second.sum() * 2).backward()
    first.sum().backward()
    unread, squares = norms.split([first, second])
    assert len(unread) == 1
    assert unread[0] is first.grad
    assert squares == [4e6]
