"""Numbers of a bad sample that may themselves be wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from firstnan.diagnose.unusual_data import with_doubt
from firstnan.records import Batch, Cause, Feature, Report
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
        bad_sample(math.nan, "nan_input"),
        bad_sample(-2025.0, "nan_label"),
        bad_sample(-2025.0, confirmed=False),
    ],
)
def test_other_numbers_are_not_doubtful(report: Report) -> None:
    assert with_doubt(report) is report


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
