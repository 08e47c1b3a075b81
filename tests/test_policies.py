"""What is done about a bad step: the state afterwards, compared to the last bit with what it should be."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from firstnan import NaNDetector, NonFiniteError
from firstnan.api import detector as detectors
from firstnan.engine import block_trials
from firstnan.engine.step_trial import StepTrials
from firstnan.engine.trials import Limits
from firstnan.records import Report
from firstnan.tensors import state
from loops import Batch, batches, birthplace, differences, seeded, state_of, with_bad_target

pytestmark = pytest.mark.slow

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


class Run:
    """A model, its optimizer and a schedule that moves with every step."""

    def __init__(self, optimizer: str = "adamw", model: nn.Module | None = None) -> None:
        self.model = seeded() if model is None else model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.model(x)
        return (out * y.log()).mean()  # born: loss

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizer, self.schedule)


class BackwardRun(Run):
    """The loss stays finite; its derivative does not where a target is zero."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.model(x) * y).abs().sqrt().mean()  # born: derivative


def drive(run: Run, detector: NaNDetector, given: Iterable[Batch], through: str) -> None:
    for x, y in detector.batches(given) if through == "batches" else given:
        if through == "step":
            detector.step(run.step, x, y)
        else:
            run.step(x, y)


def undisturbed(kind: type[Run], given: Iterable[Batch], optimizer: str = "adamw") -> dict[str, Any]:
    run = kind(optimizer)
    for x, y in given:
        run.step(x, y)
    return run.state()


def without(given: list[Batch], *which: int) -> list[Batch]:
    return [b for i, b in enumerate(given) if i not in which]


# skip


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("bad", [(0,), (3,), (5,), (2, 3)])
def test_a_skipped_step_never_was(through: str, optimizer: str, bad: tuple[int, ...]) -> None:
    given = batches(6)
    run = Run(optimizer)
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        drive(run, detector, with_bad_target(given, *bad), through)
    assert not differences(undisturbed(Run, without(given, *bad), optimizer), run.state())
    assert detector.summary()["skipped"] == detector.summary()["nonfinite"] == len(bad)


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("bad", [(0,), (3,), (5,)])
def test_a_step_skipped_for_its_gradients_never_was(through: str, bad: tuple[int, ...]) -> None:
    given = batches(6)
    run = BackwardRun()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        drive(run, detector, with_bad_target(given, *bad, value=0.0), through)
    assert not differences(undisturbed(BackwardRun, without(given, *bad)), run.state())
    assert detector.report is not None
    assert detector.report.noticed.what == "gradient"
    if through != "plain":
        assert birthplace(detector.report) == "derivative"


@pytest.mark.parametrize("fails", ["session.turns_around", "conclude.propose"])
def test_the_weights_are_protected_and_no_cause_is_made_up_though_we_fail(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"firstnan.engine.{fails}", lambda *args: 1 / 0)
    given = batches(6)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        drive(run, detector, with_bad_target(given, 3), "batches")
    assert not differences(undisturbed(Run, without(given, 3)), run.state())
    assert detector.report is not None
    assert (detector.report.step, detector.report.cause) == (3, None)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("through", ["batches", "plain"])
def test_a_model_that_is_saved_right_after_a_skipped_step_is_finite(policy: Any, through: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = list(torch.randn(6, 8, 4))
    given[3][2] = torch.nan
    saved = []
    with NaNDetector(model, optimizer, on_nonfinite=policy) as detector:
        for x in detector.batches(given) if through == "batches" else given:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            saved.append(copy.deepcopy(model.state_dict()))
    assert [all(bool(v.isfinite().all()) for v in state.values()) for state in saved] == [True] * 6
    assert all(torch.equal(saved[3][name], value) for name, value in saved[2].items() if policy == "skip")


def test_many_skips_are_all_exact_though_few_are_looked_at_closely() -> None:
    given, bad = batches(16), (1, 3, 5, 7, 9, 11)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        drive(run, detector, with_bad_target(given, *bad), "batches")
    assert not differences(undisturbed(Run, without(given, *bad)), run.state())
    assert detector.summary()["skipped"] == 6
    assert [report.step for report in detector.reports] == [1, 3, 5]
    assert detector.report is detector.reports[0]


@pytest.mark.parametrize("through", ["batches", "plain"])
def test_many_skips_search_the_process_for_schedulers_once(through: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = state.find_live_objects
    monkeypatch.setattr(state, "find_live_objects", lambda *kinds: searches.append(kinds) or search(*kinds))
    given, bad = batches(24), range(1, 24, 2)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        drive(run, detector, with_bad_target(given[:16], *[n for n in bad if n < 16]), through)
        assert len(searches) == 2  # when attached, and at the first skip
        run.schedule = torch.optim.lr_scheduler.StepLR(run.optimizer, 3)
        drive(run, detector, with_bad_target(given[16:], 1, 3, 5, 7), through)
    assert len(searches) == 3
    assert run.schedule.last_epoch == 4
    assert detector.summary()["skipped"] == 12


@pytest.mark.parametrize("through", ["batches", "plain"])
def test_skip_when_the_update_itself_is_bad(through: str) -> None:
    """The gradient of an unused weight is zero, and Adam without eps divides zero by zero."""

    def run(given: list[Tensor], detect: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1))
        optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

        def loop(handed_out: Iterable[Tensor]) -> None:
            for x in handed_out:
                optimizer.zero_grad()
                model[0](x).sum().backward()
                optimizer.step()
                schedule.step()

        if not detect:
            loop(given)
        else:
            with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
                loop(detector.batches(given) if through == "batches" else given)
            assert detector.summary()["skipped"] == 1
            assert detector.report.origin.phase == "optimizer"
        return state_of(model, optimizer, schedule)

    good = [torch.rand(3, 4) + 1 for _ in range(3)]
    bad = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    # First of all: later on the running averages of Adam are not zero any more.
    assert not differences(run(good, detect=False), run([bad, *good], detect=True))


@pytest.mark.parametrize("through", [True, False])
@pytest.mark.parametrize(("parts", "bad"), [(2, 4), (2, 5), (10, 19)])
def test_a_whole_accumulated_step_is_skipped(parts: int, bad: int, through: bool) -> None:
    def run(given: list[Batch], detect: bool) -> dict[str, Any]:
        run = Run()

        def loop(handed_out: Iterable[Batch]) -> None:
            for number, (x, y) in handed_out:
                run.loss(x, y).backward()
                if number % parts == parts - 1:
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                    run.schedule.step()

        numbered: Any = list(enumerate(given))
        if not detect:
            loop(numbered)
        else:
            with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
                loop(detector.batches(numbered) if through else numbered)
            assert detector.summary()["skipped"] == 1
        return run.state()

    given = batches(3 * parts)
    step = range(bad // parts * parts, (bad // parts + 1) * parts)
    assert not differences(run(without(given, *step), False), run(with_bad_target(given, bad), True))


def test_skip_with_two_optimizers_on_one_loss() -> None:
    def run(given: list[Batch], detect: bool) -> dict[str, Any]:
        model = seeded()
        pair = [torch.optim.SGD(model.first.parameters(), 0.1, momentum=0.9), torch.optim.Adam(model.last.parameters())]

        def loop(handed_out: Iterable[Batch]) -> None:
            for x, y in handed_out:
                for o in pair:
                    o.zero_grad()
                (model(x) * y.log()).mean().backward()
                for o in pair:
                    o.step()

        if not detect:
            loop(given)
        else:
            with NaNDetector(model, pair, on_nonfinite="skip") as detector:
                loop(detector.batches(given))
            assert detector.summary()["skipped"] == 1
        return state_of(model, *pair)

    given = batches(6)
    assert not differences(run(without(given, 2), False), run(with_bad_target(given, 2), True))


def test_skip_inside_a_closure() -> None:
    def run(given: list[Batch], detect: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def loop(handed_out: Iterable[Batch]) -> None:
            for x, y in handed_out:

                def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                    optimizer.zero_grad()
                    loss = (model(x) - y.log()).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)

        if not detect:
            loop(given)
        else:
            with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
                loop(detector.batches(given))
            assert (detector.summary()["steps"], detector.summary()["skipped"]) == (4, 2)
        return state_of(model, optimizer)

    given = batches(6)
    assert not differences(run(without(given, 0, 3), False), run(with_bad_target(given, 0, 3), True))


@pytest.mark.parametrize("through", ["batches", "plain"])
def test_leaving_the_loop_at_a_skipped_step_leaves_nothing_of_it(through: str) -> None:
    given = batches(4)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        bad = with_bad_target(given, 2)
        for i, (x, y) in enumerate(detector.batches(bad) if through == "batches" else bad):
            run.step(x, y)
            if i == 2:
                break
    assert detector.summary()["skipped"] == 1
    assert not differences(undisturbed(Run, given[:2]), run.state())


def test_a_step_whose_batches_are_gone_is_skipped_too(caplog: pytest.LogCaptureFixture, in_process: None) -> None:
    """The inner loop is left at its bad step, so that nobody asks for its batch again."""
    given = batches(6)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        for part in detector.batches([given[:3], given[3:]]):
            for x, y in detector.batches(with_bad_target(part, 1)):
                run.step(x, y)
                if (y < 0).any():
                    break
    assert detector.summary()["skipped"] == 2
    assert not differences(undisturbed(Run, [given[0], given[3]]), run.state())
    assert "the training loop could not be replayed for this step" in detector.report.notes
    assert len(caplog.records) == 3


def test_too_many_skips_in_a_row_end_training() -> None:
    given = batches(9)
    run = Run()
    with (
        pytest.raises(NonFiniteError) as caught,
        NaNDetector(run.model, run.optimizer, on_nonfinite="skip", streak=2) as detector,
    ):
        drive(run, detector, with_bad_target(given, 1, 2, 4, 5, 6), "batches")
    assert "training ends: 3 steps in a row were non-finite (streak=2)" in caught.value.report.notes
    assert caught.value.report.step == 6
    assert detector.report.step == 1
    assert detector.reports[-1] is caught.value.report
    assert not differences(undisturbed(Run, without(given, 1, 2, 4, 5, 6, 7, 8)), run.state())
    assert detector.summary()["skipped"] == 4


def test_skips_are_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    run, heard = Run(), []
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip", on_event=heard.append) as detector:
        drive(run, detector, with_bad_target(batches(6), 1, 4), "batches")
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [w.split(":")[1] for w in warnings if "skipped:" in w] == [" step 1", " step 4"]
    assert "log_of_negative" in warnings[0]
    assert warnings[-1] == "firstnan: 4 updates, 2 non-finite steps, 2 skipped"
    assert [(e.kind, e.step) for e in heard] == [("nonfinite", 1), ("skipped", 1), ("nonfinite", 4), ("skipped", 4)]
    assert list(detector.events) == heard


# rollback


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("bad", [0, 1, 3, 4, 5])
def test_rollback_goes_to_the_last_snapshot(through: str, bad: int) -> None:
    """Kept before training and after every second step; the steps since are lost, and the schedule is not."""
    given = batches(6)
    run, states = Run(), []
    with NaNDetector(run.model, run.optimizer, on_nonfinite="rollback", snapshot_every=2) as detector:
        states.append(state_of(run.model, run.optimizer))
        for i, batch in enumerate(given):
            drive(run, detector, with_bad_target([batch], *([0] if i == bad else [])), through)
            states.append(state_of(run.model, run.optimizer))
            if i == bad:
                break
    assert detector.summary()["rolled_back"] == 1
    now = state_of(run.model, run.optimizer)
    kept = states[bad // 2 * 2]
    settings = [name for name in now if "param_groups" in name]
    assert not [d for d in differences(kept, now) if d not in settings]


def test_training_goes_on_from_the_snapshot() -> None:
    given = batches(7)
    run = Run()
    run.schedule = torch.optim.lr_scheduler.ConstantLR(run.optimizer, 1.0)
    with NaNDetector(run.model, run.optimizer, on_nonfinite="rollback", snapshot_every=2) as detector:
        drive(run, detector, with_bad_target(given, 3), "batches")
    expected = Run()
    expected.schedule = torch.optim.lr_scheduler.ConstantLR(expected.optimizer, 1.0)
    for x, y in without(given, 2, 3):
        expected.step(x, y)
    assert not differences(state_of(expected.model, expected.optimizer), state_of(run.model, run.optimizer))
    assert detector.summary()["rolled_back"] == 1


def test_rollback_when_the_update_itself_is_bad() -> None:
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with NaNDetector(model, optimizer, on_nonfinite="rollback", snapshot_every=1) as detector:
        for i, (x, y) in enumerate(detector.batches(batches(4))):
            states.append(state_of(model))
            optimizer.zero_grad()
            (model(x) * y).mean().backward()
            optimizer.param_groups[0]["lr"] = float("inf") if i == 2 else 0.1
            optimizer.step()
    assert detector.summary()["rolled_back"] == 1
    assert all(p.isfinite().all() for p in model.parameters())
    assert not differences(states[2], states[3])


def test_a_bad_state_is_never_kept() -> None:
    """A weight that goes bad between two looks must not become what is gone back to."""
    model = seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    with NaNDetector(model, optimizer, on_nonfinite="rollback", snapshot_every=1) as detector:
        for i, (x, y) in enumerate(batches(7)):
            optimizer.zero_grad()
            (model(x) * y).mean().backward()
            if i == 5:
                model.last.weight.data[0, 0] = float("nan")
            optimizer.step()
            states.append(state_of(model))
    assert states[5]["model.last.weight"].isnan().any()
    assert detector.summary()["rolled_back"] == 1
    assert not differences(states[4], state_of(model))


def test_rollbacks_in_a_row_end_training() -> None:
    run = Run()
    with (
        pytest.raises(NonFiniteError, match="3 steps in a row") as caught,
        NaNDetector(run.model, run.optimizer, on_nonfinite="rollback", streak=2) as detector,
    ):
        drive(run, detector, with_bad_target(batches(8), 2, 3, 4, 5), "batches")
    assert detector.summary()["rolled_back"] == 2
    assert caught.value.report.step == 4


# warn


def odd_loss(model: nn.Module, x: Tensor, y: Tensor, bad: bool) -> Tensor:
    """A NaN that never reaches the gradients."""
    out: Tensor = model(x).mean() * y.mean()
    return out + torch.zeros(()).log() * 0 if bad else out


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
def test_warn_makes_the_update_once(through: str, caplog: pytest.LogCaptureFixture) -> None:
    class Odd(Run):
        number = 0

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return odd_loss(self.model, x, y, bad=bool(y[0] < 0))

    given = with_bad_target(batches(6), 2)
    run = Odd()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="warn") as detector:
        drive(run, detector, given, through)
    assert not differences(undisturbed(Odd, given), run.state())
    summary = detector.summary()
    assert (summary["steps"], summary["nonfinite"], summary["skipped"]) == (6, 1, 0)
    assert "Step 2" in caplog.text or "step 2" in caplog.text
    assert caplog.records[-1].getMessage() == "firstnan: 6 updates, 1 non-finite step"


@pytest.mark.parametrize("through", ["batches", "plain"])
def test_warn_lets_a_lost_run_go_on_as_it_would(through: str, caplog: pytest.LogCaptureFixture) -> None:
    given = with_bad_target(batches(20), 2)
    run = Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="warn") as detector:
        drive(run, detector, given, through)
    assert not differences(undisturbed(Run, given), run.state())
    assert detector.summary()["nonfinite"] == 18
    assert detector.summary()["steps"] == 20
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert 2 <= len(warnings) <= 8  # said ever more rarely, and once at the end


# raise


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("kind", [Run, BackwardRun])
def test_raise_leaves_the_weights_of_before(through: str, kind: type[Run]) -> None:
    given = batches(5)
    run = kind()
    bad = with_bad_target(given, 3, value=-1.0 if kind is Run else 0.0)
    with pytest.raises(NonFiniteError), NaNDetector(run.model, run.optimizer) as detector:
        drive(run, detector, bad, through)
    parts = [n for n in undisturbed(kind, given[:3]) if "weight" in n or "bias" in n or ".state." in n]
    expected, now = undisturbed(kind, given[:3]), run.state()
    assert parts
    assert not [n for n in parts if not torch.equal(torch.as_tensor(expected[n]), torch.as_tensor(now[n]))]


@pytest.mark.parametrize("through", ["batches", "step", "plain"])
@pytest.mark.parametrize("isolation", ["auto", "off"])
def test_raise_leaves_buffers_and_schedules_of_before_too(
    through: str, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTNAN_ISOLATION", isolation)
    given = batches(5)
    run = Run()
    with pytest.raises(NonFiniteError), NaNDetector(run.model, run.optimizer) as detector:
        drive(run, detector, with_bad_target(given, 3), through)
    assert not differences(undisturbed(Run, given[:3]), run.state())


def test_entered_again_a_detector_continues_steps_epochs_and_reports() -> None:
    given = batches(3)
    run = Run()
    detector = NaNDetector(run.model, run.optimizer, on_nonfinite="skip")
    for _ in range(2):
        with detector:
            drive(run, detector, with_bad_target(given, 1), "batches")
    assert [report.step for report in detector.reports] == [1, 4]
    assert [event.epoch for event in detector.events if event.kind == "skipped"] == [0, 1]
    assert detector.report is detector.reports[0]
    assert (detector.summary()["steps"], detector.summary()["skipped"]) == (4, 2)


@pytest.mark.tries_fixes
@pytest.mark.parametrize("through", ["batches", "step", "neither"])
def test_raise_has_tried_its_fixes(through: str, caplog: pytest.LogCaptureFixture) -> None:
    run, expected = Run(), undisturbed(Run, batches(6)[:2])
    detector = NaNDetector(run.model, run.optimizer)
    with pytest.raises(NonFiniteError) as caught, detector:
        drive(run, detector, with_bad_target(batches(6), 2, value=0.0), through)
    report = caught.value.report
    best = report.remedies[0]
    assert best.proven
    assert best.steps_finite_after == 3
    assert detector.reports == [report]
    assert "trying fixes before the error is raised" in caplog.text
    assert not differences(expected, run.state())


@pytest.mark.tries_fixes
def test_fixes_are_tried_in_as_much_time_as_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_trials, "_BRIEFLY", Limits(one=20.0, all=4.0))
    run, began = Run(), list[float]()

    def slow_step(x: Tensor, y: Tensor) -> None:
        until = time.process_time() + (1.0 if began else 0.0)
        while time.process_time() < until:
            pass
        run.step(x, y)

    def waits(report: Report, session: Any) -> Report:
        began.append(time.monotonic())  # from here on, in the trials, a step is slow
        return block_trials.with_fixes_tried(report, session)

    monkeypatch.setattr(detectors, "_with_fixes_tried", waits)
    detector = NaNDetector(run.model, run.optimizer)
    with pytest.raises(NonFiniteError) as caught, detector:
        for x, y in with_bad_target(batches(26), 2, value=0.0):
            detector.step(slow_step, x, y)
    assert time.monotonic() - began[0] < 15.0
    best, *others = caught.value.report.remedies
    assert best.proven or best.note == "the time limit of 4 s was reached"
    assert not any(remedy.tried for remedy in others)


@pytest.mark.tries_fixes
def test_a_fix_is_tried_where_the_loop_starts_threads() -> None:
    run = Run()

    def in_thread(x: Tensor, y: Tensor) -> None:
        found = list[Any]()
        thread = threading.Thread(
            target=lambda: found.append(torch.autograd.grad(run.loss(x, y), [*run.model.parameters()]))
        )
        thread.start()
        thread.join()
        for parameter, gradient in zip(run.model.parameters(), found[0], strict=True):
            parameter.grad = gradient
        run.optimizer.step()

    with pytest.raises(NonFiniteError) as caught, NaNDetector(run.model, run.optimizer) as detector:
        for x, y in detector.batches(with_bad_target(batches(6), 2, value=0.0)):
            in_thread(x, y)
    assert caught.value.report.remedies[0].proven


@pytest.mark.tries_fixes
def test_a_fix_that_cannot_be_tried_says_why() -> None:
    run = Run()
    detector = NaNDetector(run.model, run.optimizer)
    with pytest.raises(NonFiniteError) as caught, detector:
        [run.step(x, y) for x, y in detector.batches(with_bad_target(batches(6), 2, value=0.0))]
    notes = {remedy.note for remedy in caught.value.report.remedies}
    assert notes == {"the failing step could not be run again for a trial"}


@pytest.mark.tries_fixes
def test_fixes_are_tried_for_the_first_failure_only() -> None:
    run = Run()
    given = with_bad_target(batches(6), 2, 4, value=0.0)
    tried = []
    with NaNDetector(run.model, run.optimizer) as detector:
        for x, y in given:
            try:
                detector.step(run.step, x, y)
            except NonFiniteError as error:
                tried.append([remedy.tried for remedy in error.report.remedies])
    assert [any(one) for one in tried] == [True, False]


@pytest.mark.tries_fixes
def test_ctrl_c_skips_the_trials_of_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: StepTrials, *args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepTrials, "outcome", interrupted)
    run = Run()
    detector = NaNDetector(run.model, run.optimizer)
    with pytest.raises(NonFiniteError) as caught, detector:
        drive(run, detector, with_bad_target(batches(6), 2, value=0.0), "batches")
    assert caught.value.report.remedies[0].note == "skipped by Ctrl-C"


@pytest.mark.tries_fixes
def test_fixes_of_a_step_that_cannot_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTrials, "_failing_turn", lambda trials: None)
    run = Run()
    detector = NaNDetector(run.model, run.optimizer)
    with pytest.raises(NonFiniteError) as caught, detector:
        drive(run, detector, with_bad_target(batches(6), 2, value=0.0), "batches")
    notes = {remedy.note for remedy in caught.value.report.remedies if remedy.diff}
    assert notes == {"the failing step could not be run again for a trial"}


# Gradient scalers.


def scaled_run(detector: NaNDetector, run: Run, given: list[Batch], scale: float, factor: float) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for x, y in detector.batches(given):
        run.optimizer.zero_grad()
        loss = (run.model(x) * y.log()).mean() * factor
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()
    return scaler


@pytest.mark.parametrize("fused", [False, True])
def test_the_first_overflows_of_a_gradient_scaler_are_no_trip(fused: bool) -> None:
    run = Run()
    if fused:  # then the scaler leaves the decision to the optimizer's own kernel
        run.optimizer = torch.optim.AdamW(run.model.parameters(), fused=True)
    with NaNDetector(run.model, run.optimizer, guard="off") as detector:
        # Only the scaled gradients overflow; the square of the others fits into the optimizer's state.
        scaler = scaled_run(detector, run, batches(12), 2.0**84, 1e15)
    assert scaler.get_scale() < 2.0**82
    assert detector.report is None
    assert detector.summary()["nonfinite"] == 0
    assert detector.summary()["steps"] == 12


def test_a_nan_under_a_gradient_scaler_is_found() -> None:
    run = Run()
    with pytest.raises(NonFiniteError) as caught, NaNDetector(run.model, run.optimizer) as detector:
        scaled_run(detector, run, with_bad_target(batches(6), 3), 2.0**4, 1.0)
    assert caught.value.report.step == 3
    assert caught.value.report.cause.slug == "log_of_negative"


def test_a_skipped_step_under_a_gradient_scaler_never_was() -> None:
    given = batches(6)
    run, expected = Run(), Run()
    with NaNDetector(run.model, run.optimizer, on_nonfinite="skip") as detector:
        scaler = scaled_run(detector, run, with_bad_target(given, 3), 2.0**4, 1.0)
    assert detector.summary()["skipped"] == 1
    with NaNDetector(expected.model, expected.optimizer) as other:
        same = scaled_run(other, expected, without(given, 3), 2.0**4, 1.0)
    assert not differences(expected.state(), run.state())
    assert scaler.state_dict() == same.state_dict()


def test_a_skip_tells_of_the_update_that_another_optimizer_has_made_with_the_batch() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    slow, fast = torch.optim.SGD(generator.parameters(), 0.05), torch.optim.SGD(critic.parameters(), 0.05)
    with NaNDetector([generator, critic], [slow, fast], on_nonfinite="skip") as detector:
        for i, x in enumerate(detector.batches([torch.rand(8, 4) for _ in range(8)])):
            fast.zero_grad()
            (critic(generator(x).detach()) - critic(x)).mean().backward()
            fast.step()
            slow.zero_grad()
            (-critic(generator(x)).mean() * (math.nan if i == 5 else 1.0)).backward()
            slow.step()
    (skipped,) = [event for event in detector.events if event.kind == "skipped"]
    assert skipped.message.endswith("; the 1 update made before with the same batch was kept")


# Schedulers and rates that the loop changes before the step fails.

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def scheduler_state(scheduler: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    parts = getattr(scheduler, "_schedulers", [])
    kept = [
        {name: value for name, value in vars(one).items() if name not in ("optimizer", "_schedulers")}
        for one in (scheduler, *parts)
    ]
    rates = [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]
    return copy.deepcopy(([{k: v for k, v in one.items() if not callable(v)} for one in kept], rates))


@pytest.mark.parametrize(
    ("kind", "through", "place", "made"),
    [
        *((kind, "batches", "top", made) for kind in SCHEDULERS for made in ("before", "after")),
        *(("step", through, place, "after") for through in ("step", "loader", "range") for place in ("top", "middle")),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
def test_raise_undoes_a_scheduler_that_was_stepped_before_the_failure(
    kind: str, through: str, place: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTNAN_ISOLATION", "off" if through == "batches" else "auto")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    given = [torch.rand(8, 4) for _ in range(6)]
    detector = NaNDetector(model, optimizer)
    if made == "before":
        scheduler = SCHEDULERS[kind](optimizer)
        detector.attach()
    else:
        detector.attach()
        scheduler = SCHEDULERS[kind](optimizer)
    argument = (1.0,) if kind == "plateau" else ()
    seen = []
    if through == "range":
        with pytest.raises(NonFiniteError), detector:
            for i in range(6):
                seen.append(scheduler_state(scheduler, optimizer))
                if place == "top":
                    scheduler.step(*argument)
                loss = model(given[i]).square().mean()
                if place == "middle":
                    scheduler.step(*argument)
                optimizer.zero_grad()
                (loss * (math.nan if i == 3 else 1.0)).backward()
                optimizer.step()
    else:

        def body(i: int, x: Tensor) -> None:
            seen.append(scheduler_state(scheduler, optimizer))
            if place == "top":
                scheduler.step(*argument)
            loss = model(x).square().mean()
            if place == "middle":
                scheduler.step(*argument)
            optimizer.zero_grad()
            (loss * (math.nan if i == 3 else 1.0)).backward()
            optimizer.step()

        with pytest.raises(NonFiniteError), detector:
            if through == "step":
                for i, x in enumerate(given):
                    detector.step(body, i, x)
            else:
                loader = detector.batches(given) if through == "batches" else DataLoader(given, batch_size=None)
                for i, x in enumerate(loader):
                    body(i, x)
    assert scheduler_state(scheduler, optimizer) == seen[3]


def test_raise_undoes_a_rate_that_was_set_by_hand_before_the_failure() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def warm_up(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (step + 1)

    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer):
        for step in range(8):
            warm_up(step)
            loss = model(torch.rand(8, 4)).square().mean() * (math.nan if step == 5 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_raise_leaves_a_scheduler_that_is_stepped_after_the_update() -> None:
    """In a loop without a loader: its step belongs to the turn before."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer):
        for step in range(8):
            loss = model(torch.rand(8, 4)).square().mean() * (math.nan if step == 5 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (5, 0.1 / 32)


def test_raise_keeps_the_schedule_of_the_optimizer_that_has_made_its_update() -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    slow, fast = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (slow, fast)]
    with pytest.raises(NonFiniteError), NaNDetector([generator, critic], [slow, fast]) as detector:
        for i, x in enumerate(detector.batches([torch.rand(8, 4) for _ in range(8)])):
            schedules[0].step()
            fast.zero_grad()
            (critic(generator(x).detach()) - critic(x)).mean().backward()
            fast.step()
            schedules[1].step()
            slow.zero_grad()
            (-critic(generator(x)).mean() * (math.nan if i == 5 else 1.0)).backward()
            slow.step()
    assert [schedule.last_epoch for schedule in schedules] == [5, 6]


def test_a_plateau_between_validation_and_training_is_kept() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    given = [torch.rand(8, 4) for _ in range(4)]
    with pytest.raises(NonFiniteError), NaNDetector(model, optimizer) as detector:
        for epoch in range(4):
            for x in detector.batches(given):
                optimizer.zero_grad()
                (model(x).square().mean() * (math.nan if epoch == 3 else 1.0)).backward()
                optimizer.step()
            with torch.no_grad():
                for x in detector.batches(given):
                    model(x)
            scheduler.step(1.0)
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
@pytest.mark.parametrize("called", ["parts", "weights"])
def test_a_loop_that_never_calls_the_model_itself_goes_on(called: str, policy: str) -> None:
    """It calls the layers, or reads their weights: the state is restored before the next loss is computed, or in a
    way that its backward call does not notice."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(4, 8), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    options: dict[str, Any] = {"snapshot_every": 3} if policy == "rollback" else {}
    with NaNDetector(model, optimizer, on_nonfinite=policy, **options) as detector:
        for i in range(12):
            x = torch.rand(8, 4)
            if called == "parts":
                out = model["head"](model["body"](x).tanh())
            else:
                hidden = nn.functional.linear(x, model["body"].weight, model["body"].bias).tanh()
                out = nn.functional.linear(hidden, model["head"].weight, model["head"].bias)
            loss = (out * (math.nan if i == 7 else 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert detector.summary()["skipped" if policy == "skip" else "rolled_back"] == 1
    assert detector.summary()["steps"] == 11
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("through_batches", [True, False])
def test_a_step_that_the_program_discards_itself_costs_no_later_one(through_batches: bool) -> None:
    given = list(torch.rand(6, 4, 3) + 0.5)
    given[2][1] = -1.0

    def trained(detector_of: Any) -> tuple[list[Tensor], Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with detector_of(model, optimizer) as detector:
            for x in detector.batches(given) if through_batches and detector is not None else given:
                optimizer.zero_grad()
                loss = (model(x) * x.log()).mean()
                loss.backward()
                if not torch.isfinite(loss):
                    optimizer.zero_grad()
                    continue
                optimizer.step()
        return list(model.parameters()), detector

    bare, _ = trained(lambda model, optimizer: contextlib.nullcontext())
    watched, detector = trained(lambda model, optimizer: NaNDetector(model, optimizer, on_nonfinite="skip"))
    assert all(map(torch.equal, bare, watched))
    assert (detector.report.step, detector.summary()["skipped"]) == (2, 1)


def test_a_stop_counts_as_caught_only_in_the_thread_that_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from firstnan.engine.policies import EndProgram, Stop
    from firstnan.records import Report

    monkeypatch.setattr("firstnan.engine.policies.stop_begins", lambda: None)
    policy, told = EndProgram(lambda report: None), list[bool]()
    session: Any = SimpleNamespace(
        in_worker=False, report=None, let_go=lambda *, in_other_thread: told.append(in_other_thread)
    )
    policy.explain = lambda session, report: None  # type: ignore[method-assign]
    session.leave_to_detector = lambda: False
    with pytest.raises(Stop):
        policy.settle(session, Report("nonfinite", 3), True)
    policy.goes_on(session)
    other = threading.Thread(target=policy.goes_on, args=(session,))
    other.start()
    other.join()
    assert told == [False, True]
