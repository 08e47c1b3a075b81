"""Logs steps and events to a `SummaryWriter` of TensorBoard or tensorboardX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from firstnan.integrations.loggers import numbers
from firstnan.records import NaNEvent, StepRecord

_MODULES = ("torch.utils.tensorboard", "tensorboardX")


class TensorBoard:
    """Scalars `firstnan/loss`, `firstnan/grad_norm`, ..., and events as text."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    @staticmethod
    def takes(target: Any) -> bool:
        kinds = [getattr(sys.modules[name], "SummaryWriter", None) for name in _MODULES if name in sys.modules]
        return any(kind is not None and isinstance(target, kind) for kind in kinds)

    def steps(self, rows: Sequence[tuple[str, StepRecord]]) -> None:
        for name, record in rows:
            for key, value in numbers(name, record).items():
                self._writer.add_scalar(key, value, record.step)

    def event(self, event: NaNEvent) -> None:
        self._writer.add_text(f"firstnan/{event.kind}", event.message, event.step)
        self._writer.flush()
