"""On a device every read waits: one read a step for policies that decide before the update, none otherwise.

Tensors in main memory stand for those of a device: the gate is told that reading them is not free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import firstnan.gate.gate
import firstnan.gate.gradient_checks
import firstnan.tensors.finite
from firstnan import NaNDetector, NonFiniteError
from firstnan.gate.gradient_checks import DeviceReads
from firstnan.records import Noticed
from loops import Batch, batches, birthplace, differences, seeded, state_of, with_bad_target

pytestmark = pytest.mark.slow


class Reading(TorchDispatchMode):
    """Counts single values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def read_all(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each read of many took; nothing is read for free."""
    taken: list[int] = []
    really = firstnan.tensors.finite.read_all

    def counted(values: list[Tensor]) -> list[float]:
        taken.append(len(values))
        return really(values)

    monkeypatch.setattr(firstnan.gate.gradient_checks, "read_all", counted)
    for module in (firstnan.gate.gate, firstnan.gate.gradient_checks):
        monkeypatch.setattr(module, "reads_are_free", lambda t: False)
        monkeypatch.setattr(module, "is_plain", lambda t: False)
    monkeypatch.setattr(firstnan.tensors.finite, "is_plain", lambda t: False)
    for module in (firstnan.tensors.finite, firstnan.gate.gate):
        monkeypatch.setattr(module, "plain_norm", lambda tensors: None)
    return taken


def train(
    detector: NaNDetector,
    model: nn.Module,
    optimizer: Any,
    given: list[Batch],
    count: Callable[[Reading], None] | None = None,
) -> None:
    for x, y in detector.batches(given):
        reading = Reading()
        with reading if count is not None else nullcontext():
            optimizer.zero_grad()
            loss = (model(x) * y.log()).mean()  # born: far away
            loss.backward()
            optimizer.step()
        if count is not None:
            count(reading)


def setup() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_one_read_a_step_where_the_update_waits_for_it(policy: Any, read_all: list[int]) -> None:
    model, optimizer = setup()
    reads = []
    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        train(detector, model, optimizer, batches(20), lambda r: reads.append(r.count + len(read_all)))
    assert reads == list(range(1, 21))
    # Loss and gradients, and what is left of the update before.
    assert min(read_all) == 2
    assert max(read_all) > 2


@pytest.mark.parametrize("policy", ["warn", "rollback"])
def test_no_read_where_nothing_waits(policy: Any, read_all: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = setup()
    reads, looks = [], []
    really = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda t: looks.append(t.numel()) or really(t))
    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        train(detector, model, optimizer, batches(20), lambda r: reads.append((r.count, len(looks))))
    assert not read_all
    assert [count for count, _ in reads] == [0] * 20
    # Each step's values are looked at in the next one, when they have long arrived.
    assert [n for _, n in reads] == list(range(20))


@pytest.mark.parametrize("policy", ["raise", "warn", "skip", "rollback"])
@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_a_bad_value_is_still_found(policy: Any, value: float, read_all: list[int]) -> None:
    model, optimizer = setup()
    given = with_bad_target(batches(8), 3, value=value)
    try:
        with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
            train(detector, model, optimizer, given)
    except NonFiniteError as error:
        raised = error.report
    else:
        raised = None
    assert (raised is not None) == (policy == "raise")
    if raised is not None:
        assert birthplace(raised) == "far away"
        assert raised.step == 3
    assert detector.summary()["nonfinite"] >= 1
    assert detector.report is not None
    if policy == "skip":
        expected, other = setup()
        with NaNDetector(expected, other) as quiet:
            train(quiet, expected, other, given[:3] + given[4:])
        assert not differences(state_of(expected, other), state_of(model, optimizer))
    if policy == "rollback":
        # The bad step was made before it was noticed in the next one; both are gone, and nothing is noticed twice.
        assert detector.summary()["rolled_back"] == 1
        expected, other = setup()
        with NaNDetector(expected, other) as quiet:
            train(quiet, expected, other, given[5:])
        assert not differences(state_of(expected, other), state_of(model, optimizer))


@pytest.mark.parametrize("value", [-1.0, 0.0])
def test_a_late_detection_is_reported_as_late(value: float, read_all: list[int], caplog: Any) -> None:
    """The weights are lost by then: they are not what was bad first."""
    model, optimizer = setup()
    with NaNDetector(model, optimizer, on_nonfinite="warn") as detector:
        train(detector, model, optimizer, with_bad_target(batches(5), 3, value=value))
    assert (detector.report.step, detector.report.origin) == (3, None)
    assert next(iter(detector.events)).step == 3
    assert "detected one step late" in caplog.text
    assert "checkpoint" not in caplog.text


def test_pending_values_are_not_part_of_the_replay(read_all: list[int]) -> None:
    """The second loss of the bad step is never looked at, since its optimizer is held."""
    (one, first), (two, second) = setup(), setup()
    with pytest.raises(NonFiniteError) as caught, NaNDetector([one, two], [first, second]) as detector:
        for x, y in detector.batches(with_bad_target(batches(3), 1)):
            first.zero_grad()
            (one(x) * y.log()).mean().backward()  # born: first loss
            first.step()
            second.zero_grad()
            (two(x) / (y + 1)).mean().backward()
            second.step()
    assert birthplace(caught.value.report) == "first loss"
    assert caught.value.report.step == 1


def test_pending_values_are_read_together(read_all: list[int]) -> None:
    reads = DeviceReads(synchronous=True)
    reads.add(Noticed("loss"), [], torch.tensor(2.0))
    reads.add(Noticed("gradient"), [], torch.tensor(3.0, dtype=torch.float64))
    assert [(m.noticed.what, m.size) for m in reads.take()] == [("loss", 2.0), ("gradient", 3.0)]
    assert read_all == [2]


def test_values_arrive_one_step_late_if_nothing_waits_for_them() -> None:
    reads = DeviceReads(synchronous=False)
    kept, gone = torch.ones(3), torch.ones(3)
    reads.add(Noticed("gradient"), [kept, gone], torch.tensor(1.0))
    assert reads.take() == []
    del gone
    reads.add(Noticed("gradient"), [], torch.tensor(2.0))
    (first,) = reads.take()
    assert first.size == 1.0
    assert len(first.tensors) == 1
    assert first.tensors[0] is kept


@pytest.mark.parametrize("synchronous", [True, False])
def test_extra_values_are_part_of_the_same_read(synchronous: bool, read_all: list[int]) -> None:
    class Rider:
        def __init__(self) -> None:
            self.judged: list[list[float]] = []

        def collect(self) -> list[Tensor]:
            return [torch.tensor(7.0), torch.tensor(8.0)]

        def judge(self, values: list[float]) -> None:
            self.judged.append(values)

    reads = DeviceReads(synchronous)
    reads.extra = rider = Rider()
    sizes = []
    for x in (1.0, 2.0):
        reads.add(Noticed("gradient"), [], torch.tensor(x))
        sizes += [m.size for m in reads.take()]
    assert sizes == ([1.0, 2.0] if synchronous else [1.0])
    assert rider.judged == [[7.0, 8.0]] * (2 if synchronous else 1)
    assert read_all == ([3, 3] if synchronous else [])
