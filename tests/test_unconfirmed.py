"""Rows that are no samples are not called samples, and a cause says nothing about forward that was not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from firstnan import NaNDetector, NonFiniteError
from firstnan.engine.conclude import without_guesses
from firstnan.observe.module_stack import ModuleStack
from firstnan.records import Batch, Cause, Report


def failing(step: Callable[[Any], Tensor], data: Iterable[Any], model: nn.Module) -> Report:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for batch in detector.batches(data):
            optimizer.zero_grad()
            step(batch).backward()
            optimizer.step()
    return caught.value.report


def test_a_row_of_a_weight_is_no_sample(in_process: None) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[1].weight[5] = float("nan")
    report = failing(lambda x: model(x).mean(), [torch.rand(8, 4)], model)
    assert report.origin is not None
    assert report.origin.phase == "parameter"
    assert report.batch is None or not report.batch.bad_samples


def test_a_row_of_random_numbers_is_no_sample(in_process: None) -> None:
    model = nn.Linear(3, 1)
    calls = 0

    def step(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ValueError("enough")  # the search ends early, and confirms nothing
        noise = torch.rand(len(x), 3)
        noise[9] = 0.0
        return model(x).mean() + (model(noise) * 0 + noise[:, :1]).log().mean()

    report = failing(step, [torch.rand(16, 3)], model)
    assert report.origin is not None
    assert report.origin.op == "log"
    assert report.batch is not None
    assert not report.batch.bad_samples
    assert not report.batch.dataset_indices


@pytest.mark.parametrize("slug", ["divergence_lr", "exploding_gradient"])
def test_a_divergence_names_only_confirmed_samples(slug: str) -> None:
    cause = Cause(slug, "", "")
    guessed = Report("nonfinite", 8, Batch(8, 32, (0,), dataset_indices=(21,)), cause=cause)
    told = without_guesses(guessed).batch
    assert told is not None
    assert (told.index, told.size, told.bad_samples, told.dataset_indices) == (8, 32, None, None)
    assert told.note.endswith("training diverged") == (slug == "divergence_lr")
    confirmed = Report("nonfinite", 8, Batch(8, 32, (0,), confirmed=True), cause=cause)
    kept = without_guesses(confirmed).batch
    assert kept is not None
    assert kept.bad_samples == (0,)
    assert kept.note.startswith("training had diverged before") == (slug == "divergence_lr")


def test_the_batch_of_vmap_is_what_it_maps_over() -> None:
    model = nn.Linear(6, 1)
    weights = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(model, p, (x,)).sum()
        return result

    stack = ModuleStack()
    stack.attach()
    try:
        vmap(grad(loss), in_dims=(None, 0))(weights, torch.rand(16, 6))
    finally:
        stack.detach()
    assert stack.batch_size == 16


def test_a_mean_inside_a_model_is_not_over_samples(in_process: None) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, graph: dict[str, Tensor]) -> Tensor:
            mean: Tensor = self.layer(graph["x"] / graph["count"]).mean()
            return mean

    model, count = Graph(), torch.ones(11, 1)
    nodes = torch.rand(11, 5)
    nodes[3] = count[3] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        detector.step(lambda: (model({"x": nodes, "count": count}) ** 2).backward() or optimizer.step())
    assert caught.value.report.batch is None


def test_an_infinite_forward_value_is_not_called_finite(in_process: None) -> None:
    model = nn.Sequential(nn.Embedding(40, 16, padding_idx=0), nn.Linear(16, 40))
    model.register_parameter("gain", nn.Parameter(torch.ones(16)))
    ids = torch.randint(1, 40, (8, 9))
    ids[3, 5:] = 0

    def step(b: Tensor) -> Tensor:
        x = model[0](b[:, :-1])
        out = model[1](x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * model.gain)
        return nn.functional.cross_entropy(out.flatten(0, 1), b[:, 1:].flatten(), ignore_index=0)

    report = failing(step, [ids], model)
    assert report.cause is not None
    assert report.cause.slug == "div_by_zero"
    assert "forward value is finite" not in report.cause.why
