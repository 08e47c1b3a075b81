"""The feature list of a NaN detector, row by row, each with the code that a user would write."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import firstnan
from firstnan import NaNDetector, NaNEvent, NonFiniteError
from zygote import Zygote

pytest_plugins = ["zygote"]
pytestmark = pytest.mark.slow


class Net(nn.Module):
    """A small model that fails where its input is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, 1)
        self.features = Log()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(self.features(x)))


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


def data(bad: int | None = 21) -> TensorDataset:
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0)) + 0.1
    if bad is not None:
        x[bad, 2] = -1.0
    return TensorDataset(x, x.sum(1, keepdim=True))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def train(model: nn.Module, detector: NaNDetector, optimizer: torch.optim.Optimizer, samples: TensorDataset) -> None:
    for x, y in detector.batches(DataLoader(samples, batch_size=4)):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def skipping(model: nn.Module, **options: Any) -> NaNDetector:
    """A detector that goes on after a failure, after a training with one bad sample."""
    optimizer = sgd(model)
    with NaNDetector(model, optimizer, on_nonfinite="skip", **options) as detector:
        train(model, detector, optimizer, data())
    return detector


# --- what is found ------------------------------------------------------------------------------------------------


def test_the_layer_is_named(model: Net) -> None:
    detector = skipping(model, layers=True)
    first = next(event for event in detector.events if event.layer_type)
    assert (first.layer, first.layer_type, first.phase, first.what) == ("features", "Log", "forward", "output")


def test_the_batch_is_named(model: Net) -> None:
    detector = skipping(model)
    assert {event.batch for event in detector.events} == {5}
    assert detector.report is not None
    assert detector.report.batch is not None
    assert detector.report.batch.index == 5


def test_the_line_the_cause_and_the_samples_are_in_the_error(model: Net) -> None:
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        train(model, detector, optimizer, data())
    report = caught.value.report
    assert report.cause is not None
    assert report.origin is not None
    assert report.origin.site is not None
    assert report.batch is not None
    assert (report.step, report.cause.slug, report.batch.dataset_indices) == (5, "log_of_negative", (21,))
    assert report.origin.site.code == "torch.log(x)"
    assert "log_of_negative" in str(caught.value)


def test_both_passes_are_watched(model: Net) -> None:
    """A finite loss with a bad gradient: the derivative of a square root at zero."""
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for x, _ in detector.batches(DataLoader(data(None), batch_size=4)):
            loss = (model(x) * 0).square().sum().sqrt()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert caught.value.report.origin is not None
    assert caught.value.report.origin.phase == "backward"


def test_parameters_and_optimizer_updates_are_watched(model: Net) -> None:
    optimizer = sgd(model, lr=math.nan)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        train(model, detector, optimizer, data(None))
    assert caught.value.report.cause is not None
    assert caught.value.report.cause.slug == "nan_lr"


def test_a_diagnosis_with_numbers(model: Net) -> None:
    cause = skipping(model).report.cause  # type: ignore[union-attr]
    assert cause is not None
    assert "the logarithm of numbers down to -1" in cause.why
    assert cause.evidence


def test_the_first_bad_batch_is_searched_for(model: Net) -> None:
    found = firstnan.find_bad_batch(
        lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]), DataLoader(data(), batch_size=4), model=model
    )
    assert found.index == 5


def test_the_bad_samples_are_searched_for(model: Net) -> None:
    x, y = data()[20:24]
    found = firstnan.find_bad_samples(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]), (x, y))
    assert (found.bad_samples, found.confirmed) == ((1,), True)


def test_every_operator_of_a_block_is_recorded(model: Net) -> None:
    with pytest.raises(NonFiniteError, match=r"torch\.log\(x\)"), firstnan.trace():
        model(-torch.ones(2, 4)).mean().backward()


# --- events -------------------------------------------------------------------------------------------------------


def test_events_are_data_and_a_callback_gets_each(model: Net) -> None:
    told: list[NaNEvent] = []
    detector = skipping(model, on_event=told.append)
    assert list(detector.events) == told
    assert {event.kind for event in told} >= {"nonfinite", "skipped"}
    assert json.loads(json.dumps(told[0].to_dict()))["step"] == 5


def test_events_come_from_any_thread(model: Net) -> None:
    detector = NaNDetector(model, layers=True, on_nonfinite="warn", max_events=10_000)
    with detector, torch.no_grad():
        threads = [threading.Thread(target=lambda: [model(-torch.ones(2, 4)) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len({event.thread for event in detector.events}) == 4
    assert all(event.step is None for event in detector.events)


def test_memory_is_bounded(model: Net) -> None:
    detector = NaNDetector(model, layers=True, on_nonfinite="warn", max_events=8)
    with detector, torch.no_grad():
        for _ in range(100):
            model(-torch.ones(2, 4))
    assert len(detector.events) == 8
    assert detector.events.dropped > 0
    assert detector.summary()["events_dropped"] == detector.events.dropped


def test_the_guard_warns_a_step_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = sgd(model, lr=2.0)
    x = torch.randn(64, 10)
    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        for batch in detector.batches([x] * 100):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    warned = [event for event in detector.events if event.kind in ("spike", "explosion")]
    assert warned
    assert (warned[0].step or 0) < (caught.value.report.step or 0)


# --- how it is used -----------------------------------------------------------------------------------------------


def test_it_is_a_context_manager_that_leaves_the_model_as_it_was(model: Net) -> None:
    before = [dict(vars(module)) for module in model.modules()]
    optimizer = sgd(model)
    with NaNDetector(model, optimizer, layers=True, stats=5) as detector:
        train(model, detector, optimizer, data(None))
    left = [sorted(vars(module)) for module in model.modules()]
    assert left == [sorted(values) for values in before]
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert not optimizer._optimizer_step_pre_hooks
    assert detector.summary()["steps"] == 10


def test_attach_and_detach(model: Net) -> None:
    optimizer = sgd(model)
    detector = NaNDetector(model, optimizer).attach()
    train(model, detector, optimizer, data(None))
    detector.detach()
    detector.detach()
    with pytest.raises(RuntimeError, match="not attached"):
        next(iter(detector.batches([1])))


def test_the_loop_stays_as_it_is_and_numbers_are_the_same() -> None:
    weights = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = sgd(model)
        detector = NaNDetector(model, optimizer, layers=True)
        if watched:
            detector.attach()
        for x, y in DataLoader(data(None), batch_size=4):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        detector.detach()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("skip", [Log, "features", "feat*"])
def test_layers_are_skipped_by_type_or_name(model: Net, skip: Any) -> None:
    detector = skipping(model, layers=True, skip=skip, stats=3)
    assert detector.stats is not None
    assert "features" not in detector.stats.layers()


def test_trackable_selects_leaves_or_composites(model: Net) -> None:
    chosen = skipping(model, stats=3, trackable=lambda name, module: name == "encoder")
    assert chosen.stats is not None
    assert chosen.stats.layers() == ["encoder"]
    leaves = skipping(Net(), stats=3, layers=True)
    assert leaves.stats is not None
    assert set(leaves.stats.layers()) == {"features", "encoder.0", "encoder.1", "head"}


def test_layer_names_are_readable() -> None:
    """Wrappers do not appear in them."""
    wrapped = torch.compile(Net(), backend="eager")
    detector = NaNDetector(wrapped, layers=True, on_nonfinite="warn")  # type: ignore[arg-type]
    with detector, torch.no_grad():
        wrapped(-torch.ones(2, 4))
    assert all("_orig_mod" not in event.layer for event in detector.events)


# --- statistics ---------------------------------------------------------------------------------------------------


def test_statistics_are_a_ring_buffer_that_can_be_filtered_dumped_cleared_and_turned_off(
    model: Net, tmp_path: Path
) -> None:
    optimizer = sgd(model)
    with NaNDetector(model, optimizer, layers=True, stats=3) as detector:
        stats = detector.stats
        assert stats is not None
        train(model, detector, optimizer, data(None))
        assert {row["step"] for row in stats.select("head")} == {7, 8, 9}
        assert {row["layer"] for row in stats.select("encoder.*")} == {"encoder.0", "encoder.1"}
        rows = stats.dump(tmp_path / "stats.jsonl")
        assert len((tmp_path / "stats.jsonl").read_text().splitlines()) == len(rows) == len(stats)
        assert "encoder.0" in str(stats)
        assert str(rows).startswith("layer ")
        stats.clear()
        assert stats.dump() == []
        stats.on = False
        train(model, detector, optimizer, data(None))
        assert stats.dump() == []
        stats.on = True
        train(model, detector, optimizer, data(None))
        assert {row["step"] for row in stats.dump()} == {27, 28, 29}


def test_single_values_gradients_and_weights_are_checked(model: Net) -> None:
    assert firstnan.check(1.5) == 1.5
    with pytest.raises(NonFiniteError, match="scores"):
        firstnan.check({"loss": 0.1, "scores": [1.0, math.inf]}, "scores")
    nn.functional.mse_loss(model(torch.full((2, 4), 0.5)), torch.ones(2, 1)).backward()
    assert firstnan.check_gradients(model) == []
    assert firstnan.check_weights(model) == []
    with torch.no_grad():
        model.head.weight[0, 3] = math.inf
    assert [finding.problem for finding in firstnan.check_weights(model)] == ["nonfinite"]


def test_everything_public_prints_short(model: Net) -> None:
    detector = skipping(model, layers=True, stats=3)
    shown: list[Any] = [detector, detector.report, detector.events, detector.events[0], detector.batches([1])]
    report = detector.report
    assert report is not None
    shown += [report.batch, report.origin, report.cause, report.history, report.remedies]
    with firstnan.trace() as block:
        model(torch.rand(3, 4)).sum().backward()
    model.zero_grad()
    model.head.weight.grad = torch.full_like(model.head.weight, math.nan)
    shown += [block, firstnan.check_gradients(model)[0]]
    bad = torch.tensor([[1.0] * 4, [math.nan] * 4, [0.5] * 4])
    shown += [firstnan.find_bad_batch(lambda x: model(x).sum(), [bad], model=model, progress=False)]
    shown += [firstnan.find_bad_samples(lambda x: model(x).sum(), bad)]
    for one in shown:
        text = repr(one)
        assert " object at 0x" not in text
        assert max(map(len, text.splitlines())) < 200
    assert "NaN created in forward, step 5" in repr(detector.report)


# --- training goes on ---------------------------------------------------------------------------------------------


def test_a_bad_step_is_skipped_and_leaves_nothing(model: Net) -> None:
    detector = skipping(model)
    assert detector.summary()["skipped"] == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_bad_step_is_rolled_back(model: Net) -> None:
    optimizer = sgd(model)
    with NaNDetector(model, optimizer, on_nonfinite="rollback", snapshot_every=2) as detector:
        train(model, detector, optimizer, data())
    assert detector.summary()["rolled_back"] == 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_fix_is_verified_before_it_is_shown(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for step in range(12):\n"
        "    x = torch.rand(8, 4)\n"
        "    if step == 5:\n"
        "        x[3] = 0\n"
        "    loss = (model(x / x.sum(1, keepdim=True)) - 1).square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    result = firstnan(["run", "--verify", "20", "train.py"], cwd=tmp_path)
    best = result.found["remedies"][0]
    assert (best["tried"], best["failing_step_finite"]) == (True, True)
    assert "tried: step 5 is finite" in result.stderr


# --- with the rest of torch ---------------------------------------------------------------------------------------


def test_compiled_models(model: Net) -> None:
    compiled = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        train(compiled, detector, optimizer, data())  # type: ignore[arg-type]


def test_mixed_precision_with_a_scaler(model: Net) -> None:
    """An overflow that the scaler skips is no failure; a NaN that stays is."""
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=2.0**100)

    def loop(detector: NaNDetector, batches: Iterator[Any] | Any) -> None:
        for x, y in detector.batches(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    with NaNDetector(model, optimizer) as detector:
        loop(detector, DataLoader(data(None), batch_size=4))
    assert detector.report is None
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        loop(detector, DataLoader(data(), batch_size=4))


def test_a_report_is_saved_and_read_again(model: Net, tmp_path: Path) -> None:
    report = skipping(model).report
    assert report is not None
    (tmp_path / "report.json").write_text(json.dumps(report.to_dict()))
    assert firstnan.load(tmp_path / "report.json").step == 5
