"""The numbers of each step and the events, read back from what TensorBoard, W&B and MLflow have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firstnan import NaNDetector

STEPS = 70


def train(log_to: Any, each: Any = lambda step, loss: None) -> list[float]:
    """Trains a little, then diverges; returns the losses."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, losses = torch.randn(64, 4), []
    with NaNDetector(model, optimizer, on_nonfinite="warn", log_to=log_to) as detector:
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 if step < 10 else 2.0
            loss = (model(x) - x[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            each(step, losses[-1])
            if any(event.kind == "forecast" for event in detector.events):
                break
    return losses


def test_tensorboard_files_hold_every_step_and_the_warnings(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        losses = train(writer)
    read = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    scalars = read.Scalars("firstnan/loss")
    assert [s.step for s in scalars] == list(range(len(losses)))
    assert [s.value for s in scalars] == pytest.approx(losses)
    assert {"firstnan/grad_norm", "firstnan/lr", "firstnan/param_norm", "firstnan/update_ratio"} <= set(
        read.Tags()["scalars"]
    )
    texts = [tag for tag in read.Tags()["tensors"] if tag.startswith("firstnan/")]
    assert any("forecast" in tag for tag in texts)
    (forecast, *_) = read.Tensors(next(tag for tag in texts if "forecast" in tag))
    assert b"likely to diverge" in forecast.tensor_proto.string_val[0]


def test_wandb_rows_of_the_program_get_the_numbers_and_keep_their_count(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    losses = train(run, lambda step, loss: run.log({"own": loss}, step=step))
    assert run.step == len(losses) - 1  # the program's own count: its last row was logged with its last step
    run.finish()


def test_mlflow_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file://{tmp_path}")
    mlflow.set_experiment("test")
    with mlflow.start_run() as run:
        losses = train(run)
    kept = mlflow.MlflowClient().get_metric_history(run.info.run_id, "firstnan/loss")
    assert sorted((m.step, m.value) for m in kept) == [(i, pytest.approx(v)) for i, v in enumerate(losses)]
    assert "likely to diverge" in mlflow.MlflowClient().get_run(run.info.run_id).data.tags["firstnan.forecast"]
