"""The model's last calls, kept and made again: the same call, and nothing changed by it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstnan.engine.handouts import Handouts
from firstnan.engine.microscope import Microscope
from firstnan.engine.model_calls import ModelCalls
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership
from firstnan.tensors.models import Models
from loops import Rooted, differences, randomness, seeded, state_of


class Kit:
    """Last calls of one model, with what they need to be made again."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.errors = model, list[Exception]()
        replayer, models = Handouts(), Models({"": model})
        replayer.watch_buffers(models.slots)
        gate = Gate(frugal=True)
        self.microscope = Microscope(Ownership((__file__,)), gate, replayer, lambda: models)
        self.calls = ModelCalls([model], replayer)
        self.calls.on_error(self.errors.append)
        self.calls.attach()

    def again(self, index: int = -1) -> Any:
        outcome = self.calls.make_again(self.calls.calls[index], self.microscope)
        self.microscope.stop()
        return outcome

    def traced(self) -> list[str]:
        assert self.microscope.tracer is not None
        return [str(raw.call.func) for raw in self.microscope.tracer.raws]


@pytest.fixture
def kits() -> Iterator[Any]:
    made: list[Kit] = []

    def make(model: nn.Module) -> Kit:
        made.append(Kit(model))
        return made[-1]

    yield make
    for kit in made:
        kit.calls.detach()
        assert not kit.errors


class Noisy(nn.Module):
    """Bad where the mask drops the first input: that depends on the random numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen: list[list[bool]] = []

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        mask = torch.rand(4) > 0.5
        self.seen.append(mask.tolist())
        return {"out": (self.inner(x) * mask * scale).sum(1)}


def test_the_same_call_is_made_with_the_same_random_numbers(kits: Any) -> None:
    model = Noisy()
    kit = kits(model)
    for scale in (1.0, 3.0):
        model(torch.ones(2, 4), scale=scale)
    torch.rand(5)
    assert not kit.again(0)[0]
    assert not kit.again(1)[0]
    assert model.seen[2:] == model.seen[:2]
    assert kit.calls.calls[1].kwargs == {"scale": 3.0}
    assert len(kit.calls.calls) == 2  # those made again are not kept


def test_nothing_is_changed_by_it(kits: Any) -> None:
    model = seeded(dropout=0.5)
    kit = kits(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.rand(4, 4)).mean().backward()
    torch.rand(3)
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: p.grad.clone() for n, p in model.named_parameters()}
    before, drawn = state_of(model, optimizer), randomness()
    kit.again()
    assert not differences(before, state_of(model, optimizer))
    assert not differences(drawn, randomness())
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert not differences(values, gradients)


def test_the_buffers_are_those_of_then(kits: Any) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros(1))
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            self.seen.append(self.count.item())
            return x * self.weight

    model = Counts()
    kit = kits(model)
    for _ in range(3):
        model(torch.ones(1))
    kit.again(1)
    assert model.seen == [1, 2, 3, 2]
    assert model.count.item() == 3


def test_bad_outputs_are_found(kits: Any) -> None:
    model = nn.Linear(4, 2)
    kit = kits(model)
    model(torch.full((1, 4), float("nan")))
    bad, given = kit.again()
    assert [t.shape for t in bad] == [(1, 2)]
    assert not given


def test_bad_gradients_are_found_with_those_that_came_back(kits: Any) -> None:
    model = Rooted()
    kit = kits(model)
    model(torch.zeros(2, 4)).mean().backward()
    bad, given = kit.again()
    assert [t.shape for t in bad] == [(4, 4)]
    assert not given


def test_a_gradient_that_was_bad_when_it_came_back_is_said(kits: Any) -> None:
    model = nn.Linear(4, 2)
    kit = kits(model)
    (model(torch.ones(1, 4)) * torch.tensor([float("nan"), 1.0])).sum().backward()
    bad, given = kit.again()
    assert bad
    assert given


def test_autocast_is_as_it_was(kits: Any) -> None:
    class Says(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.seen: list[bool] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(torch.is_autocast_enabled("cpu"))
            return x.sum() * self.inner.weight.sum()

    model = Says()
    kit = kits(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(2))
    model(torch.ones(2))
    kit.again(0)
    kit.again(1)
    assert model.seen == [True, False, True, False]


def test_what_does_not_train_is_not_kept(kits: Any) -> None:
    model = seeded()
    kit = kits(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    with torch.inference_mode():
        model(torch.ones(2, 4))
    assert not kit.calls.calls
    assert not kit.calls.were_made()


def test_a_call_that_backward_makes_is_not_kept(kits: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    kit = kits(model)
    from torch.utils.checkpoint import checkpoint

    out = checkpoint(model, torch.ones(2, 4, requires_grad=True), use_reentrant=False)
    assert len(kit.calls.calls) == 1
    out.sum().backward()
    assert len(kit.calls.calls) == 1


def test_only_the_last_ones_are_kept_and_the_very_first(kits: Any) -> None:
    model = nn.Linear(1, 1)
    kit = kits(model)
    for i in range(20):
        model(torch.full((1,), float(i)))
    assert [call.args[0].item() for call in kit.calls.calls] == list(range(12, 20))
    assert kit.calls.first.args[0].item() == 0
    kit.calls.forget()
    assert not kit.calls.calls
    assert kit.calls.first is None


def test_calls_of_another_thread_are_not_mine(kits: Any) -> None:
    model = nn.Linear(1, 1)
    kit = kits(model)
    model(torch.ones(1))
    thread = threading.Thread(target=model, args=(torch.zeros(1),))
    thread.start()
    thread.join()
    assert len(kit.calls.calls) == 2
    assert [call.args[0].item() for call in kit.calls.mine()] == [1.0]


def test_gradients_are_let_go_with_their_call(kits: Any) -> None:
    """A graph that the program keeps must not keep the gradients of steps long gone."""
    model = nn.Linear(4, 2)
    kit = kits(model)
    out = model(torch.ones(1, 4))
    out.sum().backward(retain_graph=True)
    call = weakref.ref(kit.calls.calls[0])
    assert len(call().gradients) == 1
    kit.calls.forget()
    gc.collect()
    assert call() is None
    out.sum().backward()


def test_less_is_kept_where_the_loop_is_played_again(kits: Any) -> None:
    model = nn.Linear(4, 2)
    kit = kits(model)
    kit.calls.keep_less()
    x, source = torch.ones(1, 4), Kit
    kit.calls._handouts.fetched(source, x, 0)
    out = model(x)
    assert not out._backward_hooks
    assert not kit.calls.calls
    (call,) = kit.calls.mine()
    assert call.args[0] is x
    assert not kit.calls.make_again(call, kit.microscope)[0]
    kit.microscope.stop()
    kit.calls.detach()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_model_of_ready_made_layers_names_no_line_of_whoever_watches(kits: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    kit = kits(model)
    with torch.no_grad():
        model[0].bias.fill_(99.0)
        model[1].weight.fill_(3e38)
    model(torch.full((2, 4), 3.0))
    assert kit.again()[0]
    assert {raw.spot for raw in kit.microscope.tracer.raws} == {None}


def test_a_model_of_ones_own_names_its_lines(kits: Any) -> None:
    kit = kits(Noisy())
    kit.model(torch.ones(2, 4))
    kit.again()
    assert all(raw.spot is not None for raw in kit.microscope.tracer.raws)


@pytest.mark.parametrize("made_there", [False, True])
def test_a_call_in_inference_mode_is_traced_as_any_other(kits: Any, made_there: bool) -> None:
    """Tensors made in that mode do not count writes, so values could not be followed from operator to operator."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    kit, x = kits(model), torch.randn(3, 4)
    with torch.inference_mode():
        x = x * 1.0 if made_there else x
        model(x)
        kit.calls.keep_returned(model, (x,), {})
        kit.again()
    assert [name for name in kit.traced() if "linear" in name] == []
    assert len([name for name in kit.traced() if "addmm" in name]) == 2
