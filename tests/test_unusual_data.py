"""Numbers of a bad sample that may themselves be wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from firstnan.diagnose.unusual_data import with_doubt
from firstnan.records import Batch, Cause, Edit, Feature, History, Origin, Remedy, Report, Site
from firstnan.repair.data import doubtful_samples_left_out
from zygote import Zygote

pytest_plugins = ["zygote"]


def bad_sample(value: float, slug: str = "exp_overflow", *, confirmed: bool = True) -> Report:
    feature = Feature(9, "batch[1]", (0,), value, 1.9, 2.2)
    batch = Batch(6, 10, (9,), confirmed, features=(Feature(9, "batch[0]", (2,), 3.0, 0.0, 1.0), feature))
    return Report("nonfinite", 6, batch, cause=Cause(slug, "A title", "What happened."))


def test_a_number_far_from_all_others_is_called_doubtful() -> None:
    cause = with_doubt(bad_sample(-2025.0)).cause
    assert cause is not None
    assert cause.why == (
        "What happened. Sample 9 has batch[1][0] = -2025, all others have 1.9 … 2.2 there. If that number is wrong "
        "(another unit, a fill value), correct the data: a bound in the code only hides it."
    )


@pytest.mark.parametrize(
    "report",
    [
        bad_sample(8.0),  # unusual, but of the same order
        bad_sample(0.0),
        bad_sample(-100.0),  # a target that is ignored
        bad_sample(math.nan, "nan_input"),
        bad_sample(-2025.0, "nan_label"),
        bad_sample(-2025.0, confirmed=False),
    ],
)
def test_other_numbers_are_not_doubtful(report: Report) -> None:
    assert with_doubt(report) is report


@pytest.mark.parametrize(
    ("head", "index", "lines"),
    [
        ("for x, y in loader:", (0,), ["keep = y[:, 0].abs() < 10", "x, y = x[keep], y[keep]"]),
        ("for i, (x, y) in enumerate(loader):", (), ["keep = y.abs() < 10", "x, y = x[keep], y[keep]"]),
        (
            "for pair in loader:",
            (0, 3),
            ["keep = (pair[1].abs() < 10).flatten(1).all(1)", "pair = [column[keep] for column in pair]"],
        ),
    ],
)
def test_samples_with_such_numbers_are_left_out_before_a_bound(
    tmp_path: Path, head: str, index: tuple[int, ...], lines: list[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"import torch\n{head}\n    loss = step()\n    loss.backward()\n")

    def told(value: float) -> Report:
        batch = Batch(6, 10, (9,), True, features=(Feature(9, "batch[1]", index, value, 0.1, 0.5),))
        origin, history = Origin("forward", "exp", "", site=Site(str(path), 3)), History(backward_at=Site(str(path), 4))
        cause = Cause("exp_overflow", "A title", "What happened.")
        bound = Remedy("A bound", edits=(Edit(str(path), 3, 0, 3, 1, "x", "x.clamp(-9, 9)"),))
        remedies = (Remedy("A better formula"), bound)
        return Report("nonfinite", 6, batch, cause=cause, origin=origin, history=history, remedies=remedies)

    formula, first, second = doubtful_samples_left_out(told(900.0)).remedies
    assert formula.title == "A better formula"
    assert [line[1:].strip() for line in first.diff.splitlines() if line.startswith("+ ")] == lines
    assert (first.kind, second.title) == ("data", "A bound")
    assert "below -10," in doubtful_samples_left_out(told(-900.0)).remedies[1].title
    assert doubtful_samples_left_out(told(9.0)).remedies == (formula, second)  # it may well be a measurement


@pytest.mark.slow
def test_a_report_says_that_a_number_is_doubtful(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
y = torch.rand(24, 1)
y[13] = 2500.0
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for x, target in DataLoader(TensorDataset(torch.rand(24, 1), y), batch_size=8):
    loss = torch.exp((net(x) - target).abs()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert "Sample 5 has batch[1][0] = 2500" in " ".join(result.found["cause"]["why"].split())
    assert "+    keep = target[:, 0].abs() < 10" in result.found["remedies"][0]["diff"]


@pytest.mark.slow
def test_another_sample_with_such_a_number_does_not_make_it_usual(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(48, 4)
x[29, 2], x[30, 2] = 60000.0, -60000.0
net = torch.nn.Linear(4, 1)
torch.nn.init.ones_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), 0.001)
for (batch,) in DataLoader(TensorDataset(x), batch_size=16):
    loss = torch.exp(net(batch)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""")
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert result.found["batch"]["bad_samples"] == [13]
    assert "Sample 13 has batch[0][2] = 60000, most others have" in " ".join(result.found["cause"]["why"].split())
    assert "sample 13: batch[0][2] = 60000, most other samples" in " ".join(result.stderr.split())
