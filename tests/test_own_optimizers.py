"""Optimizers whose arithmetic nobody knows: what their updates break is seen at once, and undone."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError
from firstnan.engine import recovery
from loops import birthplace, differences, state_of

pytestmark = pytest.mark.slow


class Signs(torch.optim.Optimizer):
    """Divides a gradient by its own size, which may be zero; counts its steps."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.01) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", torch.zeros(())) + 1
                p.sub_(p.grad / p.grad.abs() * group["lr"])  # born: the update


class Run:
    """A feature that is absent from a batch has a gradient of exactly zero."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1, bias=False))
        self.optimizer = Signs(self.model.parameters())

    def train(self, given: Iterable[Tensor]) -> None:
        for x in given:
            self.optimizer.zero_grad()
            self.model(x).pow(2).sum().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer)


def data(bad: int | None, count: int = 6) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    given = [torch.rand(4, 3, generator=made) for _ in range(count)]
    if bad is not None:
        given[bad][:, 0] = 0.5
    return given


BAD = [0, 3, 5]


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize("bad", [*BAD, 90])
def test_skip_undoes_the_update(bad: int, through: bool) -> None:
    run, given, expected = Run(), data(bad, max(6, bad + 10)), Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        run.train(detector.batches(given) if through else given)
    expected.train(x for i, x in enumerate(given) if i != bad)
    assert not differences(expected.state(), run.state())
    assert detector.summary()["skipped"] == detector.summary()["nonfinite"] == 1


@pytest.mark.parametrize("bad", BAD)
def test_raise_names_the_line_of_the_update_and_leaves_the_weights_of_before(bad: int) -> None:
    run, given, expected = Run(), data(bad), Run()
    with pytest.raises(NonFiniteError) as caught, NaNDetector(run.model, run.optimizer) as detector:
        run.train(detector.batches(given))
    expected.train(given[:bad])
    assert not differences(expected.state(), run.state())
    report = caught.value.report
    assert (report.step, report.batch.index, report.origin.phase) == (bad, bad, "optimizer")
    assert birthplace(report) == "the update"


class Scaled(Signs):
    """Divides by the root of squares that it keeps, as Adam does, plus an eps."""

    def __init__(self, parameters: Iterable[Tensor], eps: float) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.01, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                denominator = (p.grad * p.grad).sqrt() + group["eps"]
                p.sub_(group["lr"] * p.grad / (denominator if group["eps"] < 1e-9 else denominator - group["eps"]))


@pytest.mark.parametrize(("eps", "slug"), [(0.0, "optimizer_eps"), (0, "optimizer_eps"), (0.125, "zero_over_zero")])
def test_the_eps_of_an_own_optimizer_is_the_cause_if_it_is_zero(eps: float, slug: str) -> None:
    run = Run()
    run.optimizer = Scaled(run.model.parameters(), eps)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(run.model, run.optimizer) as detector:
        run.train(detector.batches(data(3)))
    assert caught.value.report.cause is not None
    assert caught.value.report.cause.slug == slug


@pytest.mark.parametrize("bad", BAD)
def test_a_large_model_is_not_copied_but_looked_at(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_SMALL", 0)
    run = Run()
    with pytest.raises(NonFiniteError) as caught, NaNDetector(run.model, run.optimizer) as detector:
        run.train(detector.batches(data(bad)))
    assert (caught.value.report.step, caught.value.report.noticed.what) == (bad, "parameter")
    assert detector.summary()["steps"] == bad + 1


def test_healthy_training_is_the_same_to_the_last_bit(caplog: pytest.LogCaptureFixture) -> None:
    run, expected = Run(), Run()
    with NaNDetector(run.model, run.optimizer) as detector:
        run.train(detector.batches(data(None, 100)))
    expected.train(data(None, 100))
    assert not differences(expected.state(), run.state())
    assert not caplog.records


# What is left at the end, of torch's own optimizers too.


class Remembers(nn.Module):
    """Its output is finite whatever its buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.mean(0) / (x.std(0) > 0))
        out: Tensor = self.layer(x)
        return out


def remember(given: Iterable[Tensor], model: nn.Module, optimizer: Any) -> None:
    for x in given:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_buffer_whose_turn_had_not_come_is_looked_at_in_the_end(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = data(None)
    given[4] = given[4] * 0
    detector = NaNDetector(model, optimizer, on_nonfinite=policy)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="buffer seen"), detector:
            remember(detector.batches(given), model, optimizer)
    else:
        with detector:
            remember(detector.batches(given), model, optimizer)
        assert "buffer seen" in caplog.text
    assert detector.summary()["nonfinite"] == 1
    assert detector.report is not None
    assert detector.report.noticed.what == "buffer"


def test_nothing_is_said_in_the_end_of_what_was_told_before(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    with caplog.at_level(logging.INFO), NaNDetector(run.model, run.optimizer, on_nonfinite="warn") as detector:
        run.train(detector.batches(data(5)))
    assert detector.summary()["nonfinite"] == 1


def test_an_error_of_the_loop_is_not_covered_by_what_is_left() -> None:
    model = Remembers()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with pytest.raises(KeyError) as caught, NaNDetector(model, optimizer) as detector:
        remember(detector.batches([torch.rand(4, 3), torch.zeros(4, 3)]), model, optimizer)
        raise KeyError
    assert not hasattr(caught.value, "__notes__")


class Growing(torch.nn.Module):
    """Its parameter is used twice, and its gradient is 0 for all but the bad sample."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.exp(self.scale * 30 + x.abs().amax(1, keepdim=True) * 20) * torch.exp(self.scale * 30)


def test_gradients_that_the_program_adds_up_and_clears_itself() -> None:
    x = torch.ones(48, 3)
    x[29] = 5.0
    model = torch.nn.Sequential(Growing(), torch.nn.Linear(3, 2))
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model) as detector:
        for i, (a,) in enumerate(detector.batches(DataLoader(TensorDataset(x), batch_size=4))):
            model(a).square().mean().backward()
            if i % 2:
                for p in model.parameters():
                    assert p.grad is not None
                    p.data.sub_(0.01 * p.grad)
                    p.grad.zero_()
    report = caught.value.report
    assert report.origin is not None
    assert report.batch is not None
    assert (report.step, report.batch.index, report.batch.bad_samples) == (3, 7, (1,))
    assert report.origin.op == "exp"


class WithoutChecks(torch.optim.Optimizer):
    """Expects a gradient of every parameter, as many an optimizer of one's own does."""

    def __init__(self, parameters: Any, *, listed: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.listed = [p for group in self.param_groups for p in group["params"]] if listed else None
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.updates += 1
        for p in self.listed if self.listed is not None else self.param_groups[0]["params"]:
            p -= self.defaults["lr"] * p.grad
        return loss


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_dropped_update_needs_no_gradients(listed: bool, by_closure: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = WithoutChecks(model.parameters(), listed=listed)
    data = [torch.rand(4, 3) + 0.1 for _ in range(6)]
    data[3][0, 0] = 0.0
    with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
        for x in detector.batches(data):

            def loss_of(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.log(x)).pow(2).mean()
                loss.backward()
                return loss

            if by_closure:
                optimizer.step(loss_of)
            else:
                loss_of()
                optimizer.step()
    assert [event.kind for event in detector.events] == ["nonfinite", "skipped"]
    assert optimizer.updates == (6 if by_closure else 5)  # by then the update has begun
    assert bool(model.weight.isfinite().all())
