"""Which logger a program uses, by the object it gives: a path, a SummaryWriter, a run of W&B or MLflow."""

from __future__ import annotations

import math
from typing import Any

from firstnan.engine.step_log import NumberSink
from firstnan.records import StepRecord
from firstnan.records.arguments import short


def numbers(optimizer: str, record: StepRecord) -> dict[str, float]:
    """What is known and finite of a step, by the names that loggers show."""
    prefix = f"firstnan/{optimizer}/" if optimizer else "firstnan/"
    names = ("loss", "grad_norm", "lr", "param_norm", "update_ratio", "scale")
    found = {prefix + name: getattr(record, name) for name in names}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def sink_for(target: Any) -> NumberSink:
    """The sink that writes to this target."""
    from firstnan.integrations.csv_file import CsvFile
    from firstnan.integrations.mlflow import MLflow
    from firstnan.integrations.tensorboard import TensorBoard
    from firstnan.integrations.wandb import WandB

    for kind in (CsvFile, TensorBoard, WandB, MLflow):
        if kind.takes(target):
            try:
                return kind(target)
            except OSError as error:
                why = f"log_to must be a file that can be written, got {short(target)} ({error.strerror})"
                raise ValueError(why) from None
    raise TypeError(
        f"log_to must be the path of a CSV file, a SummaryWriter, or a run of wandb or mlflow, got {short(target)}"
    )
