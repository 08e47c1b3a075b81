"""Logs steps and events to a run of MLflow."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from firstnan.integrations.loggers import numbers
from firstnan.records import NaNEvent, StepRecord

_MOST_METRICS = 1000
"""MLflow takes as many in one request."""


class MLflow:
    """Metrics `firstnan/loss`, ..., in as few requests as possible, and events as tags."""

    def __init__(self, run: Any) -> None:
        module = sys.modules["mlflow"]
        given = module.active_run() or module.start_run() if run is module else run
        self._run, self._client, self._metric = given.info.run_id, module.MlflowClient(), module.entities.Metric

    @staticmethod
    def takes(target: Any) -> bool:
        module = sys.modules.get("mlflow")
        return module is not None and (target is module or isinstance(target, (module.ActiveRun, module.entities.Run)))

    def steps(self, rows: Sequence[tuple[str, StepRecord]]) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._metric(key, value, now, record.step)
            for name, record in rows
            for key, value in numbers(name, record).items()
        ]
        for i in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[i : i + _MOST_METRICS])

    def event(self, event: NaNEvent) -> None:
        self._client.set_tag(self._run, f"firstnan.{event.kind}", event.message[:5000])
