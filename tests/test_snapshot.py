"""Restoring weights, buffers, optimizer state and schedules exactly, in the same objects."""

from __future__ import annotations

import copy
import gc
from collections import deque
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as lrs

from firstnan.tensors.models import Slot
from firstnan.tensors.state import ScheduleSearch, Snapshot, StateCopy

OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.1),
    "SGD momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam amsgrad, lr a tensor": lambda p: optim.Adam(p, torch.tensor(0.01), amsgrad=True, foreach=False),
    "AdamW fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "AdamW foreach": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "LBFGS": lambda p: optim.LBFGS(p, 0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: optim.Adafactor(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "SparseAdam": lambda p: optim.SparseAdam(p, 0.01),
}


class Net(nn.Module):
    """Batch norm, tied weights, a quantised table, a mask with infinities, a buffer that is made anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.arange(6, dtype=torch.int8))
        self.register_buffer("mask", torch.full((6,), -inf))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("nothing", None)
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.second(self.norm(self.first(x)).tanh())


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed((x.abs() * 10).long().clamp(0, 29))


class Run:
    """A small training whose whole state can be compared."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = Words() if name == "SparseAdam" else Net()
        self.optimizer = OPTIMIZERS[name](self.model.parameters())

    def step(self, seed: int, scale: float = 1.0) -> None:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) * scale

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = (self.model(x) - 1).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)

    def take(self) -> Snapshot | None:
        return Snapshot.take(self.model.parameters(), slots(self.model), [self.optimizer])

    def state(self) -> Any:
        """Everything, by value."""
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))


def slots(model: nn.Module) -> list[Slot]:
    return [Slot(m, name, name) for m in model.modules() for name in m._buffers]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, in type and structure."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype is b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and type(a) is type(b)


def bits(t: Tensor) -> bytes:
    return t.detach().contiguous().numpy().tobytes()


def test_the_comparison_itself_sees_small_differences() -> None:
    assert same({"a": [torch.tensor([0.0, nan])]}, {"a": [torch.tensor([0.0, nan])]})
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same({"a": 1}, {"a": 1, "b": 2})
    assert not same([1.0], [1])


# --- snapshots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("done", [0, 3])
def test_restoring_is_exact_and_training_continues_as_before(name: str, done: int) -> None:
    run = Run(name)
    for seed in range(done):
        run.step(seed)
    snapshot = run.take()
    assert snapshot is not None
    before = run.state()
    tensors = [*run.model.parameters(), *run.model.buffers()]
    places = [t.data_ptr() for t in tensors]

    run.step(10)
    run.step(11)
    expected = run.state()
    run.step(12, scale=nan)
    assert not same(run.state(), before)
    snapshot.restore()
    assert same(run.state(), before)
    now = [*run.model.parameters(), *run.model.buffers()]
    assert [id(t) for t in now] == [id(t) for t in tensors]
    assert [t.data_ptr() for t in now] == places

    run.step(10)
    run.step(11)
    assert same(run.state(), expected)
    snapshot.restore()  # it can be used again
    assert same(run.state(), before)


def test_optimizer_state_comes_back_in_the_same_tensors() -> None:
    run = Run("Adam")
    run.step(0)
    p = run.model.first.weight
    assert isinstance(p, nn.Parameter)
    moment = run.optimizer.state[p]["exp_avg"]
    snapshot = run.take()
    assert snapshot is not None
    value = moment.clone()
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # makes every tensor anew
    assert run.optimizer.state[p]["exp_avg"] is not moment
    run.step(1)
    snapshot.restore()
    assert torch.equal(moment, value)
    assert run.optimizer.state_dict()["state"][0]["exp_avg"] is moment


def test_gradients_and_learning_rates_are_left_alone() -> None:
    run = Run("SGD momentum")
    run.step(0)
    snapshot = run.take()
    run.step(1)
    gradients = [p.grad for p in run.model.parameters()]
    values = [g.clone() for g in gradients if g is not None]
    run.optimizer.param_groups[0]["lr"] = 0.5
    assert snapshot is not None
    snapshot.restore()
    assert run.optimizer.param_groups[0]["lr"] == 0.5
    assert [id(p.grad) for p in run.model.parameters()] == [id(g) for g in gradients]
    assert all(torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if g is not None)


def test_what_joined_the_model_later_is_left_alone() -> None:
    run = Run("Adam")
    run.step(0)
    snapshot = run.take()
    late = nn.Linear(6, 6)
    run.model.add_module("late", late)
    run.optimizer.add_param_group({"params": list(late.parameters())})
    late(torch.ones(1, 6)).sum().backward()
    run.step(1)
    weight = late.weight.clone()
    assert snapshot is not None
    snapshot.restore()
    assert torch.equal(late.weight, weight)
    assert late.weight not in run.optimizer.state
    run.step(2)


def test_buffers_that_were_made_or_replaced_since() -> None:
    run = Run("SGD")
    calls = run.model.calls
    snapshot = run.take()
    assert snapshot is not None
    run.step(0)
    run.model.nothing = torch.ones(3)
    snapshot.restore()
    assert run.model.calls is calls
    assert calls.item() == 0
    assert run.model.nothing is None
    assert run.model.norm.num_batches_tracked.item() == 0


@pytest.mark.parametrize(
    ("spoil", "good"),
    [
        (lambda run: run.model.first.bias.data.fill_(nan), False),
        (lambda run: run.model.first.bias.data.fill_(-inf), False),
        (lambda run: run.model.first.bias.data.fill_(3e38), True),  # its norm overflows, it does not
        (lambda run: run.model.norm.running_var.fill_(nan), False),
        (lambda run: run.model.norm.running_var.fill_(inf), True),  # may be meant
        (lambda run: run.optimizer.state[run.model.first.bias]["exp_avg_sq"].fill_(inf), False),
        (lambda run: run.model.first.bias.requires_grad_(False).fill_(inf), True),
        (lambda run: run.model.first.bias.requires_grad_(False).fill_(nan), False),
    ],
)
def test_only_a_good_state_is_kept(spoil: Callable[[Run], Any], good: bool) -> None:
    run = Run("Adam")
    run.step(0)
    spoil(run)
    assert (run.take() is not None) == good


def test_size_is_that_of_the_copies() -> None:
    model = nn.Linear(8, 4, dtype=torch.float16)
    optimizer = optim.SGD(model.parameters(), momentum=0.9)
    snapshot = Snapshot.take(model.parameters(), [], [optimizer])
    assert snapshot is not None
    assert snapshot.nbytes == 2 * (8 * 4 + 4)


def test_tensors_that_cannot_be_written_and_lazy_ones_are_no_obstacle() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    model.register_buffer("wide", torch.zeros(1).expand(5))
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(2))
    snapshot = Snapshot.take(model.parameters(), slots(model), [])
    assert snapshot is not None
    weight = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.zero_()
    model(torch.ones(1, 2))
    snapshot.restore()
    assert torch.equal(model[0].weight, weight)


def test_a_parameter_with_replaced_memory_is_restored() -> None:
    weight = nn.Parameter(torch.arange(6.0))
    snapshot = Snapshot.take([weight], [], [])
    assert snapshot is not None
    weight.data = weight.data[:2] * 3
    snapshot.restore()
    assert torch.equal(weight, torch.arange(6.0))


def test_restored_containers_are_the_same_objects() -> None:
    t, inner = torch.ones(2), [1, 2]
    whole: dict[str, Any] = {"t": t, "inner": inner, "last": deque([inner, 5], maxlen=2), "pair": (t, 1)}
    whole["self"] = whole
    kept = StateCopy()
    kept.add(whole)
    kept.copy()
    t.fill_(7)
    inner.append(3)
    whole["last"].append(6)
    whole |= {"t": None, "new": 1}
    kept.restore()
    assert whole.keys() == {"t", "inner", "last", "pair", "self"}
    assert whole["t"] is t
    assert whole["inner"] is inner
    assert inner == [1, 2]
    assert list(whole["last"]) == [inner, 5]
    assert t.tolist() == [1, 1]


# --- schedules ----------------------------------------------------------------------------------------------------


class Halving:
    """A function with a memory of its own, as LambdaLR allows."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.5**self.calls


def sequence(o: Any) -> lrs.LRScheduler:
    return lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=3), lrs.CosineAnnealingLR(o, 9)], milestones=[3])


SCHEDULERS: dict[str, Callable[[Any], lrs.LRScheduler]] = {
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.3, total_steps=20),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=True),
    "SequentialLR": sequence,
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.StepLR(o, 2)]),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 3, 4]),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "LambdaLR with a memory": lambda o: lrs.LambdaLR(o, Halving()),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, cooldown=1),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("done", [0, 2, 3])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_scheduler_step_can_be_undone(name: str, done: int, tensor_lr: bool) -> None:
    def train(undo_at: int | None) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        lr: Any = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = optim.SGD(model.parameters(), lr, momentum=0.8)
        scheduler = SCHEDULERS[name](optimizer)
        rates = []

        def advance(loss: float) -> None:
            scheduler.step(*([loss] if name == "ReduceLROnPlateau" else []))

        for i in range(6):
            if i == undo_at:
                schedules = ScheduleSearch().copy([optimizer], "loss")
                assert scheduler in schedules.schedulers
                groups = optimizer.state_dict()["param_groups"]
                states = copy.deepcopy((groups, [vars(s) for s in schedules.schedulers]))
                advance(nan)
                advance(1e9)
                schedules.restore()
                assert same(states[0], optimizer.state_dict()["param_groups"])
                assert plain(states[1]) == plain([vars(s) for s in schedules.schedulers])
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            optimizer.step()
            advance(loss.item())
            rates.append(float(optimizer.param_groups[0]["lr"]))
        state = (model.state_dict(), optimizer.state_dict(), scheduler.get_last_lr())
        return rates, copy.deepcopy(state)

    expected, state = train(undo_at=None)
    rates, undone = train(undo_at=done)
    assert rates == expected
    assert same(undone, state)


def plain(value: Any) -> Any:
    """What can be compared: numbers and texts, inside lists and dicts."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, Tensor):
        return value.tolist()
    return value if isinstance(value, int | float | str | None) else type(value)


def test_schedulers_of_other_optimizers_are_left_alone() -> None:
    model = nn.Linear(2, 1)
    mine, other = (optim.SGD(model.parameters(), 0.1) for _ in range(2))
    watched, free = lrs.StepLR(mine, 1), lrs.StepLR(other, 1)
    mine.step()
    other.step()
    schedules = ScheduleSearch().copy([mine], "loss")
    assert schedules.schedulers == [watched]
    watched.step()
    free.step()
    schedules.restore()
    assert (watched.last_epoch, mine.param_groups[0]["lr"]) == (0, 0.1)
    assert free.last_epoch == 1
    assert other.param_groups[0]["lr"] == pytest.approx(0.01)


def test_nothing_is_kept_alive_or_left_behind() -> None:
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), 0.1)
    scheduler = lrs.StepLR(optimizer, 1)
    names = (set(vars(scheduler)), set(vars(optimizer)), set(vars(model)))
    ScheduleSearch().copy([optimizer], "loss").restore()
    snapshot = Snapshot.take(model.parameters(), slots(model), [optimizer])
    assert snapshot is not None
    snapshot.restore()
    assert names == (set(vars(scheduler)), set(vars(optimizer)), set(vars(model)))
    assert len(model._forward_hooks) == 0
    del scheduler
    gc.collect()
    assert ScheduleSearch().copy([optimizer], "loss").schedulers == []


def test_a_disabled_gradient_scaler_has_no_scale() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), 0.1)
    scalers = [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=8.0)]
    scalers[1].scale(torch.ones(()))
    kept = ScheduleSearch().copy([optimizer], "loss")
    scalers[1].update(2.0)
    kept.restore()
    assert [scaler.get_scale() for scaler in scalers] == [1.0, 8.0]
