"""Accelerate: what `prepare` returns, and its launcher."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import line_of
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NaNDetector, NonFiniteError, load

accelerate = pytest.importorskip("accelerate")
HERE = Path(__file__)


def data() -> DataLoader[Any]:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.rand(64) + 0.5
    y[41] = 0.0
    return DataLoader(TensorDataset(x, y), batch_size=8)


@pytest.mark.parametrize("through", [True, False])
def test_what_prepare_returns_is_watched(through: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    loader = accelerator.prepare(data())
    with pytest.raises(NonFiniteError) as error, NaNDetector(model, optimizer) as detector:
        for x, y in detector.batches(loader) if through else loader:
            loss = ((model(x).squeeze(1) - y) ** 2 / y).mean()  # born
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born"), 5)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples) == (5, (1,))
    assert report.batch.confirmed
    if not through:
        assert report.batch.dataset_indices == (41,)


def test_accumulation_makes_one_step_of_two_batches() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data())
    with pytest.raises(NonFiniteError) as error, NaNDetector(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x).squeeze(1) - y) ** 2 / y).mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    report = error.value.report
    assert report.batch is not None
    assert (report.step, report.batch.index, report.batch.dataset_indices) == (2, 5, (41,))


def test_of_accumulated_batches_the_one_with_the_bad_gradient_is_named() -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    net = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), data())
    with pytest.raises(NonFiniteError) as error, NaNDetector(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = ((model(x).squeeze(1) - y) ** 2 * y).sqrt().mean()  # born: derivative
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    report = error.value.report
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: derivative"), 1)
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (5, (1,), (41,))


PROGRAM = """\
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.rand(64) + 0.5
y[41] = 0.0
net = torch.nn.Linear(4, 1)
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters()), DataLoader(TensorDataset(x, y), batch_size=8)
)
for x, y in loader:
    loss = ((model(x).squeeze(1) - y) ** 2 / y).mean()  # born
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_launcher_starts_firstnan(run: Callable[..., Any], tmp_path: Path) -> None:
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "-m")
    words = ("firstnan", "run", "--verify", "0", "--json", str(tmp_path / "report.json"), "train.py")
    ended = run(PROGRAM, words=(*launch, *words))
    assert ended.code != 0
    assert ended.report.origin.site.line == line_of(PROGRAM, "born")
    assert ended.report.batch.dataset_indices == (41,)


TWO_RANKS = PROGRAM.replace("Accelerator(cpu=True)", "Accelerator()")


@pytest.mark.parametrize("way", ["-m firstnan", "FIRSTNAN"])
def test_the_launcher_starts_two_ranks(run: Callable[..., Any], tmp_path: Path, way: str) -> None:
    # On a machine without a GPU, `--cpu` starts one process, or asks for MPI; `--multi_gpu` starts torchrun's ranks.
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2")
    launch = (*launch, "--main_process_port=0")
    settings = {"ACCELERATE_USE_CPU": "1"}
    if way == "FIRSTNAN":
        settings["FIRSTNAN"] = "report.json"
        words = (*launch, "train.py")
    else:
        words = (*launch, "-m", "firstnan", "run", "--verify", "0", "--json", "report.json", "train.py")
    ended = run(TWO_RANKS, words=words, **settings)
    assert ended.code == (3 if way == "FIRSTNAN" else 1), ended.stderr  # otherwise the launcher's
    found = ended.report
    # Each rank has every second batch: batch 5 of the data is batch 2 of rank 1.
    assert (found.rank, found.world_size, found.step, found.batch.index) == (1, 2, 2, 2)
    assert found.origin.site.line == line_of(PROGRAM, "born")
    assert found.batch.dataset_indices == (41,)
    assert [one.what for one in found.ranks] == ["received", "created"]
    received, created = (load(tmp_path / f"report.rank{rank}.json") for rank in range(2))
    assert (received.cause.slug, received.origin) == ("collective", None)
    assert created.origin == found.origin
    assert ended.stderr.count("firstnan: Inf created in forward, step 2, at train.py:14") == 1
