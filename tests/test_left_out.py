"""A program that tests its gradients and leaves out bad updates by itself is not failing; one that ends is."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from zygote import Result, Zygote

pytest_plugins = ["zygote"]

PROGRAM = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = torch.rand(48, 4) + 0.1
    data[21] = data[33] = -1.0
    log = open("log.csv", "w")

    def train():
        for (x,) in DataLoader(TensorDataset(data), 4):
            optimizer.zero_grad()
            loss = (net(torch.log(x)) - 1).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            print(norm.item(), file=log)
            {test}
            optimizer.step()

    for epoch in range(2):
        train()
"""


def run(firstnan: Zygote, folder: Path, test: str, program: str = PROGRAM) -> Result:
    (folder / "train.py").write_text(textwrap.dedent(program).format(test=test))
    return firstnan(["run", "--verify", "0", "train.py"], cwd=folder)


@pytest.mark.parametrize(
    "test",
    [
        "if not torch.isfinite(norm): continue",
        "if any(p.grad.isnan().any() for p in net.parameters()): continue",
        "if norm != norm: optimizer.zero_grad(); print('skipped'); continue",
    ],
)
def test_updates_that_the_program_leaves_out_are_events(firstnan: Zygote, tmp_path: Path, test: str) -> None:
    result = run(firstnan, tmp_path, test)
    report = result.report or {}
    assert (result.code, report["verdict"]) == (0, "clean")
    assert [(event["kind"], event["step"]) for event in report["events"]] == [
        ("skipped", step) for step in (5, 7, 15, 17)
    ]
    assert "firstnan:" not in result.stderr
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 24


@pytest.mark.parametrize(
    "test",
    [
        "if not torch.isfinite(norm): return",  # the rest of the epoch is lost
        "if not torch.isfinite(norm): raise RuntimeError('bad gradient')",
        "if not torch.isfinite(norm): raise SystemExit(1)",
        "if not torch.isfinite(norm): log.write('bad')",  # and the update is made
    ],
)
def test_a_program_that_ends_or_makes_the_update_fails(firstnan: Zygote, tmp_path: Path, test: str) -> None:
    result = run(firstnan, tmp_path, test)
    assert (result.code, result.origin["op"], result.found["step"]) == (3, "log", 5)
    assert result.found["batch"]["bad_samples"] == [1]
    assert "running the program again" not in result.stderr


def test_a_bad_loss_with_finite_gradients_is_a_failure(firstnan: Zygote, tmp_path: Path) -> None:
    """Nobody could tell its update from one that was left out."""
    program = PROGRAM.replace(
        "(net(torch.log(x)) - 1).square().mean()", "(net(x) - 1).square().mean() + torch.log(x).detach().mean()"
    )
    result = run(firstnan, tmp_path, "if not torch.isfinite(norm): continue", program)
    assert (result.code, result.origin["op"], result.found["step"]) == (3, "log", 5)


def test_accumulated_gradients_with_a_bad_part_are_used(firstnan: Zygote, tmp_path: Path) -> None:
    program = PROGRAM.replace("optimizer.zero_grad()", "i = i + 1 if 'i' in dir() else 0")
    test = "if i % 2 == 0: continue\n        torch.isfinite(norm) or print('bad')"
    result = run(firstnan, tmp_path, test, program)
    assert (result.code, result.origin["op"]) == (3, "log")


def test_a_program_whose_every_loss_is_bad_fails(firstnan: Zygote, tmp_path: Path) -> None:
    program = PROGRAM.replace("data[21] = data[33] = -1.0", "data = data.repeat(3, 1); data[21:] = -1.0")
    result = run(firstnan, tmp_path, "if not torch.isfinite(norm): continue", program)
    assert (result.code, result.found["step"]) == (3, 5)


def test_a_program_that_has_left_out_some_updates_may_fail_later(firstnan: Zygote, tmp_path: Path) -> None:
    program = PROGRAM.replace("data[21] = data[33] = -1.0", "data[[5, 13, 21]] = data[29:] = -1.0")
    result = run(firstnan, tmp_path, "if not torch.isfinite(norm) and x.max() > 0: continue", program)
    assert (result.code, result.found["step"], result.found["batch"]["index"]) == (3, 4, 8)


GIVES_UP = """
    import sys

    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    data = torch.rand(12, 4, 4) + 0.1
    data[5] = -1.0
    data[{bad}] = 0.0
    bad = 0
    for x in data:
        loss = (net(torch.log(x)) - 1).square().mean()
        if not torch.isfinite(loss):
            bad += 1
            {test}
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sys.exit(1)  # not good enough
"""


@pytest.mark.parametrize("end", ["sys.exit(1)", "raise RuntimeError('too many')"])
def test_a_program_that_gives_up_after_some_bad_losses_has_failed_at_the_first(
    firstnan: Zygote, tmp_path: Path, end: str
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(GIVES_UP).format(bad="[7, 8]", test=f"if bad > 2: {end}"))
    result = firstnan(["run", "--verify", "5", "train.py"], cwd=tmp_path)
    assert (result.code, result.found["step"], result.found["cause"]["slug"]) == (3, 5, "log_of_negative")
    assert any("the first in step 5, and gave up in step 6" in note for note in result.found["notes"])
    assert result.found["remedies"][0]["failing_step_finite"]


def test_a_program_that_ends_after_its_loop_has_not_given_up(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(GIVES_UP).format(bad="[7, 8]", test="pass"))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert (result.code, (result.report or {})["verdict"]) == (1, "clean")


def test_a_program_that_leaves_out_every_update_fails(firstnan: Zygote, tmp_path: Path) -> None:
    """Its loss is finite, its gradients never are, and it ends as if all were well."""
    program = PROGRAM.replace("data[21] = data[33] = -1.0", "data[::4] = 0.0").replace("range(2)", "range(3)")
    program = program.replace(
        "(net(torch.log(x)) - 1).square().mean()", "(net.weight * x).square().sum(1).sqrt().mean()"
    )
    result = run(firstnan, tmp_path, "if not torch.isfinite(norm): continue", program)
    assert (result.code, result.origin["op"], result.found["step"]) == (3, "sqrt", 0)


def test_gradients_that_are_left_out_until_the_first_update_are_no_failure(firstnan: Zygote, tmp_path: Path) -> None:
    program = PROGRAM.replace("data[21] = data[33] = -1.0", "data[:100:4] = 0.0").replace("(48, 4)", "(160, 4)")
    program = program.replace(
        "(net(torch.log(x)) - 1).square().mean()", "(net.weight * x).square().sum(1).sqrt().mean()"
    )
    result = run(firstnan, tmp_path, "if not torch.isfinite(norm): continue", program)
    assert (result.code, (result.report or {})["verdict"]) == (0, "clean")


def test_a_metric_of_a_loss_that_was_trained_with_is_no_failure(firstnan: Zygote, tmp_path: Path) -> None:
    """Infinite in the last step, and printed after the loop."""
    program = PROGRAM.replace("data[21] = data[33] = -1.0", "data[:] = data + 1.0")
    program = program.replace("log = open", "metrics = []\n    log = open") + "    print(metrics[-1].item())\n"
    result = run(firstnan, tmp_path, "metrics.append(torch.exp(loss + 1e3))", program)
    assert (result.code, (result.report or {})["verdict"]) == (0, "clean")
