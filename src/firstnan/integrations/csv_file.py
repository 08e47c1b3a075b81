"""Logs steps and events to a CSV file: one row a step, and one an event."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Sequence
from typing import Any

from firstnan.records import NaNEvent, StepRecord

COLUMNS = ("step", "optimizer", "loss", "grad_norm", "lr", "param_norm", "update_ratio", "scale", "event")


class CsvFile:
    """A file that is overwritten at the start, then appended to; what is not known stays empty."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(path)  # the program may change its working directory
        with open(self._path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow(COLUMNS)

    @staticmethod
    def takes(target: Any) -> bool:
        return isinstance(target, str | os.PathLike)

    def steps(self, rows: Sequence[tuple[str, StepRecord]]) -> None:
        self._append(
            (r.step, name, r.loss, r.grad_norm, r.lr, r.param_norm, r.update_ratio, r.scale, "") for name, r in rows
        )

    def event(self, event: NaNEvent) -> None:
        self._append([(event.step, "", None, event.grad_norm, None, None, None, None, event.message)])

    def _append(self, rows: Iterable[Sequence[Any]]) -> None:
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
