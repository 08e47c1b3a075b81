"""Logs steps and events to a run of Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from firstnan.integrations.loggers import numbers
from firstnan.records import NaNEvent, StepRecord


class WandB:
    """Numbers join the row that the program logs next, so its own count of steps stays as it is."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @staticmethod
    def takes(target: Any) -> bool:
        module = sys.modules.get("wandb")
        if module is None:
            return False
        kinds = [getattr(module, "Run", None), getattr(getattr(module, "wandb_run", None), "Run", None)]
        return target is module or any(isinstance(kind, type) and isinstance(target, kind) for kind in kinds)

    def steps(self, rows: Sequence[tuple[str, StepRecord]]) -> None:
        for name, record in rows:
            self._run.log({**numbers(name, record), "firstnan/step": record.step}, commit=False)

    def event(self, event: NaNEvent) -> None:
        self._run.log({f"firstnan/{event.kind}": event.message}, commit=False)
