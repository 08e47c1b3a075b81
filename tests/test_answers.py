"""What an answer costs and says: steps instead of runs, whatever the loop is like; and an honest second run."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from firstnan.engine.loop_replay import StepFailure
from firstnan.engine.step_trial import StepTrials, TurnOutcome, _is_amid_update, _Tried
from firstnan.gate.gate import Trip
from firstnan.records import History, Noticed, Remedy, Report, StepRecord
from firstnan.repair.verdict import TrialOutcome, judged
from zygote import Result, Zygote

pytest_plugins = ["zygote"]

BEGIN = """
    import math, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    data = torch.rand(400, 4) + 0.1
    data[205] = 0
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss_of(x):
        return (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean()  # here

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

LOOPS = {
    "drawn": """
        while True:
            update(loss_of(data[torch.randint(0, 400, (8,))]))
    """,
    "drawn by its own generators": """
        import random
        import numpy as np
        class Buffer:
            def __init__(self):
                self.rng = np.random.default_rng(3)
            def sample(self, chosen):
                return data[torch.from_numpy(self.rng.permutation(chosen.numpy()))]
        def train():
            g, coin, buffer = torch.Generator().manual_seed(5), random.Random(2), Buffer()
            while True:
                chosen = torch.randint(0, 400, (8,), generator=g)
                update(loss_of(buffer.sample(chosen) + coin.random() * 0))
        train()
    """,
    "drawn ahead": """
        torch.manual_seed(7)
        x = data[torch.randint(0, 400, (8,))]
        for step in range(1000):
            loss = loss_of(x)
            x = data[torch.randint(0, 400, (8,))]
            update(loss)
    """,
    "slices": """
        for i in range(0, 400, 8):
            update(loss_of(data[i : i + 8]))
    """,
    "used up": """
        def fetch(position=[0]):
            position[0] += 8
            return data[position[0] - 8 : position[0]]
        for step in range(50):
            batch = fetch()
            loss = loss_of(batch)
            update(loss)
    """,
    "generator": """
        def batches():
            for part in data.split(8):
                yield part
        for batch in batches():
            update(loss_of(batch))
    """,
    "closure": """
        for part in data.split(8):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(part)
                loss.backward()
                return loss
            optimizer.step(closure)
    """,
    "exit": """
        for part in data.split(8):
            loss = loss_of(part)
            if not math.isfinite(loss.item()):
                sys.exit("Loss is not finite, stopping training")
            update(loss)
    """,
    "break": """
        def train():
            for part in data.split(8):
                loss = loss_of(part)
                if torch.isnan(loss) or torch.isinf(loss):
                    break
                update(loss)
        train()
    """,
    "assert": """
        for part in data.split(8):
            loss = loss_of(part)
            assert torch.isfinite(loss), "bad loss"
            update(loss)
    """,
    "loader, its variable assigned again": """
        for (part,) in DataLoader(TensorDataset(data * 4), 8):
            part = part / 4
            loss = loss_of(part)
            if torch.isinf(loss):
                break
            update(loss)
    """,
    "list, its variable assigned again": """
        def train(parts):
            for i, part in enumerate(parts):
                part = part / 4
                update(loss_of(part))
        train((data * 4).split(8))
    """,
    "loader": """
        for (part,) in DataLoader(TensorDataset(data), 8):
            update(loss_of(part))
    """,
    "state in variables that are only assigned": """
        def train():
            state = torch.zeros(8, 4), torch.full((8, 4), 3.0)
            for i in range(60):
                time.sleep(0.01)  # in much shorter steps nothing is kept
                hidden = torch.tanh(torch.rand(8, 4) + 0.5 * state[0] + model.weight)
                state, loss = (hidden, state[1] - 0.125), loss_of(state[1])
                update(loss + 0 * hidden.sum())
                state = tuple(part.detach() for part in state)
        train()
    """,
    "last batch": """
        for (part,) in DataLoader(TensorDataset(data[:206]), 8):
            update(loss_of(part))
    """,
}


def run(firstnan: Zygote, folder: Path, text: str, *words: str) -> Result:
    (folder / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    return firstnan(["run", *words, "train.py"], cwd=folder)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_program_is_not_run_again(firstnan: Zygote, tmp_path: Path, loop: str) -> None:
    result = run(firstnan, tmp_path, LOOPS[loop], "--verify", "5")
    assert result.origin["op"] == "log"
    assert "# here" in (tmp_path / "train.py").read_text().splitlines()[result.origin["line"] - 1]
    assert "running the program again" not in result.stderr
    assert result.found["reproduced"] == "deterministic"
    best = result.found["remedies"][0]
    after = 0 if loop == "last batch" else 5
    assert (best["tried"], best["failing_step_finite"], best["steps_finite_after"]) == (True, True, after)


UPDATES = {
    "rate": """
        for i in range(0, 400, 8):
            optimizer.param_groups[0]["lr"] = math.nan if i == 200 else 0.01
            update((model(data[i : i + 8] + 1) - 1).square().mean())
    """,
    "eps": """
        torch.manual_seed(1)
        layer = nn.Embedding(30, 1)
        optimizer = torch.optim.Adam(layer.parameters(), 0.01, eps=0.0)
        for i in range(60):
            update((layer(torch.arange(30 if i > 25 else 29)) + torch.randn(1)).square().mean())
    """,
}


@pytest.mark.parametrize("update", UPDATES)
def test_a_bad_update_is_made_again_alone(firstnan: Zygote, tmp_path: Path, update: str) -> None:
    result = run(firstnan, tmp_path, UPDATES[update], "--verify", "0")
    assert result.origin["phase"] == "optimizer"
    assert "running the program again" not in result.stderr
    assert "the update was replayed" in result.stderr


def test_the_report_is_there_before_the_trials(firstnan: Zygote, tmp_path: Path) -> None:
    stderr = run(firstnan, tmp_path, LOOPS["slices"], "--verify", "5").stderr
    assert stderr.index("[log_of_zero]") < stderr.index("trying up to") < stderr.index("fix 1")


ONE_AHEAD = """
        def one_ahead(loader):
            batches = iter(loader)
            current = next(batches)
            for following in batches:
                yield current
                current = following
"""


def test_a_batch_that_was_fetched_ahead_is_not_the_steps(firstnan: Zygote, tmp_path: Path) -> None:
    text = (
        ONE_AHEAD
        + """
        for (part,) in one_ahead(DataLoader(TensorDataset(data), 8)):
            update(loss_of(part))
    """
    )
    batch = run(firstnan, tmp_path, text).found["batch"]
    assert (batch["index"], batch["bad_samples"]) == (25, [5])


@pytest.mark.parametrize("together", [2, 3, 5])
def test_of_batches_that_are_fetched_together_the_one_in_use_is_named(
    firstnan: Zygote, tmp_path: Path, together: int
) -> None:
    """All batches of an update are fetched before the first is used, and one more to know which is the last."""
    text = (
        ONE_AHEAD
        + f"""
        batches = one_ahead(DataLoader(TensorDataset(data), 8))
        while True:
            fetched = [next(batches) for _ in range({together})]
            optimizer.zero_grad()
            for (part,) in fetched:
                (loss_of(part) / {together}).backward()
            optimizer.step()
    """
    )
    batch = run(firstnan, tmp_path, text).found["batch"]
    assert (batch["index"], batch["bad_samples"]) == (25, [5])


def test_another_batch_that_fails_too_is_not_the_steps(firstnan: Zygote, tmp_path: Path) -> None:
    """The program's own generator goes on, so the whole body would draw another bad row."""
    text = """
        import numpy
        rows = numpy.random.default_rng(3)
        for step in range(9):
            batch = torch.rand(64, 4) + 0.1
            row = int(rows.integers(64))
            if step == 3:
                open("row.txt", "w").write(str(row))
            if step >= 3:
                batch[row] = 0
            loss = loss_of(batch)
            update(loss)
    """
    found = run(firstnan, tmp_path, text).found
    assert found["batch"]["bad_samples"] == [int((tmp_path / "row.txt").read_text())]


def test_a_change_before_the_loop_is_tried_from_the_start(firstnan: Zygote, tmp_path: Path) -> None:
    text = """
        targets = data.sum(1).log()
        for i in range(0, 400, 8):
            update((model(data[i : i + 8]).flatten() - targets[i : i + 8]).square().mean())
    """
    result = run(firstnan, tmp_path, text, "--verify", "3")
    assert (result.origin["op"], result.origin["line"]) == ("log", 20)
    assert result.found["remedies"][0]["steps_finite_after"] == 3


# --- what counts as proven -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (TurnOutcome(losses=[1.0, 2.0], updates=2), "all gradients are 0 with it"),
        (TurnOutcome(losses=[0.25] * 6, updates=2, learns=True), "the loss is 0.25 in every step with it"),
        (TurnOutcome(losses=[0.25] * 5, updates=2, learns=True), ""),
        (TurnOutcome(losses=[0.25, 0.5] * 3, updates=2, learns=True), ""),
        (TurnOutcome(losses=[1.0]), ""),
    ],
)
def test_training_that_learns_nothing(seen: TurnOutcome, says: str) -> None:
    assert seen.frozen() == says


def test_a_change_that_stops_learning_is_not_proven() -> None:
    report = Report("nonfinite", step=5)
    outcome = TrialOutcome(passed=26, trained=True, at_step=True, change=0.0)
    assert judged(Remedy("a"), outcome, report).proven
    result = judged(Remedy("a"), replace(outcome, frozen="all gradients are 0 with it"), report)
    assert (result.proven, result.failing_step_finite) == (False, True)
    assert result.note == "training stops learning: all gradients are 0 with it"
    before = History(steps=(StepRecord(3, 1.0, 0.0), StepRecord(4, 1.0, 0.0)))
    frozen = judged(Remedy("a"), replace(outcome, frozen="all gradients are 0 with it"), report.with_(history=before))
    assert frozen.proven  # it did not learn anything without the change either


@pytest.mark.parametrize(("after", "proven"), [(1900.0, False), (90.0, True)])
def test_a_loss_that_leaps_and_stays_there_is_not_proven(after: float, proven: bool) -> None:
    """`sigma.clamp_min(1e-3)` is finite, and has no gradient once every sigma is below it."""
    steps = tuple(StepRecord(i, 0.5 + i / 100) for i in range(5, 15))
    report = Report("nonfinite", step=15, history=History(steps))
    losses = [1.0] * 25 + [after] * 40
    outcome = TrialOutcome(
        passed=80, trained=True, at_step=True, losses=((15, 1.0),), latest=tuple(enumerate(losses, start=16))
    )
    result = judged(Remedy("a"), outcome, report)
    assert (result.proven, result.failing_step_finite) == (proven, True)
    assert result.note == ("" if proven else "from step 41 on the loss is about 1.9e+03, before it about 1")
    outlier = (*outcome.latest[:10], (26, 1e4), *outcome.latest[11:])
    assert judged(Remedy("a"), replace(outcome, latest=outlier), report).proven == proven
    spikes = tuple((step, loss if step % 3 else 0.7) for step, loss in outcome.latest)
    assert judged(Remedy("a"), replace(outcome, latest=spikes), report).proven


def test_a_loss_out_of_all_proportion_is_not_proven() -> None:
    """`ema / max(1 - decay**0, 1e-8)` is finite, and the first loss 1e8 times too large."""
    report = Report("nonfinite", step=0)
    outcome = TrialOutcome(passed=21, trained=True, losses=((0, 3e8),), latest=((18, 1.5), (19, 2.5), (20, 1.0)))
    result = judged(Remedy("a"), outcome, report)
    assert (result.proven, result.failing_step_finite) == (False, True)
    assert result.note == "its loss is 3e+08 there, in other steps about 1.5"
    assert judged(Remedy("a"), replace(outcome, losses=((0, 3e4),)), report).proven
    hinge = replace(outcome, losses=((0, 0.06),), latest=tuple((i, 0.0) for i in range(16, 21)))
    assert judged(Remedy("a"), hinge, report).proven  # the others are satisfied
    again = replace(outcome, latest=(*outcome.latest, (40, 4e8)))  # the same sample in the next epoch
    result = judged(Remedy("a"), again, report)
    assert (result.proven, result.note) == (False, "its loss is 3e+08 there, in most other steps about 1.5")
    as_before = replace(report, history=History((StepRecord(0, 2e8),)))  # the update went wrong, not the loss
    assert judged(Remedy("a"), outcome, as_before).proven
    falling = tuple((step, 10.0 ** (8 - step)) for step in range(1, 20))
    assert judged(Remedy("a"), replace(outcome, latest=falling), report).proven


# --- the second run ------------------------------------------------------------------------------------------------

UPDATES_BADLY = """
    class Odd(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            if self.state.setdefault("count", 0) == {bad}:
                for group in self.param_groups:
                    for p in group["params"]:
                        p.div_(torch.zeros(()))
            self.state["count"] += 1
    optimizer = Odd(model.parameters(), 0.01)
    data[205] = 1
    for part in data.split(8):
        update(loss_of(part))
"""


def second(firstnan: Zygote, folder: Path, begin: str, bad: Any = 6) -> Result:
    return run(firstnan, folder, textwrap.dedent(begin) + textwrap.dedent(UPDATES_BADLY.format(bad=bad)))


def test_a_second_run_that_fails_alike(firstnan: Zygote, tmp_path: Path) -> None:
    result = second(firstnan, tmp_path, "")
    assert (result.origin["op"], result.found["reproduced"]) == ("div", "deterministic")


def test_a_second_run_that_could_not_start_is_not_called_finite(firstnan: Zygote, tmp_path: Path) -> None:
    result = second(firstnan, tmp_path, "import os\nos.mkdir('run1')\n")
    (note,) = [note for note in result.found["notes"] if "second run" in note]
    assert re.match(r"the second run did not reach step \d; it ended after 0 steps with FileExistsError", note)
    assert result.found["reproduced"] != "transient"


def test_a_second_run_that_fails_in_another_step_is_not_the_same(firstnan: Zygote, tmp_path: Path) -> None:
    begin = "import os\nfirst = not os.path.exists('seen')\nopen('seen', 'w')\n"
    result = second(firstnan, tmp_path, begin, "(6 if first else 8)")
    (note,) = [note for note in result.found["notes"] if "not the same failure" in note]
    assert re.search(r"the first run failed in step \d, the second", note)
    assert result.found["reproduced"] == "transient"


SEARCHED = """
    class Peak(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = nn.Parameter(torch.tensor(1.7, dtype=torch.float64))
            self.width = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def misfit(self, x):
            z = (x - self.mean) / self.width
            return (0.5 * z * z + torch.log(self.width)).mean()

    torch.manual_seed(0)
    data = torch.randn(400, dtype=torch.float64) * 0.05 + 2.0
    model = Peak()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model.misfit(data)
        loss.backward()
        return loss

    for step in range(12):
        loss = optimizer.step(closure)
"""


def test_a_trial_does_not_begin_in_the_middle_of_an_update(firstnan: Zygote, tmp_path: Path) -> None:
    """LBFGS calls its closure several times in a step; what it keeps in between is no state to begin a step with."""
    result = run(firstnan, tmp_path, SEARCHED)
    notes = [remedy["note"] for remedy in result.found["remedies"]]
    assert notes
    assert not any("Error" in note for note in notes), notes


def test_only_the_first_call_of_a_closure_is_before_the_update() -> None:
    weight, seen = torch.nn.Parameter(torch.tensor(3.0)), list[bool]()
    optimizer = torch.optim.LBFGS([weight], max_iter=3)

    def closure() -> torch.Tensor:
        seen.append(_is_amid_update(optimizer))
        optimizer.zero_grad()
        loss = weight**4
        loss.backward()
        return loss

    optimizer.step(closure)
    assert seen[0] is False
    assert len(seen) > 1
    assert all(seen[1:])


LOGGED = """
    import os
    import socket
    import threading

    os.rename("todo", "done")  # which does not work twice
    ours, theirs = socket.socketpair()

    def answer():
        while theirs.recv(1 << 16):
            theirs.send(b"ok")

    threading.Thread(target=answer, daemon=True).start()
    for part in data.split(8):
        update(loss_of(part))
        ours.sendall(bytes(50_000))
        {waits}
"""


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ("pass", ""),
        ("if not ours.recv(2): raise ConnectionResetError(104, 'gone')", "there the program waits for a server,"),
        ("ok = ours.recv(2) == b'ok' or socket.create_connection(('127.0.0.1', 9))", ""),
        ("data = torch.ones(1) if ours.recv(2) else socket.create_connection(('127.0.0.1', 9))", "there the program"),
        ("assert ours.recv(2)[1]", "IndexError: index out of range, perhaps because no other process answers there"),
    ],
)
def test_a_server_that_does_not_answer_a_trial_is_no_error_of_the_program(
    firstnan: Zygote, tmp_path: Path, waits: str, told: str
) -> None:
    """What a trial sends arrives nowhere, and goes through; if the program wants an answer, the trial ends there."""
    (tmp_path / "todo").touch()
    result = run(firstnan, tmp_path, LOGGED.format(waits=waits), "--verify", "5")
    best = result.found["remedies"][0]
    assert (best["failing_step_finite"], best["steps_finite_after"]) == (True, 0 if told else 5), best["note"]
    assert best["note"].startswith(f"not tried beyond step 25: {told}" if told else "")


@pytest.mark.parametrize(
    ("losses", "refuted"),
    [
        ([3e8, *[1.5] * 20], True),
        ([3e8, 3e8, 3e8, 3e8, *[1.5] * 17], True),  # several steps with the same data
        ([3e4, *[1.5] * 20], False),
    ],
)
def test_a_trial_ends_once_the_loss_of_the_failing_step_refutes_it(losses: list[float], refuted: bool) -> None:
    trial: Any = SimpleNamespace(
        _asked=False, _watching=SimpleNamespace(losses=losses), _steps=SimpleNamespace(made=len(losses))
    )
    assert _Tried._is_refuted(trial) is refuted
    assert not _Tried._is_refuted(trial)  # asked once


@pytest.mark.parametrize(
    ("what", "before_update", "possible"),
    [("parameter", False, False), ("state", False, False), ("buffer", False, True), ("gradient", True, True)],
)
def test_weights_that_the_step_has_changed_are_not_tried_there(what: Any, before_update: bool, possible: bool) -> None:
    session: Any = SimpleNamespace(gate=SimpleNamespace(in_step=None))
    failure = StepFailure(Trip(Noticed(what), [], before_update=before_update), (what, 0), Report("nonfinite"))
    assert StepTrials(session, failure).is_possible() is possible
