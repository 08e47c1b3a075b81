"""A loop that skips bad losses itself: an event for each batch, and no failure."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector

Loop = Callable[[nn.Module, torch.optim.Optimizer, Iterable[Any]], None]
BAD = (5, 10, 11)


def data() -> TensorDataset:
    x = torch.rand(80, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    x[[4 * i for i in BAD], 2] = -1.0
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x.log()) - y).square().mean()


def not_finite(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        loss = loss_of(model, x, y)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def nan(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        loss = loss_of(model, x, y)
        if torch.isnan(loss):
            optimizer.zero_grad()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unequal(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        loss = loss_of(model, x, y)
        if loss != loss:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def item(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        loss = loss_of(model, x, y)
        if math.isnan(loss.item()):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for i, (x, y) in enumerate(batches):
        loss = loss_of(model, x, y) / 4
        if loss.isfinite():
            loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def in_a_function(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    def step(x: Tensor, y: Tensor) -> float | None:
        loss = loss_of(model, x, y)
        if not math.isfinite(loss.item()):
            return None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for x, y in batches:
        step(x, y)


def bad_output(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> None:
    for x, y in batches:
        output = model(x.log())
        if torch.isnan(output).any():
            continue
        optimizer.zero_grad()
        (output - y).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("loop", [not_finite, nan, unequal, item, accumulating, in_a_function, bad_output])
def test_each_batch_that_the_loop_skips_is_an_event(loop: Loop, plain: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NaNDetector(model, optimizer) as detector:
        loader = DataLoader(data(), batch_size=4)
        loop(model, optimizer, loader if plain else detector.batches(loader))
    assert [(event.kind, event.batch) for event in detector.events] == [("skipped", i) for i in BAD]
    assert "the loop skipped a batch whose" in detector.events[0].message
    assert (detector.report, detector.summary()["nonfinite"]) == (None, 0)


def test_a_loop_without_a_loader() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    samples = data()
    with NaNDetector(model, optimizer) as detector:
        for i in range(20):
            loss = loss_of(model, *samples[4 * i : 4 * i + 4])
            if loss.isnan():
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(event.kind, event.step) for event in detector.events] == [("skipped", 5), ("skipped", 9), ("skipped", 9)]


def test_a_loop_that_ends_itself_at_a_bad_loss() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NaNDetector(model, optimizer) as detector:
        for x, y in DataLoader(data(), batch_size=4):
            loss = loss_of(model, x, y)
            if loss.isnan():
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [(event.kind, event.batch) for event in detector.events] == [("skipped", 5)]


def test_many_skips_are_logged_less_and_less(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NaNDetector(model, optimizer) as detector:
        not_finite(model, optimizer, detector.batches([(-torch.ones(4, 4), torch.ones(4, 1))] * 100))
    assert len(detector.events) == 100
    assert len(caplog.records) == 8 + 3  # and the 16th, the 32nd, the 64th


@pytest.mark.parametrize("plain", [True, False])
def test_calls_without_backward_are_no_events(plain: bool) -> None:
    """Validation with gradients, a decoder that is called for each token, a batch that is left for another reason."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    good = [(torch.rand(4, 4), torch.rand(4, 1)) for _ in range(8)]
    best = torch.tensor(math.inf)
    with NaNDetector(model, optimizer) as detector:
        for _ in range(3):
            for i, (x, y) in enumerate(DataLoader(good, batch_size=None) if plain else detector.batches(good)):
                if i == 3:
                    continue
                optimizer.zero_grad()
                loss = torch.zeros(())
                for _ in range(4):
                    loss = loss + (model(x) - y).square().mean()
                loss.backward()
                optimizer.step()
            validation = sum((model(x) - y).square().mean() for x, y in good)
            best = torch.minimum(best, torch.as_tensor(validation))
    assert list(detector.events) == []


def test_what_a_step_has_computed_is_freed_when_it_is_over() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen: list[Any] = []

    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        seen.append(weakref.ref(loss))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    gc.disable()
    try:
        with NaNDetector(model, optimizer) as detector:
            for x in detector.batches([torch.rand(4, 4)] * 3):
                step(x)
                assert seen[-1]() is None
            for _ in range(3):
                step(torch.rand(4, 4))
                assert seen[-1]() is None
    finally:
        gc.enable()
