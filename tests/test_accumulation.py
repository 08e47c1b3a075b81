"""Which batch of several a step has used, and whose gradients were bad where those of several accumulate; if that
cannot be known, none is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError, Report

SIZE, PARTS = 4, 4
Data = tuple[torch.Tensor, ...]


def data(*zeros: int, length: int = 64) -> DataLoader[Data]:
    torch.manual_seed(0)
    x, y, weight = torch.randn(length, 4), torch.rand(length) + 0.5, torch.rand(length) + 0.5
    weight[list(zeros)] = 0.0
    return DataLoader(TensorDataset(x, y, weight), batch_size=SIZE)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))


class Ahead:
    """A loader that fetches one batch ahead, as accelerate's do."""

    def __init__(self, loader: DataLoader[Data]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Data]:
        waiting = None
        for batch in self.loader:
            if waiting is not None:
                yield waiting
            waiting = batch
        if waiting is not None:
            yield waiting


def loss_of(net: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    error = (net(x).squeeze(1) - y).square()
    return (error * weight).sqrt().mean() / PARTS  # finite, but its derivative at 0 is not


def by_number(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    for i, (x, y, weight) in enumerate(loader):
        loss_of(net, x, y, weight).backward()
        if (i + 1) % PARTS == 0:
            optimizer.step()
            optimizer.zero_grad()


def overwritten(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    for i, (x, y, weight) in enumerate(loader, start=1):
        x, y = x * 1.0, y.clone()
        loss = loss_of(net, x, y, weight)
        loss.backward()
        if i % PARTS == 0:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def by_next(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    batches = iter(loader)
    for _ in range(len(loader) // PARTS):
        optimizer.zero_grad()
        for _ in range(PARTS):
            x, y, weight = next(batches)
            loss_of(net, x, y, weight).backward()
        optimizer.step()


def fetched_together(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    batches = iter(loader)
    for _ in range(64 // SIZE // PARTS):
        group = [next(batches) for _ in range(PARTS)]
        for number, batch in enumerate(group):
            loss_of(net, *batch).backward()
            if number == len(group) - 1:
                optimizer.step()
                optimizer.zero_grad()


def two_losses(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
    for i, (x, y, weight) in enumerate(loader):
        net(x).square().mean().backward()
        loss_of(net, x, y, weight).backward()
        if (i + 1) % PARTS == 0:
            optimizer.step()
            optimizer.zero_grad()


def fails(train: Callable[..., None], loader: Any) -> Report:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(NonFiniteError) as error, NaNDetector(net, optimizer):
        train(net, optimizer, loader)
    return error.value.report


@pytest.mark.parametrize("bad", [33, 63])
@pytest.mark.parametrize("train", [by_number, overwritten, by_next, fetched_together, two_losses])
def test_the_batch_with_the_bad_gradient_is_named(train: Callable[..., None], bad: int) -> None:
    report = fails(train, data(bad))
    assert report.batch is not None
    assert (report.step, report.batch.index) == (bad // SIZE // PARTS, bad // SIZE)
    assert (report.batch.bad_samples, report.batch.dataset_indices) == ((bad % SIZE,), (bad,))
    assert report.cause is not None
    assert report.cause.slug == "sqrt_grad_at_zero"
    counters = {turn.variable: turn.value for turn in report.loops}
    assert counters.get("i") in (None, bad // SIZE + (train is overwritten))  # not that of the last batch of the step


@pytest.mark.parametrize("bad", [33, 41])
@pytest.mark.parametrize("train", [by_number, overwritten, fetched_together])
def test_a_loader_that_fetches_ahead(train: Callable[..., None], bad: int) -> None:
    report = fails(train, Ahead(data(bad)))
    assert report.batch is not None
    assert (report.step, report.batch.index, report.batch.dataset_indices) == (bad // 16, bad // SIZE, (bad,))


def test_a_loader_that_copies_and_has_the_same_labels_in_each_batch() -> None:
    """As accelerate's do with a stream: what all batches share tells none of them apart."""
    torch.manual_seed(0)
    x, weight, labels = torch.randn(32, 4), torch.ones(32), torch.arange(32) % 2
    weight[22] = 0.0
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = Ahead(DataLoader(TensorDataset(x, labels, weight), batch_size=SIZE))

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = batch.pop("weight")
        losses = torch.nn.functional.cross_entropy(net(batch["x"]), batch["labels"], reduction="none")
        return (losses / weight).mean()

    def train(given: Data) -> None:
        batch = dict(zip(("x", "labels", "weight"), (t.clone() for t in given), strict=True))
        del given
        loss_of(batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(NonFiniteError) as error, NaNDetector(net, optimizer):
        for _ in map(train, loader):
            pass
    report = error.value.report
    assert report.batch is not None
    assert (report.step, report.batch.index) == (5, 5)


def test_of_two_bad_batches_the_first_is_named() -> None:
    report = fails(by_number, data(38, 45))
    assert report.batch is not None
    assert (report.step, report.batch.index, report.batch.dataset_indices) == (2, 9, (38,))


def test_no_batch_is_named_if_none_is_known() -> None:
    """The gradients are finite alone and overflow together."""

    def train(net: torch.nn.Module, optimizer: Any, loader: Any) -> None:
        for i, (x, _, _) in enumerate(loader):
            (net(x).sum() * (4e37 if i // PARTS == 2 else 1.0)).backward()
            if (i + 1) % PARTS == 0:
                optimizer.step()
                optimizer.zero_grad()

    report = fails(train, data())
    assert report.step == 2
    assert report.batch is not None
    assert report.batch.index is None
    assert "one of the 4 batches of this step (8 to 11)" in report.batch.note


def test_training_goes_on_without_the_whole_step() -> None:
    net, loader = model(), data(37)
    optimizer = torch.optim.AdamW(net.parameters())
    with NaNDetector(net, optimizer, on_nonfinite="skip") as detector:
        by_number(net, optimizer, loader)
    assert detector.summary()["skipped"] == 1
    assert detector.report is not None
    assert detector.report.batch is not None
    assert detector.report.batch.index == 9
    assert all(torch.isfinite(p).all() for p in net.parameters())
