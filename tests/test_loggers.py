"""Where the numbers of each step are logged to: files and objects that are understood, and those that fail."""

from __future__ import annotations

import csv
import logging
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firstnan import NaNDetector
from firstnan.engine.step_log import StepLog
from firstnan.integrations.csv_file import CsvFile
from firstnan.records import History, Report, StepRecord


def train(steps: int, models: dict[str, nn.Module], **options: Any) -> NaNDetector:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models.values()]
    with NaNDetector(models, optimizers, **options) as detector:
        for _ in range(steps):
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                loss = model(torch.ones(2, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return detector


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_csv_file_has_a_row_for_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(150, {"": nn.Linear(3, 1)}, log_to="steps.csv")
    found = rows(tmp_path / "steps.csv")
    assert [int(r["step"]) for r in found] == list(range(150))
    assert all(float(r["loss"]) >= 0 and r["lr"] == "0.1" for r in found)
    assert [r["step"] for r in found if r["update_ratio"]][:4] == ["1", "2", "4", "8"]


def test_several_optimizers_are_told_apart(tmp_path: Path) -> None:
    train(3, {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}, log_to=tmp_path / "steps.csv")
    found = rows(tmp_path / "steps.csv")
    names = {r["optimizer"] for r in found}
    assert names == {"optimizer", "optimizer 2"}
    assert [int(r["step"]) for r in found if r["optimizer"] == min(names)] == [0, 1, 2]


@pytest.mark.parametrize(("latest", "numbers"), [(3, ["nan", ""]), (4, [""])])
def test_the_step_that_ends_a_program_has_a_row(tmp_path: Path, latest: int, numbers: list[str]) -> None:
    """Of its own numbers, unless they were written after the update, and of what has happened."""
    log = StepLog(CsvFile(tmp_path / "steps.csv"))
    log._latest = latest
    log.failed(Report("nonfinite", 4, history=History((StepRecord(3, 1.0), StepRecord(4, nan)))))
    found = rows(tmp_path / "steps.csv")
    assert [(r["step"], r["loss"]) for r in found] == [("4", number) for number in numbers]
    assert found[-1]["event"] == "a non-finite value, step 4; its origin is unknown"


def test_what_cannot_be_logged_to_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="log_to must be the path of a CSV file, a SummaryWriter, or a run of wandb or"):
        NaNDetector(nn.Linear(1, 1), log_to=object())


def test_a_log_that_fails_ends_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    detector = None
    with caplog.at_level(logging.WARNING, "firstnan"):
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        detector = NaNDetector(model, optimizer, log_to=folder / "steps.csv")
        (folder / "steps.csv").unlink()
        folder.rmdir()
        with detector:
            for _ in range(200):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).square().mean().backward()
                optimizer.step()
    told = [r.message for r in caplog.records if "stopped logging" in r.message]
    assert len(told) == 1
    assert detector.summary()["steps"] == 200


def test_no_logger_is_imported() -> None:
    before = set(sys.modules)
    with pytest.raises(TypeError):
        NaNDetector(nn.Linear(1, 1), log_to=3)
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"wandb", "mlflow", "tensorboard"}
