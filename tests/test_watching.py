"""What a detector sees besides the gate: layers, statistics, growth; as events, in the report and in the error."""

from __future__ import annotations

import json
import logging
import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstnan import NaNDetector, NaNEvent, NonFiniteError

pytestmark = pytest.mark.slow


class Logs(nn.Module):
    """Healthy until `shift` makes it take the logarithm of a negative number."""

    shift = 100.0

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.shift).log()


class RootOfZero(torch.autograd.Function):
    """Finite forward; backward divides by what it was given, which may be zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / (x != 0).float()


class Roots(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return RootOfZero.apply(x)


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.middle = middle
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.head(self.middle(self.encoder(x)))}


def train(
    model: nn.Module, optimizer: Any, detector: NaNDetector, steps: int, through: bool, before: Any = None
) -> None:
    given = [torch.randn(8, 4) for _ in range(steps)]
    for i, x in enumerate(detector.batches(given) if through else given):
        if before is not None:
            before(i)
        optimizer.zero_grad()
        model(x)["out"].square().mean().backward()
        optimizer.step()


def layer_events(events: Any) -> list[NaNEvent]:
    return [e for e in events if e.what in ("input", "output")]


class Late(nn.Module):
    """Healthy until it is told to fail."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            return (x - 100).log()
        return x + (x * 0).sqrt() if self.fails else x


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("through", ["batches", "plain loop"])
def test_a_late_failure_names_the_layer_though_most_steps_only_take_notes(where: str, through: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Late(), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    late = 21
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, layers=True) as detector:
        data = [torch.randn(4, 4) for _ in range(40)]
        for i, x in enumerate(detector.batches(data) if through == "batches" else data):
            if i == late:
                model[2].fails = where
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    report = caught.value.report
    assert report.step == late
    (event, *_) = [e for e in report.events if e.layer_type]
    assert (event.layer, event.layer_type, event.phase, event.step) == ("2", "Late", where, late)


@pytest.mark.parametrize("through", [True, False])
def test_the_first_bad_layer_is_in_the_events_and_in_the_report(through: bool) -> None:
    torch.manual_seed(0)
    model = Net(Logs())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def breaks(i: int) -> None:
        if i >= 5:
            model.middle.shift = -100.0  # type: ignore[assignment]

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, layers=True) as detector:
        train(model, optimizer, detector, 8, through, breaks)
    first = layer_events(detector.events)[0]
    assert (first.step, first.phase, first.what, first.layer) == (5, "forward", "output", "middle")
    assert first.layer_type == "Logs"
    assert first.tensor is not None
    assert (first.tensor.nan, first.tensor.shape) == (64, (8, 8))
    assert first.thread == threading.current_thread().name
    assert first.batch == (5 if through else None)
    report = caught.value.report
    assert first in report.events
    assert report.origin is not None
    assert (report.origin.op, report.origin.module) == ("log", "middle")
    assert "first bad: middle (Logs)" in str(caught.value)
    assert NaNEvent.from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_the_first_bad_layer_of_backward() -> None:
    torch.manual_seed(0)
    model = Net(Roots())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def breaks(i: int) -> None:
        if i == 3:
            with torch.no_grad():
                model.encoder[0].weight[2] = 0.0  # type: ignore[index,operator]
                model.encoder[0].bias[2] = 0.0  # type: ignore[index,operator]

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer, layers=True) as detector:
        train(model, optimizer, detector, 8, True, breaks)
    first = layer_events(detector.events)[0]
    assert (first.step, first.phase, first.what, first.layer) == (3, "backward", "input", "middle")
    assert caught.value.report.origin is not None
    assert caught.value.report.origin.phase == "backward"


def test_a_mask_is_an_event_at_most(caplog: pytest.LogCaptureFixture) -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x > x.mean(), -math.inf)

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.masks(x).softmax(-1)

        def __init__(self) -> None:
            super().__init__()
            self.masks = Masks()

    model = Net(Masked())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with NaNDetector(model, optimizer, layers=True) as detector:
        train(model, optimizer, detector, 100, True)
    assert detector.report is None
    assert caplog.text == ""
    told = layer_events(detector.events)
    assert 0 < len(told) < 40, "a hundred times the same is not told a hundred times"
    assert detector.summary()["nonfinite"] == 0


def test_statistics_are_kept_filtered_and_in_the_error(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = Net(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.9)
    detector = NaNDetector(model, optimizer, stats=16)
    with pytest.raises(NonFiniteError) as caught, detector:
        train(model, optimizer, detector, 5000, True, lambda i: optimizer.param_groups[0].update(lr=0.9 * 1.01**i))
    assert detector.stats is not None
    rows = detector.stats.dump(tmp_path / "stats.jsonl", pattern="encoder.*")
    assert {row["layer"] for row in rows} == {"encoder.0", "encoder.1"}
    assert {row["phase"] for row in rows} == {"forward", "backward"}
    assert len(rows) <= 16 * 4
    assert len((tmp_path / "stats.jsonl").read_text().splitlines()) == len(rows)
    assert caught.value.report.history.layers
    assert "layers " in str(caught.value)
    detector.stats.clear()
    assert detector.stats.dump() == []


def test_only_the_layers_that_were_asked_for() -> None:
    model = Net(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    whole = NaNDetector(model, optimizer, stats=4, trackable=lambda name, module: isinstance(module, nn.Sequential))
    less = NaNDetector(model, optimizer, stats=4, skip=[nn.Tanh, "head"])
    for detector in (whole, less):
        with detector:
            train(model, optimizer, detector, 3, True)
    assert whole.stats is not None
    assert less.stats is not None
    assert whole.stats.layers() == ["encoder"]
    assert less.stats.layers() == ["encoder.0", "middle"]


@pytest.mark.parametrize("one", [nn.Tanh, "head"])
def test_a_single_type_or_name_is_skipped(one: type | str) -> None:
    model = Net(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    found = []
    for skip in (one, [one]):
        with NaNDetector(model, optimizer, stats=4, skip=skip) as detector:
            train(model, optimizer, detector, 3, True)
        assert detector.stats is not None
        found.append(detector.stats.layers())
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_growing_gradients_are_warned_of_before_the_nan(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for _ in detector.batches(range(500)):
            x = torch.randn(32, 4)
            optimizer.zero_grad()
            (model(x) - 3 * x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    spikes = [e for e in detector.events if e.kind == "spike"]
    assert spikes, detector.summary()
    assert spikes[0].step is not None
    assert caught.value.report.step is not None
    assert spikes[0].step < caught.value.report.step
    assert spikes[0].layer in {name for name, _ in model.named_parameters()}
    assert "% of it is the gradient of" in spikes[0].message
    assert "% of it is the gradient of" in caplog.text


def spiked(detector: NaNDetector, model: nn.Module, optimizer: Any, at: int, steps: int = 200) -> list[float]:
    """Trains, with gradients a thousand times too large in one step; returns how far each step moved the weights."""
    moved = []
    for i in detector.batches(range(steps)):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        if i == at:
            for p in model.parameters():
                p.grad = p.grad * 1e4 if p.grad is not None else None
        optimizer.step()
        moved.append(max(float((p - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)))
    return moved


@pytest.mark.parametrize("at", [100, 101, 103, 107, 150])
def test_a_single_spike_is_warned_of_whatever_the_loss_says(at: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with NaNDetector(model, optimizer) as detector:
        spiked(detector, model, optimizer, at, at + 1)
    # Its update is larger than the weights.
    assert [(e.kind, e.step) for e in detector.events] == [("spike", at), ("forecast", at)]


def test_a_spike_can_be_clipped() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with NaNDetector(model, optimizer, guard="clip") as detector:
        moved = spiked(detector, model, optimizer, 100)
    assert moved[100] < 10 * max(moved[80:100])
    assert detector.summary()["clipped"] == 1
    assert [e.kind for e in detector.events][:2] == ["spike", "clipped"]


def test_an_absolute_limit() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with NaNDetector(model, optimizer, guard="clip", max_grad_norm=1e-3) as detector:
        spiked(detector, model, optimizer, -1, 20)
    assert detector.summary()["clipped"] >= 1


@pytest.mark.parametrize("above", [True, False])
def test_no_update_is_made_with_more_than_the_absolute_limit(above: bool) -> None:
    weight = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), 1.0)
    limit, norm, moved = (1.0, 50.0**0.5, []) if above else (10.0, 50.0**0.5, [])
    with NaNDetector(weight, optimizer, guard="clip", max_grad_norm=limit) as detector:
        for _ in range(100):
            before = weight.weight.detach().clone()
            optimizer.zero_grad()
            weight(torch.tensor([[5.0, 5.0]])).sum().backward()
            optimizer.step()
            moved.append((weight.weight - before).norm().item())
    assert moved == pytest.approx([min(limit, norm)] * 100, rel=1e-4)
    assert detector.summary()["clipped"] == (100 if above else 0)
    assert len([e for e in detector.events if e.kind == "clipped"]) == (7 if above else 0)


def test_no_guard_no_word(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with NaNDetector(model, optimizer, guard="off") as detector:
        spiked(detector, model, optimizer, 100)
    assert list(detector.events) == []
    assert caplog.text == ""


def test_an_explosion_that_stays_finite_is_an_event_and_reported_at_the_end() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    with NaNDetector(model, optimizer, on_nonfinite="warn") as detector:
        for _ in detector.batches(range(100)):
            x = torch.randn(32, 10)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        assert detector.report is None
    assert detector.report is not None
    assert detector.report.verdict == "diverged"
    assert "explosion" in [e.kind for e in detector.events]


def test_inference_in_another_thread_is_no_part_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = Net(nn.Identity())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def infer() -> None:
        with torch.no_grad():
            model(torch.full((2, 4), math.nan))

    def asks(i: int) -> None:
        if i == 5:
            thread = threading.Thread(target=infer, name="service")
            thread.start()
            thread.join()

    caplog.set_level(logging.WARNING)
    with NaNDetector(model, optimizer, layers=True) as detector:
        train(model, optimizer, detector, 10, True, asks)
    assert detector.report is None
    assert {(e.step, e.thread) for e in layer_events(detector.events)} == {(None, "service")}
    assert caplog.text == ""


@pytest.mark.parametrize(("name", "is_found"), [("running_var", True), ("lowest", False)])
def test_an_infinity_is_never_intended_in_the_statistics_of_a_batch_norm(name: str, is_found: bool) -> None:
    """In other buffers it may be: the start of a minimum, a mask."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model[0].register_buffer("lowest", torch.ones(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, optimizer, on_nonfinite="warn") as detector:
        for step in range(24):
            model(torch.rand(4, 3)).mean().backward()
            optimizer.step()
            if step == 3:
                model[0].get_buffer(name)[1] = torch.inf
    noticed = [report.noticed for report in detector.reports if report.noticed is not None]
    assert [one.name for one in noticed] == (["0.running_var"] if is_found else [])
