"""Trying remedies: the changed program really runs, is judged by what it does, and the files stay as they are."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import re
import signal
import sys
import textwrap
import threading
import time
from dataclasses import replace
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from firstnan.engine import step_trial
from firstnan.engine import trials as trial
from firstnan.engine.investigation import Investigation, Options, reason_not_to_start, reason_not_to_try
from firstnan.engine.second_run import Start
from firstnan.engine.step_trial import HealthyTurns
from firstnan.engine.trials import Limits, Trials
from firstnan.observe.runner import Program
from firstnan.records import Edit, History, Noticed, Origin, Remedy, Report, Site, StepRecord, TensorStat
from firstnan.records.files import load
from firstnan.repair.patch import render
from firstnan.repair.verdict import Reach, TrialOutcome, judged, keeps_numbers, last_bad_step, loss_change, ranked
from firstnan.report.sentences import remedy_result
from zygote import Zygote

pytest_plugins = ["zygote"]

TRAIN = Program("train.py", ())
AMPLE = Limits(60, 120)
LOOP = """
    import torch
    from helper import score

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(40):
        x = torch.rand(8, 4) + 0.5
        if step == 5:
            x[3] = 0
        loss = (model(x) - score(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
HELPER = """
    import torch


    def score(x):
        return torch.log(x.sum(1, keepdim=True))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, firstnan: Zygote) -> Path:
    """A folder to work in, where a program started again is a fork that has torch already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", firstnan.executable)
    for name, value in firstnan.environment.items():
        monkeypatch.setenv(name, value)
    write(tmp_path / "train.py", LOOP)
    write(tmp_path / "helper.py", HELPER)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))


def change(path: Path, old: str, new: str, **more: Any) -> Remedy:
    """`new` in place of `old`, wherever it is in the file."""
    text, edits = path.read_text(), []
    for found in re.finditer(re.escape(old), text):
        where = [(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at) - 1) for at in found.span()]
        edits.append(Edit(str(path), *where[0], *where[1], old, new))
    assert edits, "the change changes nothing"
    return Remedy(new, render(str(path), text, text.replace(old, new)), edits=tuple(edits), **more)


def failing(step: int, *remedies: Remedy, losses: tuple[float, ...] = (), **more: Any) -> Report:
    """A report of a run that failed in this step, as a second run has confirmed it."""
    steps = tuple(StepRecord(i, loss) for i, loss in enumerate([*losses, nan][: step + 1]))
    return Report(
        "nonfinite", step, remedies=remedies, noticed=Noticed("loss"), history=History(steps), replay=trial.RUN_AGAIN
    ).with_(**more)


def tried(report: Report, program: Program, *, steps: int = 20, limits: Limits = AMPLE) -> Report:
    return Trials(Start(), program, steps, limits, isolated=False).run(report, lambda _: None)


def outcome_of(remedy: Remedy, step: int = 5, program: Program = TRAIN, **more: Any) -> Remedy:
    (result,) = tried(failing(step, remedy), program, **more).remedies
    return result


# --- real programs ------------------------------------------------------------------------------------------------


def test_a_change_that_helps_is_proven_and_the_file_stays(place: Path) -> None:
    helper = place / "helper.py"
    before = helper.read_bytes(), helper.stat().st_mtime_ns
    result = outcome_of(change(helper, "keepdim=True)", "keepdim=True).clamp_min(1e-6)"))
    assert (result.tried, result.failing_step_finite, result.steps_finite_after) == (True, True, 20)
    assert result.proven
    assert (helper.read_bytes(), helper.stat().st_mtime_ns) == before
    assert sorted(p.name for p in place.iterdir()) == ["helper.py", "train.py"]


def test_a_change_that_does_not_help_fails(place: Path) -> None:
    result = outcome_of(change(place / "helper.py", "x.sum(", "x.abs().sum("))
    assert (result.tried, result.failing_step_finite, result.proven) == (True, False, False)


def test_a_change_that_fails_earlier_or_later_says_so(place: Path) -> None:
    earlier = outcome_of(change(place / "helper.py", "torch.log(x.sum", "torch.log(-x.sum"))
    assert (earlier.failing_step_finite, earlier.note) == (False, "the loss is non-finite in step 0 already")
    later = outcome_of(change(place / "train.py", "step == 5", "step == 9"))
    assert (later.failing_step_finite, later.steps_finite_after) == (True, None)
    assert later.note == "the loss is non-finite in step 9"
    assert not later.proven


def test_a_change_that_breaks_the_program_fails_with_its_error(place: Path) -> None:
    broken = outcome_of(change(place / "helper.py", "x.sum(", "x.summ("))
    assert (broken.tried, broken.failing_step_finite) == (True, None)
    assert "AttributeError: 'Tensor' object has no attribute 'summ'" in broken.note
    no_python = outcome_of(change(place / "helper.py", "keepdim=True))", "keepdim=True)"))
    assert not no_python.tried
    assert no_python.note.startswith("the fix does not fit: '(' was never closed")


def test_a_file_that_is_no_longer_the_same_is_not_tried(place: Path) -> None:
    remedy = change(place / "helper.py", "x.sum(", "x.abs().sum(")
    write(place / "helper.py", HELPER.replace("torch.log", "torch.log1p"))
    result = outcome_of(remedy)
    assert not result.tried
    assert "helper.py:5: expected 'x.sum(', found" in result.note


def test_a_program_that_ends_early_has_the_steps_it_has(place: Path) -> None:
    write(place / "train.py", LOOP.replace("range(40)", "range(9)"))
    good = change(place / "helper.py", "x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1e-6")
    assert outcome_of(good).steps_finite_after == 3
    never = outcome_of(good, step=30)
    assert (never.failing_step_finite, never.proven) == (None, False)
    assert never.note == "the program ended after 9 steps, before the failing one"
    # With samples taken out there may be no such step any more.
    assert outcome_of(replace(good, kind="data"), step=30).proven


@pytest.mark.parametrize("which", [0, 1])
def test_the_update_of_the_failing_step_counts(place: Path, which: int) -> None:
    """Every parameter of a large model is looked at after it, not only those whose turn it is."""
    text = LOOP.replace("Linear(4, 1)", "Linear(4, 10000)").replace(
        "model.parameters(), lr", "[{'params': [p]} for p in model.parameters()], lr"
    )
    write(place / "train.py", text)
    rate = f"optimizer.param_groups[{which}]['lr'] = float('inf') if step == 5 else 0.01"
    poison = change(place / "train.py", "    if step == 5:\n        x[3] = 0\n", f"    {rate}\n")
    result = outcome_of(poison)
    assert (result.failing_step_finite, result.note) == (False, "a parameter")


def test_modules_and_packages_are_replaced_too(place: Path) -> None:
    write(place / "pkg" / "__init__.py", "")
    write(place / "pkg" / "train.py", LOOP.replace("from helper", "from .helper"))
    write(place / "pkg" / "helper.py", HELPER)
    program = Program("pkg.train", ("--flag", "value"), module=True)
    for path, old, new in [
        (place / "pkg" / "helper.py", "x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1e-6"),
        (place / "pkg" / "train.py", "x[3] = 0", "x[3] = 1"),
    ]:
        assert outcome_of(change(path, old, new), program=program).proven
    assert not outcome_of(
        change(place / "pkg" / "train.py", "import torch", "import torch, os"), program=program
    ).proven


def test_compiled_files_of_the_old_source_are_not_used_nor_written(place: Path, firstnan: Zygote) -> None:
    import py_compile

    compiled = Path(py_compile.compile(str(place / "helper.py"), doraise=True))
    before = compiled.read_bytes()
    os.environ.pop("PYTHONDONTWRITEBYTECODE")
    good = change(place / "helper.py", "x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1e-6")
    assert outcome_of(good).proven
    assert compiled.read_bytes() == before


def test_tracebacks_and_inspect_show_the_changed_text(place: Path) -> None:
    remedy = change(
        place / "helper.py",
        "def score(x):\n",
        "import inspect, traceback\n\n\ndef score(x):\n"
        "    try:\n"
        "        raise ValueError('of the change')\n"
        "    except ValueError:\n"
        "        assert \"raise ValueError('of the change')\" in traceback.format_exc()\n"
        "    assert 'of the change' in inspect.getsource(score)\n"
        "    x = x + 1e-6\n",
    )
    assert outcome_of(remedy).note == ""
    assert outcome_of(remedy).proven


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_have_the_change(place: Path, method: str) -> None:
    write(
        place / "train.py",
        f"""
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Rows(Dataset):
            def __len__(self):
                return 16

            def __getitem__(self, i):
                return torch.log(torch.tensor([float(i)]))

        if __name__ == "__main__":
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context="{method}"):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        """,
    )
    result = outcome_of(change(place / "train.py", "float(i)]", "float(i) + 1]", kind="data"), step=0)
    assert result.note == ""
    assert (result.proven, result.steps_finite_after) == (True, 3)


def test_a_program_that_never_trains_is_judged_by_its_output(place: Path) -> None:
    text = """
        import torch
        class Model(torch.nn.Module):
            def forward(self, x):
                return torch.log(x)
        print(Model()(torch.zeros(3)))
    """
    write(place / "train.py", text)
    report = failing(0, change(place / "train.py", "log(x)", "log(x + 1)"), noticed=Noticed("output", "Model"))
    assert tried(report, TRAIN).remedies[0].proven
    report = report.with_(remedies=(change(place / "train.py", "log(x)", "log(x * 2)"),))
    assert tried(report, TRAIN).remedies[0].failing_step_finite is False


def test_a_program_that_stops_itself_is_judged_by_what_it_read(place: Path) -> None:
    stops = LOOP.replace(
        "        optimizer.zero_grad()", "        if not torch.isfinite(loss):\n            break\n", 1
    )
    write(place / "train.py", stops)
    report = failing(5, change(place / "helper.py", "x.sum(", "x.abs().sum("), noticed=Noticed("value"))
    (bad,) = tried(report, TRAIN).remedies
    assert bad.failing_step_finite is False
    good = change(place / "helper.py", "x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1e-6")
    assert tried(report.with_(remedies=(good,)), TRAIN).remedies[0].proven


def test_a_program_that_updates_its_weights_itself(place: Path) -> None:
    """Without an optimizer object: what an update did is seen when the next step begins."""
    by_hand = LOOP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)", "rate = 0.01")
    by_hand = by_hand.replace("optimizer.zero_grad()", "model.zero_grad()").replace(
        "optimizer.step()",
        "with torch.no_grad():\n            for p in model.parameters():\n                p -= rate * p.grad",
    )
    write(place / "train.py", by_hand)
    result = outcome_of(change(place / "train.py", "x[3] = 0", "x[3] = 1"))
    assert (result.failing_step_finite, result.steps_finite_after) == (True, 20)
    result = outcome_of(change(place / "train.py", "x[3] = 0", "rate = float('inf')"))
    assert (result.failing_step_finite, result.note) == (False, "a parameter")


def test_two_optimizers_that_take_turns(place: Path) -> None:
    second = (
        "\n        other.zero_grad()\n        (critic(x) - score(x)).square().mean().backward()\n        other.step()"
    )
    text = LOOP.replace("        optimizer.step()", "        optimizer.step()" + second)
    made = "lr=0.01)\n    critic = torch.nn.Linear(4, 1)\n    other = torch.optim.SGD(critic.parameters(), lr=0.01)"
    write(place / "train.py", text.replace("lr=0.01)", made))
    result = outcome_of(change(place / "train.py", "x[3] = 0", "x[3] = 1"))
    assert (result.failing_step_finite, result.steps_finite_after) == (True, 20)
    assert outcome_of(change(place / "train.py", "x[3] = 0", "x[2] = 0")).failing_step_finite is False


@pytest.mark.parametrize("ends", [40, 12])
def test_of_two_optimizers_the_steps_of_the_failing_one_count(place: Path, ends: int) -> None:
    """The other makes three in the meantime; the change moves the line where ours is made."""
    often = """
        for _ in range(3):
            other.zero_grad()
            (critic(x) - 1.0).square().mean().backward()
            other.step()"""
    text = LOOP.replace("        optimizer.step()", "        optimizer.step()" + often)
    made = "critic = torch.nn.Linear(4, 1)\n    other = torch.optim.SGD(critic.parameters(), lr=0.01)"
    text = text.replace("    optimizer =", f"    {made}\n    optimizer =").replace("range(40)", f"range({ends})")
    write(place / "train.py", text)
    lines = (place / "train.py").read_text().split("\n")
    line = next(i for i, text in enumerate(lines, 1) if "optimizer =" in text)
    history = replace(failing(5).history, made_at=Site(str(place / "train.py"), line))
    good = change(place / "train.py", "import torch\n", "import torch\n\nprint()\nprint()\n")
    other = change(place / "helper.py", "x.sum(", "(x + 0.1).sum(")
    better = replace(good, diff=good.diff + other.diff, edits=good.edits + other.edits)
    result = tried(failing(5, better, history=history), TRAIN).remedies[0]
    assert (result.failing_step_finite, result.steps_finite_after) == (True, min(20, ends - 6))
    assert tried(failing(5, good, history=history), TRAIN).remedies[0].failing_step_finite is False


def test_its_own_exit_code_after_the_failing_step_is_no_failure(place: Path) -> None:
    write(place / "train.py", LOOP.replace("range(40)", "range(8)") + "    raise SystemExit(7)\n")
    result = outcome_of(change(place / "train.py", "x[3] = 0", "x[3] = 1"))
    assert (result.steps_finite_after, result.note) == (2, "then the program ended with exit code 7")


def test_numbers_that_explode_are_no_proof(place: Path) -> None:
    calm = LOOP.replace("if step == 5:\n            x[3] = 0", "if step == 5:\n            x[3] = 0\n        k = 1")
    write(place / "train.py", calm.replace("range(40)", "range(200)").replace("score(x)).sq", "k * score(x)).sq"))
    wild = change(
        place / "train.py", "    if step == 5:\n        x[3] = 0\n    k = 1\n", "    k = 1e12 ** (step > 12)\n"
    )
    result = outcome_of(wild, steps=60)
    assert (result.failing_step_finite, result.proven) == (True, False)
    assert "the loss has exploded" in result.note


def test_generators_that_nobody_seeded_start_alike() -> None:
    first = Start()
    first.torch_imported()
    torch.default_generator.manual_seed(torch.initial_seed())
    drawn = torch.rand(4).tolist(), numpy.random.rand(), random.random()
    torch.seed()
    numpy.random.seed()
    random.seed()
    order = first._order(0, "step")
    Start().follow(order)
    Start().follow_imported(order)
    assert (torch.rand(4).tolist(), numpy.random.rand(), random.random()) == drawn


# --- limits -------------------------------------------------------------------------------------------------------


def processes_in(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder):
                found.append((entry / "cmdline").read_text())
    return found


def others_gone(folder: Path) -> bool:
    """Whether this process is the only one that works in the folder; a killed one takes a moment to go."""
    until = time.monotonic() + 10
    while len(processes_in(folder)) > 1 and time.monotonic() < until:
        time.sleep(0.05)
    return len(processes_in(folder)) <= 1


SLOW = LOOP.replace("for step in", "import time\n    for step in").replace(
    "        x = torch.rand", "        time.sleep(0.05 if step < {calm} else 60)\n        x = torch.rand"
)


def test_a_trial_that_takes_too_long_is_stopped(place: Path) -> None:
    write(place / "train.py", SLOW.format(calm=2))
    result = outcome_of(change(place / "train.py", "x[3] = 0", "x[3] = 1"), limits=Limits(3, 60))
    assert (result.tried, result.note) == (False, "stopped after 3 s, before step 5 finished")
    assert others_gone(place)


def test_what_a_stopped_program_has_started_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as a user has it."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.py", "import os, time\nos.fork()\nopen(str(os.getpid()), 'w')\ntime.sleep(60)\n")
    began = time.monotonic()
    result = outcome_of(change(tmp_path / "train.py", "sleep(60)", "sleep(50)"), limits=Limits(6, 60))
    assert time.monotonic() - began < 40
    assert result.note == "stopped after 6 s, before step 5 finished"
    assert len([name for name in os.listdir() if name.isdigit()]) == 2
    assert others_gone(tmp_path)


def test_what_was_seen_before_the_limit_counts(place: Path) -> None:
    write(place / "train.py", SLOW.format(calm=9))
    result = outcome_of(change(place / "train.py", "x[3] = 0", "x[3] = 1"), limits=Limits(5, 60))
    assert (result.proven, result.steps_finite_after, result.note) == (True, 3, "stopped after 5 s")


@pytest.mark.parametrize(("loss", "repeated"), [(3e8, False), (2.0, True)])
def test_a_loss_out_of_proportion_at_the_failing_step_needs_no_run_from_the_start(
    place: Path, monkeypatch: pytest.MonkeyPatch, loss: float, repeated: bool
) -> None:
    write(place / "train.py", SLOW.format(calm=9))
    latest = tuple((6 + i, 1.5) for i in range(5))
    seen = TrialOutcome(passed=11, trained=True, at_step=True, frozen="so", losses=((5, loss),), latest=latest)
    runs = []

    def tried_from_start(self: Trials, remedy: Remedy, *args: Any) -> Remedy:
        runs.append(remedy)
        return remedy

    monkeypatch.setattr(Trials, "_tried_from_start", tried_from_start)
    at_step: Any = SimpleNamespace(outcome=lambda *args, **kwargs: seen, interrupted=False)
    report = failing(5, change(place / "train.py", "x[3] = 0", "x[3] = 1"))
    Trials(Start(), TRAIN, 20, Limits(5, 60), isolated=False, at_step=at_step).run(report, lambda _: None)
    assert bool(runs) is repeated


def test_ctrl_c_leaves_the_rest_untried(place: Path) -> None:
    write(place / "train.py", SLOW.format(calm=0))
    remedies = [change(place / "train.py", "x[3] = 0", f"x[3] = {i}") for i in (1, 2)]
    threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    report = tried(failing(5, *remedies), TRAIN)
    assert [(r.tried, r.note) for r in report.remedies] == [(False, "skipped by Ctrl-C")] * 2
    assert others_gone(place)


def test_time_for_all_of_them_is_limited(place: Path) -> None:
    remedies = [change(place / "helper.py", "x.sum(", f"x.mul({i}).sum(") for i in (2, 3, 4)]
    report = tried(failing(5, *remedies), TRAIN, limits=Limits(60, 0.01))
    assert [r.tried for r in report.remedies] == [False, False, True]
    assert {r.note for r in report.remedies if not r.tried} == {"the time limit of 0 s was reached"}


def test_only_so_many_are_tried(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST", 2)
    remedies = [change(place / "helper.py", "x.sum(", f"x.mul({i}).sum(") for i in range(2, 6)]
    report = tried(failing(5, *remedies), TRAIN)
    assert [r.tried for r in report.remedies] == [False, False, True, True]
    assert report.remedies[0].note == "only 2 fixes are tried"


def test_limits_follow_the_time_that_the_program_took() -> None:
    assert Limits.after(2) == Limits(20, 120, further=15, end=5)
    assert Limits.after(100) == Limits(300, 400, further=100, end=5)
    assert Limits.after(1000).further == 300
    assert Limits.after(100, steps=20) == Limits(300, 400)


def test_a_trial_goes_on_to_the_end_as_far_as_time_allows() -> None:
    reach = Reach(last=25, far=60, further=100, end=5)
    assert not reach.is_enough(25, 1000)  # these steps are needed in any case
    assert not reach.is_enough(26, 99)
    assert reach.is_enough(26, 100)
    assert not reach.is_enough(60, 4)  # ten times as far: only the end of the program is missing
    assert reach.is_enough(60, 5)
    assert Reach(last=25).is_enough(26, 0)


def options(verify: int | None, replay: Any = "auto") -> Options:
    return Options(json=None, output=None, trace=False, replay=replay, program=TRAIN, verify=verify)


@pytest.mark.parametrize(
    ("verify", "seconds", "reproduced", "says"),
    [
        (None, 10, "deterministic", ""),
        (0, 10, "deterministic", "--verify 0"),
        (None, 400, "deterministic", "the program ran for 7 minutes; pass --verify 20 to try anyway"),
        (20, 400, "deterministic", ""),
        (5, 10, "transient", "the failure is not reproducible, so a trial would prove nothing"),
    ],
)
def test_when_nothing_is_tried(verify: int | None, seconds: float, reproduced: Any, says: str) -> None:
    report, given = failing(5, reproduced=reproduced), options(verify)
    assert (reason_not_to_try(report, given) or reason_not_to_start(given, seconds)) == says


def test_who_forbids_a_replay_forbids_a_trial() -> None:
    assert reason_not_to_try(failing(5), options(None, "never")) == "--replay never"
    assert reason_not_to_try(failing(5), options(20, "never")) == ""


def test_one_of_several_processes_is_not_started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert reason_not_to_start(options(None), 1.0) == "one of several processes cannot be run alone"


# --- with the failing batch first ---------------------------------------------------------------------------------

DATA = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    counts = torch.ones(400)
    counts[360] = 0.0
    data = torch.rand(400, 3) * torch.log(counts)[:, None]
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for (x,) in DataLoader(TensorDataset(data), 4):
        optimizer.zero_grad()
        (net(x) - 1).square().mean().backward()
        optimizer.step()
"""


def test_a_fix_of_the_data_is_tried_with_the_failing_batch_first(place: Path) -> None:
    """The program need not be run as far as it came: that may have taken hours."""
    write(place / "data.py", DATA)
    program, batch = Program("data.py", []), ([360, 361, 362, 363], 400)
    good = change(place / "data.py", "torch.log(counts)", "torch.log(counts.clamp_min(1e-3))")
    useless = change(place / "data.py", "torch.log(counts)", "torch.log(counts * 1)")
    report = failing(90, useless, good)
    trials = Trials(Start(), program, 5, AMPLE, isolated=False, from_start="it ran for hours", first_batch=batch)
    best, other = trials.run(report, lambda _: None).remedies
    assert (best.edits, best.proven, best.steps_finite_after) == (good.edits, True, 5)
    assert best.note.startswith("in a run whose first batch was the failing one")
    assert (other.tried, other.failing_step_finite) == (True, False)


def test_with_the_failing_batch_first_it_is_tried_as_far_as_the_program_came_if_time_allows(place: Path) -> None:
    write(place / "data.py", DATA)
    good = change(place / "data.py", "torch.log(counts)", "torch.log(counts.clamp_min(1e-3))")
    limits, batch = Limits(60, 120, further=60), ([360, 361, 362, 363], 400)
    trials = Trials(Start(), Program("data.py", []), 5, limits, isolated=False, from_start="long", first_batch=batch)
    (best,) = trials.run(failing(90, good), lambda _: None).remedies
    assert (best.proven, best.steps_finite_after) == (True, 90)


# --- which one wins -----------------------------------------------------------------------------------------------


def healthy_losses(place: Path) -> tuple[float, ...]:
    """The losses of the first five steps, as a trial of the failing program sees them."""
    data, _ = Start().try_out(TRAIN, {}, step=5, reach=Reach(5), seconds=60, isolated=False)
    outcome = TrialOutcome.of(data)
    assert (outcome.noticed, outcome.bad_step) == ("the loss", 5)
    return tuple(loss for step, loss in outcome.losses if step < 5)


def test_one_that_keeps_the_healthy_numbers_wins_and_ends_the_search(place: Path) -> None:
    helper, told = place / "helper.py", []
    remedies = (
        Remedy("look at the data"),
        change(helper, "x.sum(", "x.abs().sum("),
        change(helper, "torch.log(", "torch.log1p("),
        change(helper, "keepdim=True)", "keepdim=True).clamp_min(1e-6)"),
        *(change(helper, "keepdim=True)", f"keepdim=True).clamp_min(1e-{i})") for i in (7, 8, 9)),
    )
    report = failing(5, *remedies, losses=healthy_losses(place))
    result = Trials(Start(), TRAIN, 20, Limits(60, 120), isolated=False).run(report, told.append)
    titles = ["clamp", "log1p", "look", "clamp", "clamp", "abs"]
    assert [word in r.title for word, r in zip(titles, result.remedies, strict=True)] == [True] * 6
    best, other, advice, left, _, failed = result.remedies
    assert (best.proven, best.loss_change) == (True, 0.0)
    assert other.proven
    assert other.loss_change is not None
    assert other.loss_change > 0.01
    assert (advice.tried, advice.note) == (False, "")
    assert (left.tried, left.note) == (False, "an earlier fix already helps")
    assert failed.failing_step_finite is False
    # After each trial the report so far is handed out, with all remedies in it.
    assert [len(r.remedies) for r in told] == [7, 7, 7, 6]
    assert [sum(x.tried for x in r.remedies) for r in told] == [1, 2, 3, 3]


def test_three_that_help_are_enough_though_they_change_numbers(place: Path) -> None:
    remedies = [change(place / "helper.py", "torch.log(", f"torch.log({i} + ") for i in (1, 2, 3, 4)]
    report = tried(failing(5, *remedies, losses=(1.0,) * 5), TRAIN)
    helped = (False, "an earlier fix already helps")
    assert [(r.proven, r.note) for r in report.remedies] == [*[(True, "")] * 3, helped]


def test_a_program_that_rolls_new_dice_proves_nothing(place: Path) -> None:
    write(place / "train.py", LOOP.replace("step == 5", "step == 5 and torch.seed() % 1000 == 0"))
    report = failing(5, change(place / "helper.py", "x.sum(", "x.abs().sum("), replay="handed out again")
    (result,) = tried(report, TRAIN).remedies
    assert not result.tried
    assert result.note.startswith("the unchanged program does not always fail")
    assert result.failing_step_finite is None


def test_without_healthy_steps_the_unchanged_program_is_run_for_comparison(place: Path) -> None:
    good = change(place / "helper.py", "x.sum(1, keepdim=True)", "x.sum(1, keepdim=True) + 1e-6")
    (result,) = tried(failing(5, good, replay="handed out again"), TRAIN).remedies
    assert result.proven


def test_the_loss_change_is_the_largest_relative_one() -> None:
    report = failing(3, losses=(2.0, -1.0, 4.0))
    outcome = TrialOutcome(passed=24, losses=((0, 2.0), (1, -1.1), (2, 4.0), (3, 100.0), (4, 5.0)))
    assert loss_change(outcome, report) == pytest.approx(0.1 / 1.1)
    assert loss_change(replace(outcome, losses=((3, 1.0),)), report) is None
    assert judged(Remedy("", "x"), outcome, report).loss_change is not None
    assert judged(Remedy("", "x", kind="setting"), outcome, report).loss_change is None
    # Two optimizers that take turns: one loss each in every step.
    both = failing(1).with_(history=History((StepRecord(0, 1.0), StepRecord(0, 7.0), StepRecord(1, nan))))
    assert loss_change(TrialOutcome(losses=((0, 1.0), (0, 7.0))), both) == 0.0
    assert loss_change(TrialOutcome(losses=((0, 1.0), (0, 2.0))), report) is None, (
        "which of them is the same as before?"
    )


def test_a_change_of_the_gradients_alone_does_not_leave_healthy_losses_unchanged() -> None:
    healthy = HealthyTurns([1.0, 2.0], [1.0, 1.0])
    assert healthy.change_in(HealthyTurns([1.0, 2.0], [1.0, 1.0])) == 0
    assert healthy.change_in(HealthyTurns([1.0, 2.0], [0.2, 0.3])) is None
    assert healthy.change_in(HealthyTurns([1.0, 1.0], [0.2, 0.3])) == 0.5


def test_losses_are_compared_with_those_of_the_same_optimizer(place: Path) -> None:
    """Both are made in one line."""
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"
    other = "fixed = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01); "
    program = LOOP.replace(made, other + made).replace(
        "loss = (model",
        "(fixed.param_groups[0]['params'][0] + 20).sum().backward(); fixed.step()\n        loss = (model",
    )
    write(place / "train.py", program)
    lines = (place / "train.py").read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if made in text)
    site = Site(str(place / "train.py"), line, column=lines[line - 1].index("torch.optim", len(other)))
    good = change(place / "helper.py", "x.sum(1, keepdim=True)", "(x.sum(1, keepdim=True) + 1e-9)")
    report = failing(5, good, losses=(2.34, 2.34, 2.34, 2.34, 2.34))
    (result,) = tried(report.with_(history=replace(report.history, made_at=site)), TRAIN).remedies
    assert result.proven
    assert all(record.loss < 10 for record in result.losses if record.step != 5)


SCALED = """
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    x = torch.randn(160, 8)
    x[80::4] = 0
    net = torch.nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    def train(a):
        optimizer.zero_grad()
        loss = (net(a).square().sum(1, keepdim=True).sqrt() - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    for a in DataLoader(x, batch_size=4):
        train(a)
"""
SWITCHED = """
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    x = torch.rand(64, 4) + 0.1
    x[41] = 0
    a, b = torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)
    first, second = torch.optim.SGD(a.parameters(), lr=0.01), torch.optim.SGD(b.parameters(), lr=0.01)
    def train(real):
        fake = a(torch.randn(8, 2))
        b.requires_grad_(False)
        loss = -b(fake).mean()
        first.zero_grad()
        loss.backward()
        first.step()
        a.requires_grad_(False)
        b.requires_grad_(True)
        loss = (b(fake.detach()) - b(real) * torch.log(real.sum(1, keepdim=True))).mean()
        second.zero_grad()
        loss.backward()
        second.step()
        a.requires_grad_(True)
    for real in DataLoader(x, batch_size=8):
        train(real)
"""


@pytest.mark.parametrize("program", [SCALED, SWITCHED])
def test_a_fix_is_tried_from_the_state_that_the_step_began_with(place: Path, firstnan: Zygote, program: str) -> None:
    """A scaler has unscaled already; and one half of the model was switched off while the other one is trained."""
    write(place / "train.py", program)
    found = firstnan(["run", "--verify", "20", "train.py"], cwd=place).found
    first = found["remedies"][0]
    assert (first["failing_step_finite"], first["up_to"]) == (True, "loop"), first["note"]


def test_what_counts_as_rounding_depends_on_the_dtype() -> None:
    remedy = Remedy("", "x", loss_change=0.02)
    assert not keeps_numbers(remedy, failing(3))
    half = TensorStat("result", (2,), "torch.float16")
    assert keeps_numbers(remedy, failing(3, origin=Origin("forward", "exp", "aten.exp", produced=half)))
    assert keeps_numbers(replace(remedy, loss_change=1e-4), failing(3))


def test_a_failure_noticed_late_has_to_be_outlived() -> None:
    report = failing(3).with_(history=History((StepRecord(7, nan),)))
    assert last_bad_step(report) == 7
    assert judged(Remedy("", "x"), TrialOutcome(noticed="a gradient", bad_step=6), report).failing_step_finite is False
    assert judged(Remedy("", "x"), TrialOutcome(passed=28), report).steps_finite_after == 20


@pytest.mark.parametrize(
    ("noticed", "note"),
    [
        ("the loss", "the loss is non-finite in step 1 already"),
        ("an exception", "the program ends with an exception in step 1 already"),
    ],
)
def test_a_change_that_fails_earlier_says_nothing_of_the_failing_step(noticed: str, note: str) -> None:
    result = judged(Remedy("", "x"), TrialOutcome(passed=1, noticed=noticed, bad_step=1), failing(3))
    assert (result.failing_step_finite, result.note) == (False, note)
    assert remedy_result(result, failing(3)) == f"tried: {note}"


def test_a_server_that_a_trial_does_not_have_refutes_nothing() -> None:
    alone = TrialOutcome(passed=0, error="ConnectionRefusedError: no", not_continued="there is no server")
    result = judged(Remedy("", "x"), alone, failing(3))
    assert (result.failing_step_finite, result.note) == (None, "step 3 cannot be run to its end: there is no server")


def test_ctrl_c_while_the_report_is_printed_skips_the_fixes() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    report = failing(3).with_(remedies=(Remedy("", "x"),))
    options = SimpleNamespace(verify=None, replay="auto", isolation=True)
    start = SimpleNamespace(has_lost_input=lambda: False)
    given = {"options": options, "start": start, "seconds": 1.0}
    one: Any = SimpleNamespace(**given, _save=lambda _: None, _print_first_part=interrupted)
    Investigation._try_remedies(one, report)
    assert [remedy.note for remedy in one.report.remedies] == ["skipped by Ctrl-C"]
    assert one._first_part_printed is False


def test_order_in_the_report() -> None:
    proven = Remedy("a", "x", True, True, 20, loss_change=0.5)
    best = replace(proven, title="b", loss_change=0.0)
    later = Remedy("c", "x", True, True, None)
    failed, left = Remedy("d", "x", True, False), Remedy("e", "x")
    order = ranked([failed, later, left, proven, best], failing(3))
    assert [r.title for r in order] == ["b", "a", "e", "c", "d"]


# --- the whole command --------------------------------------------------------------------------------------------

COMMAND = """
    import pickle
    import sys
    import firstnan.engine.conclude as room
    from firstnan.cli.main import main

    own = room.Evidence.conclude

    def conclude(self, *args):
        report = own(self, *args)
        return report and report.with_(remedies=pickle.loads({remedies!r}))

    room.Evidence.conclude = conclude
    sys.exit(main(sys.argv[1:]))
"""
LOADED = """
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    rows = torch.rand(80, 4) + 0.5
    rows[43] = 0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(DataLoader(rows, batch_size=8)):
        loss = (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step)
"""


@pytest.fixture
def command(place: Path, firstnan: Zygote) -> Any:
    """`firstnan run` of a program whose report has these remedies."""
    write(place / "train.py", LOADED)

    def run(*words: str, remedies: tuple[Remedy, ...]) -> Any:
        write(place / "command.py", COMMAND.format(remedies=pickle.dumps(remedies)))
        return firstnan.python([str(place / "command.py"), "run", *words, "train.py"], cwd=place)

    return run


def test_run_tries_tells_and_writes_the_patch(place: Path, command: Any) -> None:
    good = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-6)")
    bad = change(place / "train.py", "x.sum(", "x.abs().sum(")
    done = command("--json", "report.json", "--fix", remedies=(bad, good))
    assert done.code == 3
    assert done.stdout.splitlines() == [f"step {i}" for i in range(5)]  # each is printed after its update
    assert "trying up to 2 fixes, without touching your files (Ctrl-C skips this)" in done.stderr
    told = "tried: step 5 is finite, and so are the 4 steps after it, to the end of the loop; healthy losses unchanged"
    assert told in " ".join(done.stderr.split())
    report = load(place / "report.json")
    assert [r.proven for r in report.remedies] == [True, False]
    assert f"firstnan: wrote the best proven fix to {place}/report.patch\n" in done.stderr
    patch = (place / "report.patch").read_text()
    assert patch.startswith("--- a/train.py\n+++ b/train.py\n@@")
    assert textwrap.dedent(LOADED).lstrip("\n") == (place / "train.py").read_text()


def test_fix_without_proof_says_so(place: Path, command: Any) -> None:
    done = command("--fix", "--verify", "3", remedies=(change(place / "train.py", "x.sum(", "x.abs().sum("),))
    assert "firstnan: no fix is proven, so no patch was written" in done.stderr
    assert not (place / "firstnan.patch").exists()


def test_verify_zero_tries_nothing(place: Path, command: Any) -> None:
    done = command("--verify", "0", remedies=(change(place / "train.py", "x.sum(", "x.abs().sum("),))
    assert done.code == 3
    assert "testing" not in done.stderr
    assert "not tried: --verify 0" in done.stderr


def test_verify_says_how_many_steps(place: Path, command: Any) -> None:
    good = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-6)")
    done = command("--verify", "2", "--fix", remedies=(good,))
    told = "tried: step 5 is finite, and so are the 2 steps after it; not tried beyond step 7"
    assert told in " ".join(done.stderr.split())
    # Without a report file the patch lies where the program was started.
    assert (place / "firstnan.patch").read_text().startswith("--- a/train.py\n")


EPOCHS = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def epoch(model, loader, optimizer, number):
        for (x,) in loader:
            if number == {later}:
                x = x * 0
            loss = (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler_seen.append(optimizer.param_groups[0]["lr"])
        return float(loss)

    scheduler_seen = []
    torch.manual_seed(0)
    data = torch.rand(40, 4) + 0.5
    data[9] = 0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    loader = DataLoader(TensorDataset(data), batch_size=4)
    for number in range(5):
        mean = epoch(model, loader, optimizer, number)
        schedule.step()
        assert abs(optimizer.param_groups[0]["lr"] - 0.01 * 0.9 ** (number + 1)) < 1e-9
"""


def test_a_trial_at_the_failing_step_goes_through_all_epochs(place: Path, command: Any) -> None:
    """What stands after the inner loop (a schedule) is run as well: otherwise the program's assertion would fail."""
    write(place / "train.py", EPOCHS.format(later=9))
    good = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-6)")
    done = command("--json", "report.json", remedies=(good,))
    told = "tried: step 2 is finite, and so are the 47 steps after it, to the end of the loop; healthy losses unchanged"
    assert told in " ".join(done.stderr.split())
    (result,) = load(place / "report.json").remedies
    assert (result.steps_finite_after, result.up_to) == (47, "loop")


@pytest.mark.parametrize(("most", "is_proven"), [(8, True), (4, False)])
def test_an_error_long_after_the_failing_step_is_no_verdict(
    place: Path, command: Any, most: int, is_proven: bool
) -> None:
    """A trial may go further than the program would have gone; a schedule may refuse that."""
    write(
        place / "train.py",
        EPOCHS.format(later=9).replace("x = x * 0", f"x\n            assert len(scheduler_seen) < {most}"),
    )
    good = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-6)")
    command("--json", "report.json", "--verify", "3", remedies=(good,))
    (result,) = load(place / "report.json").remedies
    assert result.proven is is_proven, result.note


def test_a_change_that_fails_in_a_later_epoch_is_not_proven(place: Path, command: Any) -> None:
    write(place / "train.py", EPOCHS.format(later=3))
    partly = change(place / "train.py", "x.sum(1, keepdim=True)", "(x.sum(1, keepdim=True) + 1e-6 * (number < 3))")
    done = command("--json", "report.json", remedies=(partly,))
    (result,) = load(place / "report.json").remedies
    assert (result.proven, result.failing_step_finite, result.fails_in) == (False, True, 30)
    assert "tried: step 2 is finite, but the loss is non-finite in step 30" in " ".join(done.stderr.split())


STARTED_ONCE = """
    import pathlib
    import torch

    assert not pathlib.Path("started").exists(), "started again"
    pathlib.Path("started").touch()

    def loss_of(model, x):
        return (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean()

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        x = torch.rand(8, 4) + 0.5
        if step == 5:
            x[3] = 0
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("to", "note"), [("x.abs().sum(", "the loss"), ("0.5 * x.sum(", "wrote no result")])
def test_what_leaves_healthy_steps_alone_has_been_tried_enough_at_the_failing_one(
    place: Path, command: Any, to: str, note: str
) -> None:
    """A change that does not help is tried from the start only if it changes the steps before."""
    write(place / "train.py", STARTED_ONCE)
    command("--json", "report.json", remedies=(change(place / "train.py", "x.sum(", to),))
    (result,) = load(place / "report.json").remedies
    assert not result.proven
    assert note in result.note


def test_a_run_from_the_start_goes_to_the_end_too(place: Path) -> None:
    far = Limits(60, 120, further=30, end=30)
    write(place / "train.py", EPOCHS.format(later=3))
    result = outcome_of(change(place / "train.py", "data[9] = 0", "data[9] = 1"), 2, limits=far)
    assert (result.proven, result.fails_in, result.note) == (False, 30, "the loss is non-finite in step 30")
    write(place / "train.py", EPOCHS.format(later=9))
    result = outcome_of(change(place / "train.py", "data[9] = 0", "data[9] = 1"), 2, limits=far)
    assert (result.proven, result.steps_finite_after, result.up_to) == (True, 47, "program")


def test_one_that_holds_for_long_comes_before_what_was_not_tried() -> None:
    report = failing(5)
    long = replace(Remedy("long", "x"), tried=True, failing_step_finite=True, fails_in=70)
    short = replace(long, title="short", fails_in=20)
    assert [r.title for r in ranked([short, Remedy("untried", "x"), long], report)] == ["long", "untried", "short"]


# --- what comes after the failing step --------------------------------------------------------------------------------

TRAINED = """
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

BAD = {bad}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def row(number):
    return torch.full((4,), BAD[number]) if number in BAD else torch.rand(4) + 0.5

def batches(numbers):
    for number in numbers:
        yield torch.stack([row(number)] * 4)

class Rows(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        return row(index // 4)

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for number in range(info.id if info else 0, 30, info.num_workers if info else 1):
            yield from [row(number)] * 4

def train(x):
    loss = (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

"""
BATCHES = {
    "generator": """
        for step, x in enumerate(batches(range(30))):
            train(x)
    """,
    "generators in a function": """
        def main(used):
            keep = lambda: used
            with torch.enable_grad():
                for part in (range(4), range(4, 20), range(20, 30)):
                    for x in batches(part):
                        train(x)
        main(1)
    """,
    "fetched for each step": """
        pending = batches(range(30))
        for step in range(30):
            for x in [next(pending)]:
                train(x)
    """,
    "iterable": """
        for x in DataLoader(Stream(), 4):
            train(x)
    """,
    "workers": """
        for step, x in enumerate(DataLoader(Rows(), 4, num_workers=2)):
            train(x)
    """,
    "workers of an iterable": """
        for x in DataLoader(Stream(), 4, num_workers=2):
            train(x)
    """,
    "kept workers": """
        loader = DataLoader(torch.utils.data.Subset(Rows(), range(60)), 4, num_workers=1, persistent_workers=True)
        for epoch in range(2):
            for x in loader:
                train(x)
    """,
}


@pytest.mark.parametrize("batches", BATCHES)
def test_a_trial_at_the_failing_step_goes_on_with_the_batches_after_it(place: Path, command: Any, batches: str) -> None:
    """All have 30 steps, of which step 7 fails: not one is left out, and none comes twice."""
    (place / "train.py").write_text(TRAINED.format(bad="{7: 0.0}") + textwrap.dedent(BATCHES[batches]))
    good = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-3)")
    done = command("--json", "report.json", remedies=(good,))
    (result,) = load(place / "report.json").remedies
    if batches == "workers of an iterable" and not result.up_to:  # where the machine is too busy for another run
        assert (result.proven, result.steps_finite_after) == (True, 0)
        assert "not tried beyond step 7: the next batches of an IterableDataset are in its worker" in result.note
    else:
        assert (result.proven, result.steps_finite_after, bool(result.up_to)) == (True, 22, True), done.stderr
        assert "healthy losses unchanged" in " ".join(done.stderr.split())


@pytest.mark.parametrize("batches", [name for name in BATCHES if name != "workers of an iterable"])
def test_a_change_that_fails_with_the_very_next_batch_is_not_proven(place: Path, command: Any, batches: str) -> None:
    bad = "{7: 0.0, 8: float('nan')}"
    (place / "train.py").write_text(TRAINED.format(bad=bad) + textwrap.dedent(BATCHES[batches]))
    partly = change(place / "train.py", "keepdim=True)", "keepdim=True).clamp_min(1e-3)")
    done = command("--json", "report.json", remedies=(partly,))
    (result,) = load(place / "report.json").remedies
    assert (result.proven, result.failing_step_finite, result.fails_in) == (False, True, 8), done.stderr


def test_a_change_of_module_code_alone_visits_no_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that is in no function: none has to be found among all objects of the process."""
    program = tmp_path / "program.py"
    program.write_text("def half(x):\n    return x / 2\n\n\nfor i in range(3):\n    y = half(i)\n")
    visited: list[str] = []
    monkeypatch.setattr(step_trial, "_functions_of", lambda path: visited.append(path) or [])
    text = program.read_text()
    assert step_trial._changed(str(program), text.replace("half(i)", "half(i + 1)")) == []
    assert not visited
    assert step_trial._changed(str(program), text.replace("x / 2", "x / 3")) == []
    assert visited == [str(program)]
