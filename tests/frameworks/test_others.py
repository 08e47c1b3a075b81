"""Ignite, skorch and fastai; and programs whose `main` is made by hydra, click, tyro or jsonargparse."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import line_of
from torch.utils.data import DataLoader, TensorDataset

from firstnan import NonFiniteError, Report

HERE = Path(__file__)


def data(zero: int | None = 41) -> TensorDataset:
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.rand(64, 1) + 0.5
    if zero is not None:
        y[zero] = 0.0
    return TensorDataset(x, y)


def relative(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((prediction - y) ** 2 / y).mean()  # born: loss


def check(report: Report | None) -> None:
    assert report is not None
    assert report.origin is not None
    assert report.origin.site is not None
    assert (report.origin.site.line, report.step) == (line_of(HERE, "born: loss"), 5)
    assert report.cause is not None
    assert report.cause.slug == "div_by_zero"
    assert report.batch is not None
    assert (report.batch.index, report.batch.bad_samples, report.batch.dataset_indices) == (5, (1,), (41,))


def test_ignite() -> None:
    engine = pytest.importorskip("ignite.engine")
    from firstnan.integrations.ignite import FirstNaN

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def update(engine: Any, batch: Any) -> float:
        x, y = batch
        optimizer.zero_grad()
        loss = relative(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    for zero in (None, 41):
        trainer = engine.Engine(update)
        handler = FirstNaN(model, optimizer)
        handler.attach(trainer)
        if zero is None:
            trainer.run(DataLoader(data(zero), batch_size=8), max_epochs=2)
            assert handler.report is None
            continue
        with pytest.raises(NonFiniteError) as error:
            trainer.run(DataLoader(data(zero), batch_size=8), max_epochs=2)
        check(error.value.report)


def test_skorch() -> None:
    skorch = pytest.importorskip("skorch")
    from firstnan.integrations.skorch import FirstNaN

    class Relative(torch.nn.Module):
        forward = staticmethod(relative)  # type: ignore[assignment]

    def net(*callbacks: Any) -> Any:
        options: Any = {"max_epochs": 2, "batch_size": 8, "train_split": None, "verbose": 0, "lr": 1e-3}
        return skorch.NeuralNet(torch.nn.Linear, Relative, module__in_features=4, module__out_features=1,
                                callbacks=list(callbacks), **options)  # fmt: skip

    net(FirstNaN()).fit(data(None), None)
    with pytest.raises(NonFiniteError) as error:
        net(FirstNaN()).fit(data(), None)
    check(error.value.report)


@pytest.mark.parametrize("own", [False, True])
def test_fastai(own: bool) -> None:
    """With a loader of torch, and with its own, which chooses the samples itself."""
    learner = pytest.importorskip("fastai.learner")
    pytest.importorskip("fastai.callback.progress")  # brings `no_bar`
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as OwnLoader

    from firstnan.integrations.fastai import FirstNaN

    def learn(zero: int | None) -> Any:
        loader = OwnLoader(data(zero), bs=8) if own else DataLoader(data(zero), batch_size=8)
        return learner.Learner(DataLoaders(loader, loader), torch.nn.Linear(4, 1), loss_func=relative, cbs=[FirstNaN()])

    with learn(None).no_bar() as healthy:
        healthy.fit(1)
    with learn(41).no_bar() as broken, pytest.raises(NonFiniteError) as error:
        broken.fit(1)
    check(error.value.report)


FASTAI = """\
import fastai.callback.progress
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.rand(64, 1) + 0.5
y[41] = 0.0


def relative(prediction, y):
    return ((prediction - y) ** 2 / y).mean()  # born


loader = DataLoader(TensorDataset(x, y), batch_size=8)
learn = Learner(DataLoaders(loader, loader), torch.nn.Linear(4, 1), loss_func=relative)
with learn.no_bar(), learn.no_logging():
    learn.fit(2)
"""


def test_a_fix_is_tried_in_the_loop_of_fastai(run: Callable[..., Any], tmp_path: Path) -> None:
    """Its loop has the number of the batch and the batch in one variable: `for o in enumerate(self.dl)`."""
    pytest.importorskip("fastai.learner")
    words = ("-m", "firstnan", "run", "--json", str(tmp_path / "report.json"), "train.py")
    ended = run(FASTAI, words=(sys.executable, *words))
    assert ended.code == 3, ended.stderr
    report = ended.report
    assert (report.origin.site.line, report.step) == (line_of(FASTAI, "born"), 5)
    assert report.batch.dataset_indices == (41,)
    assert report.remedies[0].proven, report.remedies[0].note


TRAIN = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.rand(64, 1) + 0.5
    y[41] = 0.0
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in DataLoader(TensorDataset(x, y), batch_size=8):
        loss = ((model(x) - y) ** 2 / y).mean()  # born
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

MAINS = {
    "click": """\
import click


@click.command()
@click.option("--lr", default=0.1)
def main(lr):
    assert lr == 0.01
BODY

if __name__ == "__main__":
    main()
""",
    "tyro": """\
import tyro


def main(lr: float = 0.1) -> None:
    assert lr == 0.01
BODY

if __name__ == "__main__":
    tyro.cli(main)
""",
    "jsonargparse": """\
from jsonargparse import CLI


def main(lr: float = 0.1):
    assert lr == 0.01
BODY

if __name__ == "__main__":
    CLI(main, as_positional=False)
""",
    "hydra": """\
import os

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.1", config_path=None)
def main(config: DictConfig) -> None:
    lr = config.lr
    assert "outputs" in os.getcwd()
BODY

if __name__ == "__main__":
    main()
""",
}


@pytest.mark.parametrize("name", MAINS)
def test_programs_with_a_generated_main(name: str, run: Callable[..., Any]) -> None:
    pytest.importorskip(name)
    program = MAINS[name].replace("BODY", TRAIN)
    ended = run(program, "+lr=0.01" if name == "hydra" else "--lr=0.01")
    assert ended.code == 3, ended.stderr
    report = ended.report
    assert (report.origin.site.line, report.step) == (line_of(program, "born"), 5)
    assert (report.batch.bad_samples, report.batch.dataset_indices) == ((1,), (41,))
