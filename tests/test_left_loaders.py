"""Steps that get their data elsewhere, after others that a loader has given batches to."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from firstnan.engine.handouts import Handouts
from zygote import Zygote

pytest_plugins = ["zygote"]

HEAD = """
    from itertools import cycle

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x = torch.rand(40, 4) + 0.1
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    loader = DataLoader(TensorDataset(x), 8, shuffle=True)
"""
CYCLE = """
    batches = cycle(loader)
    step = 0
    while step < 30:
        (b,) = next(batches)
        sums = b.sum(1)
        if step == FAILS:
            sums[3] = 0.0
        loss = (net(b).sum(1) / sums).square().mean()  # guilty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
"""
STAGES = """
    for (b,) in loader:
        loss = (net(b) - b).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for step in range(5, 30):
        b = x[torch.randint(40, (6,))]
        sums = b.sum(1)
        if step == FAILS:
            sums[3] = 0.0
        loss = (net(b).sum(1) / sums).square().mean()  # guilty
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize("fails", [6, 17])
@pytest.mark.parametrize("loop", [CYCLE, STAGES], ids=["cycle", "stages"])
def test_the_last_batch_of_a_loader_is_not_blamed_for_a_later_step(
    firstnan: Zygote, tmp_path: Path, loop: str, fails: int
) -> None:
    source = textwrap.dedent(HEAD + loop).replace("FAILS", str(fails))
    (tmp_path / "train.py").write_text(source)
    report = firstnan(["run", "--replay", "auto", "train.py"], cwd=tmp_path).report
    assert report is not None
    assert report["step"] == fails
    assert report["origin"]["line"] == source[: source.index("# guilty")].count("\n") + 1
    assert report["batch"]["index"] is None
    assert report["batch"]["dataset_indices"] is None
    assert report["batch"]["bad_samples"] == [3]
    assert report["reproduced"] == "deterministic"


def test_a_loader_is_not_left_while_each_batch_is_used_as_often_as_before() -> None:
    handouts, updates = Handouts(), 0
    for _ in range(3):  # a new loader for each batch, two updates with it
        iterator = iter(DataLoader(torch.zeros(4, 1), batch_size=4))  # type: ignore[arg-type]
        handouts.fetched(iterator, next(iterator), updates)
        for _ in range(2):
            assert not handouts.are_left(updates)
            updates += 1
    assert not handouts.are_left(updates)
    assert handouts.are_left(updates + 1)


def test_one_batch_may_be_meant_for_all_steps() -> None:
    handouts = Handouts()
    iterator = iter(DataLoader(torch.zeros(4, 1), batch_size=4))  # type: ignore[arg-type]
    handouts.fetched(iterator, next(iterator), 0)
    assert not handouts.are_left(100)
