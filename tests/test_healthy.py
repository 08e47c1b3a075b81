"""A healthy program learns the same numbers, prints the same text and ends in the same way as without firstnan."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from firstnan.engine import program_watch
from firstnan.observe.sites import Ownership
from firstnan.records import Report
from zygote import Zygote

pytest_plugins = ["zygote"]

PROGRAM = Path(__file__).parent / "programs" / "healthy.py"


@pytest.mark.parametrize("name", ["cnn", "augment", "transformer", "gan", "lbfgs", "scaler", "compiled"])
def test_nothing_is_changed(firstnan: Zygote, tmp_path: Path, name: str) -> None:
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    alone.mkdir()
    watched.mkdir()
    plain = firstnan.python([PROGRAM, name, "5"], cwd=alone)
    result = firstnan(["run", PROGRAM, name, "5"], cwd=watched)
    assert plain.code == 5, plain.stderr
    assert (result.code, result.stdout, result.stderr) == (plain.code, plain.stdout, plain.stderr)
    assert result.report is not None
    assert result.report["verdict"] == "clean"
    assert_identical(alone / "learned.pt", watched / "learned.pt")


def test_tracing_changes_nothing_either(firstnan: Zygote, tmp_path: Path) -> None:
    alone, watched = tmp_path / "alone", tmp_path / "watched"
    alone.mkdir()
    watched.mkdir()
    plain = firstnan.python([PROGRAM, "augment", "0"], cwd=alone)
    result = firstnan(["run", "--trace", PROGRAM, "augment", "0"], cwd=watched)
    assert (result.code, result.stdout, result.stderr) == (0, plain.stdout, "")
    assert_identical(alone / "learned.pt", watched / "learned.pt")


def assert_identical(one: Path, other: Path) -> None:
    a, b = torch.load(one), torch.load(other)
    assert list(a) == list(b)
    assert a
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# --- torch afterwards ---------------------------------------------------------------------------------------------


def touchable() -> dict[str, Any]:
    """Every attribute of the classes and modules that are patched, by the names of both."""
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    owners: list[Any] = [
        torch.autograd, torch.Tensor, torch.optim.Optimizer, torch.amp.GradScaler, _BaseDataLoaderIter, torch.nn.Module,
        torch.utils.data.DataLoader,
    ]  # fmt: skip
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in list(vars(owner).items())}


def global_hooks() -> list[int]:
    """How many functions hang in each table of hooks that torch calls for every module and optimizer."""
    modules, optimizers = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    tables = [
        table for owner in (modules, optimizers) for name, table in sorted(vars(owner).items()) if "_global_" in name
    ]
    return [len(table) for table in tables if isinstance(table, dict)]


def test_hooks_leave_torch_as_it_was(tmp_path: Path) -> None:
    before, hooks_before = touchable(), global_hooks()
    watch = program_watch.watch(
        Ownership((str(tmp_path),)),
        never,
        lambda report, session: None,
        tracing=False,
        trace_from=None,
        outputs_decide=False,
        may_replay=True,
        wanted=None,
    )
    try:
        changed = {name for name, value in touchable().items() if before.get(name) is not value}
        assert {"torch.autograd.backward", "_BaseDataLoaderIter.__next__", "Tensor.item"} <= changed
        assert global_hooks() != hooks_before
        assert train_a_little() == 3
    finally:
        watch.end()
    after = touchable()
    assert list(after) == list(before)
    assert [name for name, value in after.items() if before[name] is not value] == []
    assert global_hooks() == hooks_before
    assert os.environ.get("FIRSTNAN_CHILD") is None


def train_a_little() -> int:
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(6, 4)), batch_size=2)
    for (x,) in batches:
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
    return len(batches)


def never(report: Report) -> None:
    raise AssertionError(f"a healthy training gave a report: {report}")
