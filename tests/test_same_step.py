"""A replay is the step that failed: the same random numbers, and the batch of the step that is named."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from zygote import Result, Zygote

pytest_plugins = ["zygote"]

HEAD = """
    import queue
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    {seed}
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def lengths(x):
        kept = torch.rand(len(x), 1) > 0.1
        print((~kept).flatten().nonzero().flatten().tolist(), flush=True)
        return torch.sqrt((net(x) * kept).square().sum(1))
"""
STEP = """
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def run(firstnan: Zygote, folder: Path, text: str, *options: str, seed: str = "torch.manual_seed(3)") -> Result:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(HEAD.format(seed=seed) + text))
    return firstnan(["run", *options, path], cwd=folder)


def rows_of_last_step(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


IN_FIRST_STEP = f"""
    for step in range(3):
        x = torch.rand(16, 4)
        loss = (lengths(x) - 1).square().mean()
{STEP}
"""


def test_random_numbers_of_the_first_step(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, IN_FIRST_STEP)
    assert result.found["step"] == 0
    assert result.found["reproduced"] == "deterministic"
    assert result.found["batch"]["bad_samples"] == rows_of_last_step(result)
    assert "the loop's body was run again" in result.found["replay"]


FETCHED_ONCE = f"""
    full = queue.Queue()
    for _ in range(40):
        full.put(torch.rand(16, 4))
    dropped = nn.Dropout(0.01)
    for step in range(40):
        x = full.get()
        loss = lengths(x).mean() if step == 20 else dropped(net(x)).mean()
{STEP}
"""


def test_random_numbers_after_a_batch_that_cannot_be_fetched_again(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, FETCHED_ONCE)
    assert result.found["step"] == 20
    assert result.found["reproduced"] == "deterministic"
    assert "the loop's body was run again" in result.found["replay"]
    assert result.origin["produced"]["inf"] + result.origin["produced"]["nan"] == len(rows_of_last_step(result))


DRAWN_BEFORE_THE_LOOP = f"""
    x = torch.rand(160, 4)  # so many that some are dropped, whatever the seed
    for step in range(3):
        loss = (lengths(x) - 1).square().mean()
{STEP}
"""


def test_a_replay_with_other_numbers_is_not_the_step(firstnan: Zygote, tmp_path: Path) -> None:
    """What the generators had when the first step began is not known, so the program is run again."""
    result = run(firstnan, tmp_path, DRAWN_BEFORE_THE_LOOP)
    assert result.found["replay"].startswith("the program was run again")
    assert result.found["reproduced"] == "deterministic"
    assert result.origin["produced"]["inf"] + result.origin["produced"]["nan"] == len(rows_of_last_step(result))


def test_other_numbers_are_not_called_the_same_failure(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, DRAWN_BEFORE_THE_LOOP, seed="torch.seed()")
    assert result.found["reproduced"] == "similar"
    assert result.cause == "sqrt_grad_at_zero"
    assert result.found["batch"] is None or not result.found["batch"]["bad_samples"]
    assert "but with different numbers" in " ".join(result.stderr.split())


AFTER_THE_UPDATE = """
    torch.manual_seed(0)
    for epoch in range(3):
        for step, (x,) in enumerate(DataLoader(TensorDataset(torch.rand(64, 4)), batch_size=16)):
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (epoch, step) == (%d, %d):
                with torch.no_grad():
                    net.weight[0, 1] = 0
                    net.weight.div_(net.weight[0, 1].clone())
"""


def test_the_batch_is_that_of_the_step_named(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, AFTER_THE_UPDATE % (1, 1))
    assert (result.found["step"], result.found["batch"]["index"], result.found["batch"]["size"]) == (5, 1, 16)


def test_the_last_batch_of_an_epoch(firstnan: Zygote, tmp_path: Path) -> None:
    """The next step, where it is noticed, has the first batch of another loader."""
    result = run(firstnan, tmp_path, AFTER_THE_UPDATE % (0, 3))
    assert (result.found["step"], result.found["batch"]["index"]) == (3, 3)


BUFFER = """
    net.register_buffer("last", torch.zeros(4))
    data = torch.rand(320, 4)
    data[47::16, 2] = -1.0
    for x, in DataLoader(TensorDataset(data), batch_size=16):
        net.last = x[-1].log()
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_buffer_is_noticed_after_the_update_of_its_step(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, BUFFER)
    assert result.found["noticed"]["what"] == "buffer"
    assert (result.found["step"], result.found["batch"]["index"]) == (2, 2)


DRAWN = """
    for step in range(8):
        x = torch.rand(16, 4)
        y = torch.rand(16) + 0.01
        if step == 5:
            y[3] = 0
        loss = ((net(x).squeeze(1) - y) / y).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
REASON = "the random numbers drawn in this step are the reason"


def test_what_the_code_writes_into_drawn_numbers_is_not_drawn(firstnan: Zygote, tmp_path: Path) -> None:
    batch = run(firstnan, tmp_path, DRAWN).found["batch"]
    assert batch["bad_samples"] == [3]
    assert batch["confirmed"]
    assert REASON not in batch["note"]


WITH_DETECTOR = """
    from firstnan import NaNDetector, NonFiniteError

    class Unit(nn.Module):
        def forward(self, v):
            return v / v.norm(dim=-1, keepdim=True)

    data = torch.randn(240, 4)
    data[[29, 77]] = 0
    unit, seen = Unit(), []
    try:
        with NaNDetector(net, optimizer, on_nonfinite="{policy}") as detector:
            for x, in detector.batches(DataLoader(TensorDataset(data), batch_size=8)):
                loss = net(unit(x)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen.append(len(seen))
    except NonFiniteError as error:
        print("raised", error.report.step)
    print(len(seen), detector.summary()["nonfinite"], net.weight.tolist())
"""


@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_a_program_with_its_own_detector_goes_on_as_that_decides(firstnan: Zygote, tmp_path: Path, policy: str) -> None:
    result = run(firstnan, tmp_path, WITH_DETECTOR.format(policy=policy), "--verify", "5", "--isolation", "auto")
    alone = firstnan.python([tmp_path / "train.py"], cwd=tmp_path)
    assert result.code == 3
    assert result.stdout == alone.stdout
    batch = result.found["batch"]
    assert (result.found["step"], batch["dataset_indices"], batch["confirmed"]) == (3, [29], True)
    assert result.stderr.count("\njson  ") == 1
    assert result.found["remedies"][0]["failing_step_finite"]
    assert result.found["remedies"][0]["steps_finite_after"] >= 5


RAISED_AFTER_UPDATE = """
    from firstnan import NaNDetector

    with NaNDetector(net, optimizer):
        for step in range(6):
            optimizer.param_groups[0]["lr"] = float("nan") if step == 4 else 0.1
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
"""


def test_an_update_that_its_own_detector_raises_for_is_reported_once(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, RAISED_AFTER_UPDATE, "--verify", "0")
    assert (result.code, result.found["step"], result.cause) == (3, 4, "nan_lr")
    assert result.stderr.count("[nan_lr]") == 1
    assert "NonFiniteError: firstnan: NaN created in the optimizer's update" in result.stderr


RAISES = """
    def one_ahead(batches):
        now = next(batches)
        for following in batches:
            yield now
            now = following
        yield now

    torch.autograd.set_detect_anomaly({anomaly})
    data = torch.rand(64, 4) + 1.5
    data[29] = {bad}
    dataset = TensorDataset(data)
    try:
        for x, in one_ahead(iter(DataLoader(dataset, batch_size=6))):
            {loss}
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    except Exception as error:
        {then}
"""


@pytest.mark.parametrize(
    ("bad", "loss", "cause"),
    [
        (-2.0, "loss = -torch.distributions.Normal(net(x), x[:, :1].log()).log_prob(x).mean()", "log_of_negative"),
        (0.0, "n = (x - 0 * net(x)).norm(dim=1); loss = torch.where(n > 0, n / (n + n.detach()), n).mean()", ""),
    ],
)
def test_a_step_that_ends_in_an_exception_while_the_next_batch_is_there(
    firstnan: Zygote, tmp_path: Path, bad: float, loss: str, cause: str
) -> None:
    """torch itself raises: for an argument that it checks, and in anomaly mode, here under a library like hydra."""
    then = "raise" if cause else "raise SystemExit(1)"
    text = RAISES.format(bad=bad, loss=loss, anomaly=not cause, then=then)
    result = run(firstnan, tmp_path, text, "--verify", "0")
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert result.code == 3
    assert "loss =" in lines[result.found["origin"]["line"] - 1]
    assert result.cause == (cause or "where_grad_trap")
    batch = result.found["batch"]
    assert (result.found["step"], batch["index"], batch["bad_samples"], batch["dataset_indices"]) == (4, 4, [5], [29])


AHEAD_BY_HAND = """
    def moved(batch):
        return {{"x": batch[0].to("cpu"), "y": batch[1].to("cpu")}}

    def epoch(loader):
        turns = iter(loader)
        batch = moved(next(turns))
        while batch is not None:
            following = next(turns, None)
            if following is not None:
                following = moved(following)
            lengths = (net.weight * batch["x"]).square().sum(1){root}
            loss = (lengths * batch["y"] / batch["x"].sum(1).clamp_min({low})).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch = following

    def swapped(loader):
        turns = iter(loader)
        following = next(turns)
        while following is not None:
            batch, following = following, next(turns, None)
            lengths = (net.weight * batch[0]).square().sum(1){root}
            loss = (lengths * batch[1] / batch[0].sum(1).clamp_min({low})).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    data = torch.rand(64, 4)
    data[29] = 0
    {loop}(DataLoader(TensorDataset(data, torch.arange(64.0)), batch_size=6))
"""


@pytest.mark.parametrize("loop", ["epoch", "swapped"])
@pytest.mark.parametrize(("root", "low", "cause"), [("", "0", "zero_over_zero"), (".sqrt()", "1", "sqrt_grad_at_zero")])
def test_the_loop_has_its_next_batch_in_a_variable(
    firstnan: Zygote, tmp_path: Path, loop: str, root: str, low: str, cause: str
) -> None:
    """The loss is bad, or a gradient; the batch of the step is the one that these are computed from."""
    text = AHEAD_BY_HAND.format(loop=loop, root=root, low=low)
    result = run(firstnan, tmp_path, text, "--verify", "0")
    batch = result.found["batch"]
    assert (result.code, result.cause) == (3, cause)
    assert (result.found["step"], batch["index"], batch["bad_samples"], batch["dataset_indices"]) == (4, 4, [5], [29])


AHEAD_UNSEEN = """
    class Trainer:
        def fit(self, loader):
            self.turns = iter(loader)
            self.ahead = next(self.turns)
            while self.ahead is not None:
                self.now, self.ahead = self.ahead, next(self.turns, None)
                self.forward()
                optimizer.zero_grad()
                self.loss.backward()
                optimizer.step()

        def forward(self):
            x, y = self.now
            self.loss = (net(x / x.sum(1, keepdim=True)).flatten() * y).mean()

    def fetched_in_the_step(loader):
        turns = iter(loader)
        x, y = next(turns)
        for _ in range(10):
            loss = (net(x / x.sum(1, keepdim=True)).flatten() * y).mean()
            x, y = next(turns)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    data = torch.rand(66, 4)
    data[29] = 0
    {train}(DataLoader(TensorDataset(data, torch.arange(66.0)), batch_size=6))
"""


@pytest.mark.parametrize("train", ["Trainer().fit", "fetched_in_the_step"])
def test_a_batch_that_no_variable_holds_when_the_step_fails(firstnan: Zygote, tmp_path: Path, train: str) -> None:
    """The next one is in an attribute, or in the variables already."""
    result = run(firstnan, tmp_path, AHEAD_UNSEEN.format(train=train), "--verify", "0")
    batch = result.found["batch"]
    assert (result.code, result.cause) == (3, "zero_over_zero")
    assert (result.found["step"], batch["index"], batch["bad_samples"], batch["dataset_indices"]) == (4, 4, [5], [29])


OWN_CHECK = """
    data = torch.rand(64, 4)
    data[19] = 0
    for i, (x,) in enumerate(DataLoader(TensorDataset(data), batch_size=8)):
        (net.weight * x).square().sum(1).sqrt().sum().backward()
        if i % 2:
            if any(p.grad is not None and not torch.isfinite(p.grad).all() for p in net.parameters()):
                raise RuntimeError("bad gradients")
            optimizer.step()
            optimizer.zero_grad()
"""


def test_gradients_of_several_batches_that_the_program_checks_itself(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, OWN_CHECK, "--verify", "0")
    assert (result.code, result.cause, result.found["step"]) == (3, "sqrt_grad_at_zero", 1)
    assert (result.found["batch"]["index"], result.found["batch"]["bad_samples"]) == (2, [3])


THREAD = """
    import threading

    def prefetch(full):
        for i in range(30):
            rows = [[0.1 * k, 0.2, 0.3, 0.4, {values}] for k in range(8)]
            made = torch.tensor(rows)  # MADE
            full.put((made[:, :4], made[:, 4]))

    full = queue.Queue(maxsize=4)
    threading.Thread(target=prefetch, args=(full,), daemon=True).start()
    for step in range(30):
        x, y = full.get()
        loss = nn.functional.mse_loss(net(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_target_that_another_thread_has_made(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, THREAD.format(values="float('nan') if (i, k) == (20, 3) else 1.0"))
    lines = (tmp_path / "train.py").read_text().splitlines()
    assert result.cause == "nan_label"
    assert result.found["step"] == 20
    assert "# MADE" in lines[result.origin["line"] - 1]
    assert "mse_loss" in lines[result.origin["read_at"]["line"] - 1]
    assert "mse_loss produced" not in result.stderr
    assert "inside torch" not in result.stderr


IN_A_CALL = """
    class Trainer:
        def __init__(self, numbers):
            self.numbers = (n - 5 for n in numbers)

        def step(self):
            scale = next(self.numbers)
            x = torch.rand(4, 4)
            loss = (net(x) / scale).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    trainer = Trainer(range(9))
    while True:
        trainer.step()
"""


def test_a_call_that_fetches_what_cannot_be_fetched_again(firstnan: Zygote, tmp_path: Path) -> None:
    result = run(firstnan, tmp_path, IN_A_CALL)
    assert (result.found["step"], result.origin["op"]) == (5, "div")
    assert result.found["reproduced"] == "deterministic"
    assert "the program again" not in result.stderr


CRITIC = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    torch.manual_seed(1)
    images = torch.randn(96, 6)
    images[45] = 0
    make, judge = nn.Linear(2, 6), nn.Sequential(nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 1, bias=False))
    of_judge, of_maker = torch.optim.Adam(judge.parameters(), 1e-4), torch.optim.Adam(make.parameters(), 1e-4)

    for i, real in enumerate(DataLoader(images, 8)):
        made = make(torch.randn(8, 2))
        real.requires_grad_()
        (slope,) = torch.autograd.grad(judge(real).sum(), real, create_graph=True)
        length = slope.square().sum(1).sqrt()
        loss = (judge(made.detach()) - judge(real)).mean() + (length - 1).square().mean()
        of_judge.zero_grad()
        loss.backward()
        of_judge.step()
        if i % 2:
            of_maker.zero_grad()
            (-judge(made).mean()).backward()
            of_maker.step()
"""


def test_a_step_of_the_optimizer_that_is_stepped_more_often(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(CRITIC))
    found = firstnan(["run", "train.py"], cwd=tmp_path).found
    assert found["cause"]["slug"] == "sqrt_grad_at_zero"
    assert "handed out again" in found["replay"]
    assert (found["step"], found["batch"]["index"]) == (5, 5)
    assert (found["batch"]["bad_samples"], found["batch"]["dataset_indices"]) == ([5], [45])


POPPED = """
    import torch
    from torch.utils.data import DataLoader

    rows = [{"counts": [float(i), i + 1.0], "time": float(i != 37)} for i in range(40)]
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def collated(rows):
        return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}

    def step(waiting):
        batch = waiting.pop()
        loss = net(batch["counts"] / batch["time"][:, None]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    batches = iter(DataLoader(rows, 10, collate_fn=collated))
    step([next(batches)])
    step([next(batches)])
    step([next(batches)])
    step([next(batches)])
"""


def test_a_list_that_a_function_of_the_program_collates(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(POPPED))
    found = firstnan(["run", "--replay", "auto", "train.py"], cwd=tmp_path).found
    assert "called again" in found["replay"]
    assert (found["batch"]["index"], found["batch"]["bad_samples"]) == (3, [7])
    assert found["batch"]["dataset_indices"] == [37]


LEFT = """
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def train(rows):
        for x, time in DataLoader(rows, 8, shuffle=True):
            share = x / (x + time)
            loss = (net(x) * torch.bernoulli(share)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train([(torch.full((1,), float(i != 37)), torch.full((1,), float(i != 37))) for i in range(40)])
"""


def test_a_list_whose_loop_was_left_by_an_exception(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LEFT))
    found = firstnan(["run", "train.py"], cwd=tmp_path).found
    assert found["noticed"]["what"] == "exception"
    assert found["batch"]["dataset_indices"] == [37]
