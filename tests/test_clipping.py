"""A program that clips has measured its gradients: they are not read again, unless someone has written to them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from firstnan import NaNDetector, NonFiniteError
from firstnan.gate.gate import Gate
from firstnan.gate.gradient_checks import Clipping
from firstnan.tensors.finite import TensorVersion
from spoiled import WAYS, spoil


def training(width: int = 1200) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 600), nn.Tanh(), nn.Linear(600, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def gate_of(detector: NaNDetector) -> Gate:
    assert detector._session is not None
    return detector._session.gate


def whole_norm(model: nn.Module) -> float:
    return math.hypot(*(p.grad.norm().item() for p in model.parameters() if p.grad is not None))


def run(clip: Callable[[nn.Module], object], steps: int = 3) -> tuple[list[bool], list[float]]:
    """Whether the gate knew the norm without reading, and how far it was from the true one, in each step."""
    model, optimizer = training()
    known, off = [], []
    with NaNDetector(model, optimizer) as detector:
        gate = gate_of(detector)
        for x in detector.batches([torch.randn(8, 1200)] * steps):
            optimizer.zero_grad()
            (30 * model(x)).square().mean().backward()
            clip(model)
            known.append(gate.clipping.norm_of(list(model.parameters())) is not None)
            true = whole_norm(model)
            optimizer.step()
            assert gate.norm is not None
            off.append(abs(gate.norm - true) / true)
    return known, off


@pytest.mark.parametrize("limit", [0.5, 1, 1e9, math.inf, torch.tensor(2.0)])
def test_the_norm_is_that_of_the_clipped_gradients(limit: float) -> None:
    known, off = run(lambda model: clip_grad_norm_(model.parameters(), limit))
    assert known == [True] * 3
    assert max(off) < 1e-3


def test_clipped_gradients_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = training()
    read: list[list[Tensor]] = []
    monkeypatch.setattr("firstnan.gate.gate.plain_norm", lambda tensors: read.append(tensors) or 1.0)
    with NaNDetector(model, optimizer) as detector:
        for number, x in enumerate(detector.batches([torch.randn(8, 1200)] * 2)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if number == 1:
                clip_grad_norm_(model.parameters(), 1.0)
            gradients = {id(p.grad) for p in model.parameters()}
            read.clear()
            optimizer.step()
            assert any(id(t) in gradients for tensors in read for t in tensors) == (number == 0)


@pytest.mark.parametrize(
    ("what", "clip"),
    [
        ("another norm", lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type=1)),
        ("the largest", lambda m: clip_grad_norm_(m.parameters(), 0.5, norm_type=math.inf)),
        ("values", lambda m: clip_grad_value_(m.parameters(), 0.01)),
        ("a part", lambda m: clip_grad_norm_(m[0].parameters(), 0.5)),
        ("one by one", lambda m: [clip_grad_norm_(p, 0.5) for p in m.parameters()]),
        ("a norm of something else", lambda m: clip_grads_with_norm_(m.parameters(), 0.5, torch.tensor(3.0))),
        ("by hand", lambda m: [p.grad.mul_(0.1) for p in m.parameters()]),
        ("by hand, afterwards", lambda m: (clip_grad_norm_(m.parameters(), 0.5), m[0].weight.grad.mul_(2))),
    ],
)
def test_what_is_not_known_is_read(what: str, clip: Callable[[nn.Module], object]) -> None:
    known, off = run(clip)
    assert known == [False] * 3, what
    assert max(off) < 1e-3


def must_be_seen(
    before_clipping: Callable[[nn.Module], object], limit: float, after: Callable[[nn.Module], object]
) -> None:
    """What is done to the gradients trips the gate, and the update is not written."""
    model, optimizer = training()
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        for x in detector.batches([torch.randn(8, 1200)] * 2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before_clipping(model)
            clip_grad_norm_(model.parameters(), limit)
            after(model)
            optimizer.step()
    assert all(map(torch.equal, model.parameters(), weights))


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("layer", [0, 2])
def test_what_is_written_after_clipping_is_seen(how: str, layer: int) -> None:
    must_be_seen(lambda _: None, 1.0, lambda model: spoil(how, model[layer].weight))


def test_what_was_bad_before_clipping_is_seen() -> None:
    must_be_seen(lambda model: spoil("in place", model[0].weight), 1.0, lambda _: None)


def test_a_limit_that_is_not_a_number_is_seen() -> None:
    must_be_seen(lambda _: None, math.nan, lambda _: None)


def test_a_norm_that_was_changed_is_not_believed() -> None:
    clipping, parameter = Clipping(), nn.Parameter(torch.zeros(1024, 1024))
    parameter.grad = torch.ones(1024, 1024)
    norm = get_total_norm([parameter.grad])
    clipping.norm_computed([parameter.grad], norm)
    norm.add_(1)  # as after a sum over processes
    clipping.gradients_clipped([parameter], 1.0, norm)
    assert clipping.norm_of([parameter]) is None


def test_a_norm_of_other_gradients_is_not_believed() -> None:
    clipping = Clipping()
    one, other = (nn.Parameter(torch.zeros(1024, 1024)) for _ in range(2))
    for parameter in (one, other):
        parameter.grad = torch.ones(1024, 1024)
    assert one.grad is not None
    norm = get_total_norm([one.grad])
    clipping.norm_computed([one.grad], norm)
    clipping.gradients_clipped([one, other], 1.0, norm)
    clipping.gradients_clipped([other], 1.0, norm)
    assert clipping.norm_of([one, other]) is None
    assert clipping.norm_of([other]) is None
    clipping.gradients_clipped([one], 1.0, norm)
    assert clipping.norm_of([one]) == pytest.approx(1.0)


def test_the_norm_of_more_than_an_optimizer_trains_is_not_its_own() -> None:
    clipping = Clipping()
    parameters = [nn.Parameter(torch.zeros(512, 512)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(512, 512)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = get_total_norm(gradients)
    clipping.norm_computed(gradients, norm)
    clipping.gradients_clipped(parameters, 1e9, norm)
    assert clipping.norm_of(parameters) == pytest.approx(2**9.5)
    assert clipping.norm_of(parameters[:1]) is None


@pytest.mark.parametrize(("value", "limit"), [(math.inf, 1.0), (1e30, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_norms_that_say_nothing(value: float, limit: float) -> None:
    clipping, parameter = Clipping(), nn.Parameter(torch.zeros(1024, 1024))
    parameter.grad = torch.ones(1024, 1024)
    parameter.grad[-1, -1] = value
    norm = get_total_norm([parameter.grad])
    clipping.norm_computed([parameter.grad], norm)
    clipping.gradients_clipped([parameter], limit, norm)
    assert clipping.norm_of([parameter]) is None


def test_two_optimizers_that_clip_before_both_updates() -> None:
    one, first = training()
    other, second = training()
    with NaNDetector(nn.ModuleList([one, other]), [first, second]) as detector:
        gate = gate_of(detector)
        for x in detector.batches([torch.randn(8, 1200)] * 2):
            first.zero_grad()
            second.zero_grad()
            (one(x).square().mean() + 50 * other(x).square().mean()).backward()
            clip_grad_norm_(one.parameters(), 1e-3)
            clip_grad_norm_(other.parameters(), 1e-2)
            first.step()
            assert gate.norm == pytest.approx(1e-3, rel=1e-2)
            second.step()
            assert gate.norm == pytest.approx(1e-2, rel=1e-2)


def test_gradients_are_not_kept_alive_and_little_is_remembered() -> None:
    model, optimizer = training()
    with NaNDetector(model, optimizer) as detector:
        for _ in range(20):
            model(torch.randn(8, 1200)).square().mean().backward()
            clip_grad_norm_(model.parameters(), 1.0)
        records = gate_of(detector).clipping._clipped
        assert 0 < len(records) < 20
        optimizer.zero_grad()
        assert all(one._tensor() is None for known, _ in records for one in known.values())


def test_nothing_is_left_in_torch() -> None:
    module = torch.nn.utils.clip_grad
    before = module._get_total_norm, module._clip_grads_with_norm_
    with NaNDetector(*training()):
        assert module._get_total_norm is not before[0]
    assert (module._get_total_norm, module._clip_grads_with_norm_) == before


def test_clipping_gives_the_same_numbers_and_the_same_warning() -> None:
    results, told = [], []
    for watched in (False, True):
        model, optimizer = training()
        detector = NaNDetector(model, optimizer)
        if watched:
            detector.attach()
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            (30 * model(torch.ones(2, 1200))).square().mean().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clip_grad_norm_((p for p in ()), 1.0)
        told.append([str(w.message) for w in caught])  # "empty generator"; nothing in torch 2.6
        with pytest.raises(RuntimeError, match="non-finite"):
            model[0].weight.grad.fill_(math.nan)
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        detector.detach()
        results.append([*norms, *model.parameters()])
    assert all(map(torch.equal, *results))
    assert told[0] == told[1]


def test_an_alias_is_not_the_tensor_that_was_looked_at() -> None:
    t = torch.ones(3)
    seen = TensorVersion(t)
    assert seen.is_unchanged(t)
    assert not seen.is_unchanged(t.detach())
    assert not seen.is_unchanged(torch.ones(3))
    assert TensorVersion(empty := torch.ones(0)).is_unchanged(empty)
