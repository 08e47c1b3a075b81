"""A program that uses torch.compile is compiled as it would be without firstnan, and still watched."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from firstnan import NaNDetector, NonFiniteError

pytestmark = pytest.mark.slow

Step = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


def compiled_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def compiled_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    whole = torch.compile(model, backend="eager", fullgraph=True)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = whole(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def compiled_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    update = torch.compile(lambda: optimizer.step(), backend="eager")

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        update()
        return loss

    return step


def compiled_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


WAYS = [compiled_loss, compiled_model, compiled_optimizer, compiled_step]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def what_the_compiler_did(way: Any, watched: bool, caplog: pytest.LogCaptureFixture, **options: Any) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    caplog.clear()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step, x = way(model, optimizer), torch.randn(16, 4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if watched:
            with NaNDetector(model, optimizer, **options) as detector:
                losses = [step(x).item() for _ in range(24)]
            assert detector.summary()["steps"] == 24
        else:
            losses = [step(x).item() for _ in range(24)]
    return {
        "losses": losses,
        "graphs": counters["stats"]["unique_graphs"],
        "graph breaks": sum(counters["graph_break"].values()),
        "recompilations": sum("Recompiling" in record.getMessage() for record in caplog.records),
        "warnings": {str(w.message) for w in said if "script_method" not in str(w.message)},
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [False, True])
def test_the_compiler_does_the_same_with_a_detector(way: Any, layers: bool, caplog: pytest.LogCaptureFixture) -> None:
    torch._logging.set_logs(recompiles=True)
    caplog.set_level(logging.DEBUG, "torch._dynamo")
    logging.getLogger("torch._dynamo").addHandler(caplog.handler)
    try:
        alone = what_the_compiler_did(way, False, caplog)
        assert what_the_compiler_did(way, True, caplog, layers=layers) == alone
        assert alone["recompilations"] == 0
    finally:
        logging.getLogger("torch._dynamo").removeHandler(caplog.handler)
        torch._logging.set_logs()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [0, 5])
def test_a_nan_under_the_compiler_is_found_in_its_step_and_kept_out_of_the_weights(way: Any, bad: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = way(model, optimizer)
    with NaNDetector(model, optimizer) as detector, pytest.raises(NonFiniteError) as caught:
        for i in range(8):
            before = {name: value.clone() for name, value in model.state_dict().items()}
            step(torch.full((16, 4), torch.inf) if i == bad else torch.randn(16, 4))
    assert caught.value.report.step == bad
    assert detector.summary()["steps"] == bad
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_step_under_the_compiler_is_skipped(way: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = way(model, optimizer)
    with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
        for i in range(8):
            step(torch.full((16, 4), torch.inf) if i in (3, 4) else torch.randn(16, 4))
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert (detector.summary()["steps"], detector.summary()["skipped"]) == (6, 2)
