"""A model that is only called, without backward or optimizer: the first bad layer raises out of the call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError

pytestmark = pytest.mark.slow


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)  # born: model


def model(end: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), Logarithm(), nn.Linear(8, 2), end or nn.Identity())


def data(bad: int = 3) -> list[Tensor]:
    """Of batch `bad` the sigmoid is 0, and its logarithm negative infinity, which the linear layer makes a NaN."""
    given = [torch.randn(6, 4) for _ in range(5)]
    given[bad][2] = torch.tensor([1e4, -1e4, 1e4, -1e4])
    return given


def loader(bad: int = 3) -> Any:
    return DataLoader(TensorDataset(torch.cat(data(bad))), batch_size=6)


Call = Callable[[NaNDetector, nn.Module], None]


def with_batches(detector: NaNDetector, net: nn.Module) -> None:
    with torch.no_grad():
        for (x,) in detector.batches(loader()):
            net(x)


def with_a_loader(detector: NaNDetector, net: nn.Module) -> None:
    with torch.inference_mode():
        for (x,) in loader():
            net(x)


def with_gradients(detector: NaNDetector, net: nn.Module) -> None:
    for (x,) in loader():
        net(x)


@pytest.mark.parametrize("call", [with_batches, with_a_loader, with_gradients])
@pytest.mark.parametrize("training", [True, False])
def test_the_first_nan_raises_with_layer_and_batch(call: Call, training: bool) -> None:
    net = model().train(training)
    detector = NaNDetector(net, layers=True)
    with pytest.raises(NonFiniteError) as caught, detector:
        call(detector, net)
    report = caught.value.report
    assert (report.step, report.batch.index) == (None, 3)
    assert report.origin is not None
    assert report.origin.module == "2"
    event = detector.events[0]
    assert (event.layer, event.what, event.batch, event.step) == ("2", "output", 3, None)
    assert event.message == "batch 3: layer 2 (Logarithm): its output is Inf"
    assert "first bad: 2 (Logarithm), output" in str(caught.value)
    assert "batch 3" in str(caught.value)
    assert detector.report is report


def test_without_a_loader_the_calls_are_counted(in_process: None) -> None:
    net = model()
    detector = NaNDetector(net, layers=True)
    with pytest.raises(NonFiniteError), detector, torch.no_grad():
        [net(x) for x in data()]
    assert detector.events[0].message.startswith("call 3 of the model: layer 2")
    assert detector.events[0].batch is None


def test_bad_data_is_an_input(in_process: None) -> None:
    net = model()
    detector = NaNDetector(net, layers=True)
    with pytest.raises(NonFiniteError) as caught, detector, torch.no_grad():
        net(torch.full((2, 4), torch.nan))
    assert (detector.events[0].layer, detector.events[0].what) == ("0", "input")
    assert "0 (Linear), input" in str(caught.value)


def test_parts_that_are_called_directly(in_process: None) -> None:
    parts = nn.ModuleDict({"a": nn.Linear(4, 8), "log": Logarithm()})
    detector = NaNDetector(parts, layers=True)
    with pytest.raises(NonFiniteError), detector, torch.no_grad():
        parts["log"](parts["a"](torch.randn(3, 4)))
    assert detector.events[0].layer == "log"


class Cleans(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nan_to_num(x, 0.0, 0.0, 0.0)


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x < 10, -torch.inf)


def test_a_value_that_vanishes_is_an_event_only() -> None:
    net = model(Cleans())
    with NaNDetector(net, layers=True) as detector, torch.no_grad():
        for x in data():
            net(x)
    assert detector.report is None
    assert detector.events[0].layer == "2"


def test_a_mask_is_not_a_failure() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), Masks())
    with NaNDetector(net, layers=True) as detector, torch.no_grad():
        net(torch.randn(3, 4))
    assert detector.report is None


def test_a_choice_made_of_nan_is_one(in_process: None) -> None:
    net = model(Chooses())
    detector = NaNDetector(net, layers=True)
    with pytest.raises(NonFiniteError), detector, torch.no_grad():
        for x in data():
            net(x)


def test_warn_reports_and_goes_on(caplog: pytest.LogCaptureFixture, in_process: None) -> None:
    net, seen = model(), 0
    with NaNDetector(net, layers=True, on_nonfinite="warn") as detector, torch.no_grad():
        for x in detector.batches(data(1) + data(1)):
            net(x)
            seen += 1
    assert seen == 10
    assert [(e.layer, e.batch) for e in detector.events][:1] == [("2", 1)]
    assert detector.report is not None
    assert any("created in forward" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "step None" not in caplog.text


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_policy_about_steps_has_an_event(policy: Any, trained: bool, caplog: pytest.LogCaptureFixture) -> None:
    net = model().eval()
    optimizer = torch.optim.SGD(net.parameters(), 0.1) if trained else None
    with NaNDetector(net, optimizer, layers=True, on_nonfinite=policy) as detector, torch.no_grad():
        for x in data():
            net(x)
    assert detector.events[0].layer == "2"
    assert any("so is the model's output" in r.getMessage() for r in caplog.records)
    assert detector.summary()["skipped"] == 0


def test_without_an_optimizer_a_bad_step_cannot_be_skipped() -> None:
    net = model()
    with pytest.raises(NonFiniteError), NaNDetector(net, layers=True, on_nonfinite="skip"):
        for x in data():
            net(x).square().mean().backward()


def test_an_evaluation_between_steps_raises_if_layers_are_watched() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    detector = NaNDetector(net, optimizer, layers=True)
    with pytest.raises(NonFiniteError) as caught, detector:
        for x in detector.batches([torch.randn(6, 4) for _ in range(3)]):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        before = [p.clone() for p in net.parameters()]
        with torch.no_grad():
            for (x,) in loader(bad=1):
                net(x)
    assert caught.value.report.origin is not None
    assert caught.value.report.origin.module == "2"
    assert (caught.value.report.step, caught.value.report.batch.index) == (None, 1)
    assert all(map(torch.equal, before, net.parameters()))


def test_without_layers_a_model_that_is_only_called_is_left_alone() -> None:
    net = model()
    with NaNDetector(net) as detector, torch.no_grad():
        for x in data():
            net(x)
    assert detector.report is None


@pytest.mark.parametrize("root", [False, True])
def test_the_fast_path_of_attention_stays(root: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    net = layer if root else nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 8)).eval()
    x = torch.randn(3, 5, 8)

    def operators() -> tuple[Tensor, set[str]]:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, torch.no_grad():
            result = net(x)
        return result, {event.key for event in profile.key_averages()}

    alone, usual = operators()
    assert "aten::_transformer_encoder_layer_fwd" in usual
    with NaNDetector(net, layers=True) as detector:
        watched, seen = operators()
        assert "aten::_transformer_encoder_layer_fwd" in seen
        assert torch.equal(alone, watched)
        with torch.no_grad():
            next(net.parameters()).fill_(torch.nan)
            with pytest.raises(NonFiniteError):
                net(x)
    assert detector.events[0].layer == ("TransformerEncoderLayer" if root else "0.layers.0")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bad_data_raises_on_the_fast_path_of_attention(mode: Any, in_process: None) -> None:
    torch.manual_seed(0)
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x = torch.randn(3, 5, 8)
    x[1, 2, 3] = torch.nan
    with pytest.raises(NonFiniteError) as caught, NaNDetector(net, layers=True) as detector, mode():
        net(x)
    assert (detector.events[0].layer, detector.events[0].what) == ("layers.0", "input")
    assert caught.value.report.cause is not None
    assert caught.value.report.cause.slug == "nan_input"
