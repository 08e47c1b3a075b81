"""Parts of a model that run in threads of their own: the right layer and line, or none."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import firstnan
from firstnan import NaNDetector, NonFiniteError
from firstnan.tracing.tracer import Tracer

pytestmark = pytest.mark.slow


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Root(nn.Module):
    """Its result is finite for all numbers, its gradient is not."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x.clamp_min(0.0))


class Towers(nn.Module):
    """Two towers, each in a thread; the second one fails where its input is negative."""

    def __init__(self, how: str, last: type[nn.Module]) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.right = nn.Sequential(nn.Identity(), last(), nn.Linear(4, 1))
        self.how, self.pool = how, ThreadPoolExecutor(2)
        both = threading.Barrier(2)
        list(self.pool.map(lambda _: both.wait(), range(2)))  # so that both of its threads are running

    def forward(self, x: Tensor) -> Tensor:
        towers: list[nn.Module] = [self.left, self.right]
        if self.how == "pool":
            first, second = self.pool.map(lambda tower: tower(x), towers)
            return first + second
        found: dict[int, Tensor] = {}

        def run(i: int) -> None:
            found[i] = towers[i](x)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found[0] + found[1]


def given() -> list[Tensor]:
    torch.manual_seed(0)
    found = [torch.rand(8, 4) + 0.1 for _ in range(8)]
    found[5][3, 1] = -5.0
    return found


def trained(how: str, last: type[nn.Module], plain: bool, **options: Any) -> tuple[NaNDetector, NonFiniteError]:
    model = Towers(how, last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, **options) as detector:
        for x in given() if plain else detector.batches(given()):
            x = x.clone().requires_grad_(last is Root)
            loss = (model(x) - 1).square().mean()
            if last is Root:
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().mean() * 0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return detector, caught.value


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("how", ["pool", "threads"])
def test_the_layer_that_runs_in_a_thread_is_named(how: str, plain: bool) -> None:
    detector, error = trained(how, Log, plain, layers=True)
    origin = error.report.origin
    assert origin is not None
    assert (origin.module, origin.module_type, origin.site.code) == ("right.1", "Log", "torch.log(x)")
    assert error.report.cause.slug == "log_of_negative"
    first = next(event for event in detector.events if event.layer_type)
    assert (first.layer, first.step, first.what) == ("right.1", 5, "output")


def test_the_line_of_a_gradient_that_goes_back_through_a_thread() -> None:
    """Autograd numbers its nodes in each thread from 0, so the numbers alone do not tell which line made one."""
    _, error = trained("threads", Root, plain=True)
    origin = error.report.origin
    assert origin is not None
    assert (origin.phase, origin.module, origin.site.code) == ("backward", "right.1", "torch.sqrt(x.clamp_min(0.0))")


def test_a_thread_that_was_running_already_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the program's own process its pool has its threads from before; nothing is invented about them."""
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "off")
    _, error = trained("pool", Log, plain=False)
    assert (error.report.origin, error.report.cause) == (None, None)
    assert any("in a thread that was running already" in note for note in error.report.notes)


@pytest.mark.parametrize(("how", "found"), [("threads", "torch.log(x)"), ("pool", "reads it first")])
def test_a_traced_block(how: str, found: str) -> None:
    model, (*_, bad) = Towers(how, Log), given()[:6]
    with pytest.raises(NonFiniteError) as caught, firstnan.trace():
        model(bad).mean().backward()
    assert found in str(caught.value)


@pytest.mark.parametrize("how", ["pool", "threads"])
def test_healthy_towers_stay_as_they_are(how: str) -> None:
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Towers(how, nn.Tanh)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        detector = NaNDetector(model, optimizer, layers=True)
        if watched:
            detector.attach()
        for x in given():
            optimizer.zero_grad()
            (model(x) - 1).square().mean().backward()
            optimizer.step()
        detector.detach()
        weights.append([p.detach().clone() for p in model.parameters()])
        assert list(detector.events) == []
    assert all(map(torch.equal, *weights))


def test_the_nodes_of_two_threads_are_told_apart() -> None:
    x = torch.rand(3, requires_grad=True)
    made: list[Tensor] = []
    with Tracer(helpers=True) as tracer:
        for work in (torch.sqrt, torch.exp):  # one after the other: each would begin with the same numbers
            thread = threading.Thread(target=lambda work=work: made.append(work(x)))
            thread.start()
            thread.join()
        (made[0].sum() + made[1].sum()).backward()
    passes = {
        (raw.call.node, tracer.raws[raw.forward].call.func.name) for raw in tracer.raws if raw.forward is not None
    }
    assert {("SqrtBackward0", "sqrt"), ("ExpBackward0", "exp")} <= passes
