"""One engine behind every door: its phases, its one observer, and what replays must and must not do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from firstnan import NaNDetector, NonFiniteError
from firstnan.engine.policies import TRANSITIONS
from firstnan.engine.session import Session
from firstnan.observe import manifest
from firstnan.observe.hooks import Hooks
from firstnan.observe.observer import Observer
from zygote import Zygote

pytest_plugins = ["zygote"]
ROOT = Path(__file__).parents[1]


def test_the_table_of_phases_in_the_design_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `([A-Z]+)` \| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    table = {phase: {name.strip(" `") for name in after.split(",")} for phase, _, after in rows}
    assert table == {phase.name: {one.name for one in after} for phase, after in TRANSITIONS.items()}
    assert {phase: what.strip() for phase, what, _ in rows} == {phase.name: phase.value for phase in TRANSITIONS}


def test_a_transition_that_is_not_in_the_table_is_an_error() -> None:
    session = NaNDetector(nn.Linear(1, 1))._new_session()
    with pytest.raises(AssertionError, match="WATCHING -> REPLAYING"):
        session.enter(next(phase for phase in TRANSITIONS if phase.name == "REPLAYING"))


def test_the_session_is_the_one_observer_and_has_an_answer_to_everything() -> None:
    assert Observer.__subclasses__() == [Session]
    assert Session.__subclasses__() == []
    told = {name for name, value in vars(Observer).items() if callable(value) and not name.startswith("_")}
    assert told <= set(vars(Session))


@pytest.mark.parametrize("program", [True, False])
def test_hooks_replace_what_the_manifest_names_and_nothing_else(program: bool) -> None:
    owners = {id(owner): owner for owner, _ in manifest.REPLACED}.values()

    def seen() -> dict[tuple[int, str], Any]:
        return {(id(owner), name): value for owner in owners for name, value in list(vars(owner).items())}

    before = seen()
    hooks = Hooks(Observer(), program=program)
    hooks.install()
    try:
        after = seen()
    finally:
        hooks.remove()
    changed = {key for key in before | after if before.get(key) is not after.get(key)}
    names = (
        *manifest.TRAINING,
        *manifest.COLLECTIVES,
        *manifest.ALL_OPTIMIZERS,
        *(manifest.PROGRAM if program else ()),
    )
    assert changed == {(id(owner), name) for owner, name in names}
    assert seen() == before


# --- the replay fails where the step failed -------------------------------------------------------------------------

# The critic's update makes its weight negative: run again with that weight, the critic's own loss fails first, in
# another line than the one that failed.
PAIR = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
critic, maker = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
nn.init.constant_(critic.weight, 0.95)
critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
maker_optimizer = torch.optim.SGD(maker.parameters(), lr=0.01)
for (x,) in DataLoader(TensorDataset(torch.ones(40, 1)), batch_size=2):
    critic_optimizer.zero_grad()
    critic_loss = critic(x).log().mean() * 0 + critic(x).mean()  # the wrong line
    critic_loss.backward()
    critic_optimizer.step()
    maker_optimizer.zero_grad()
    loss = maker(x).square().mean() + critic(x).sqrt().mean()  # the right line
    loss.backward()
    maker_optimizer.step()
"""


def line_of(text: str, comment: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if comment in line)


def test_the_replay_of_two_optimizers_fails_where_the_step_did(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAIR)
    found = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path).found
    assert (found["origin"]["op"], found["origin"]["line"]) == ("sqrt", line_of(PAIR, "the right line"))
    assert found["replay"] == "the failing batch was handed out again"
    assert found["reproduced"] == "deterministic"


def test_a_detector_of_two_optimizers_too() -> None:
    critic, maker = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(critic.weight, 0.95)
    optimizers = [torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(maker.parameters(), lr=0.01)]
    with pytest.raises(NonFiniteError) as caught, NaNDetector([critic, maker], optimizers) as detector:
        for x in detector.batches([torch.ones(2, 1)] * 20):
            optimizers[0].zero_grad()
            (critic(x).log().mean() * 0 + critic(x).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (maker(x).square().mean() + critic(x).sqrt().mean()).backward()
            optimizers[1].step()
    origin = caught.value.report.origin
    assert origin is not None
    assert origin.op == "sqrt"


# --- replays leave no trace -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).squeeze(1)


Through = Callable[[NaNDetector, Callable[[Tensor], None], list[Tensor]], None]


def by_batches(detector: NaNDetector, step: Callable[[Tensor], None], data: list[Tensor]) -> None:
    for x in detector.batches(data):
        step(x)


def by_step(detector: NaNDetector, step: Callable[[Tensor], None], data: list[Tensor]) -> None:
    for x in data:
        detector.step(step, x)


def bad_data() -> list[Tensor]:
    torch.manual_seed(0)
    data = [torch.rand(8, 3) + 0.1 for _ in range(6)]
    data[4][5] = 0.0
    return data


def trained(through: Through, **options: Any) -> tuple[NaNDetector, list[int]]:
    """A training whose step 4 fails by one sample, and how often the step ran."""
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls: list[int] = []

    def step(x: Tensor) -> None:
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(x) - x.log().sum(1)).square().mean()
        loss.backward()
        optimizer.step()

    detector = NaNDetector(model, optimizer, **options)
    with pytest.raises(NonFiniteError), detector:
        through(detector, step, bad_data())
    return detector, calls


@pytest.mark.parametrize("through", [by_batches, by_step])
def test_replays_and_searches_leave_no_trace_in_events_and_counts(through: Through, in_process: None) -> None:
    detector, calls = trained(through, layers=True)
    assert len(calls) > 5 + 3  # the failing step ran again: traced, and with samples replaced
    assert detector.report is not None
    assert detector.report.batch is not None
    assert (detector.report.batch.bad_samples, detector.report.batch.confirmed) == ((5,), True)
    # The loss of the failing step; no layer created it.
    assert [(e.what, e.layer) for e in detector.events] == [("loss", "")]
    counts = detector.summary()
    assert (counts["steps"], counts["nonfinite"], counts["warnings"]) == (4, 1, 0)


@pytest.mark.parametrize("through", [by_batches, by_step])
def test_replays_leave_no_trace_in_the_statistics(through: Through) -> None:
    detector, _ = trained(through, stats=8)
    assert detector.stats is not None
    # What the same steps show without a replay: a plain loop, whose failing step is not run again by the loop.
    plain, _ = trained(lambda detector, step, data: [step(x) for x in data] and None, stats=8)
    assert plain.stats is not None
    forward = [row for row in detector.stats.select() if row["phase"] == "forward"]
    assert forward == [row for row in plain.stats.select() if row["phase"] == "forward"]


# --- a finite replay is compared, whatever the door -----------------------------------------------------------------


@pytest.mark.parametrize("through", [by_batches, by_step])
def test_a_replay_that_was_finite_is_compared(through: Through, in_process: None) -> None:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    calls = 0

    def step(x: Tensor) -> None:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = model(x).square().mean() * float(calls)
        (loss.log() - torch.inf if calls == 3 else loss).backward()
        optimizer.step()

    with pytest.raises(NonFiniteError) as caught, NaNDetector(model, optimizer) as detector:
        through(detector, step, bad_data())
    report = caught.value.report
    assert report.reproduced == "transient"
    assert report.cause is not None
    assert "called with other = 4.0, then with other = 5.0" in " ".join([*report.cause.evidence, *report.notes])
    assert calls == 5  # as it failed, its replay, and one more to compare


@pytest.mark.parametrize("policy", ["skip", "warn", "rollback"])
def test_a_step_that_was_finite_in_its_replays_is_made(policy: Any, in_process: None) -> None:
    model, calls = nn.Linear(2, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = nn.Linear(2, 1)
    expected.load_state_dict(model.state_dict())
    other = torch.optim.SGD(expected.parameters(), lr=0.1)
    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        for x in detector.batches([torch.ones(3, 2) * i for i in range(4)]):
            calls += 1
            optimizer.zero_grad()
            (model(x).mean() * (float("nan") if calls == 3 else 1.0)).backward()
            optimizer.step()
    for i in range(4):
        other.zero_grad()
        expected(torch.ones(3, 2) * i).mean().backward()
        other.step()
    assert torch.equal(model.weight, expected.weight)
    assert detector.report is not None
    assert detector.report.reproduced == "transient"


def test_a_failure_that_does_not_recur_is_reported_under_warn_too(
    caplog: pytest.LogCaptureFixture, in_process: None
) -> None:
    model, calls = nn.Linear(2, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, optimizer, on_nonfinite="warn") as detector:
        for x in detector.batches([torch.ones(3, 2)] * 4):
            calls += 1
            optimizer.zero_grad()
            (model(x).mean() * (float("nan") if calls == 3 else 1.0)).backward()
            optimizer.step()
    assert "[transient]" in caplog.text


# --- a loop that goes on without us ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_loop_that_was_left_in_a_bad_step_trains_on(policy: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> bool:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(x).mean() * x.sum().log()).backward()
        optimizer.step()
        return not torch.equal(before, model.weight)

    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        for x in detector.batches([torch.ones(3, 2), -torch.ones(3, 2), torch.ones(3, 2)]):
            step(x)
            if (x < 0).any():
                break
        # Nobody asks for the failing batch any more; at most one update passes before that is known.
        assert [step(torch.ones(3, 2) * i) for i in range(2, 7)][1:] == [True] * 4
    assert torch.isfinite(model.weight).all()


@pytest.mark.parametrize("read", ["loss.item()", "float(loss)", "loss.tolist()", "loss.detach().numpy()"])
def test_a_program_that_reads_a_nan_and_stops_is_understood(read: str, firstnan: Zygote, tmp_path: Path) -> None:
    lines = ["import torch", "w = torch.zeros(1, requires_grad=True)", "loss = (w - 1).log().sum()", f"x = {read}"]
    text = "\n".join([*lines, "raise SystemExit(0)", ""])
    (tmp_path / "train.py").write_text(text)
    found = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path).found
    assert (found["origin"]["op"], found["origin"]["line"]) == ("log", 3)
