"""Shared by both benchmarks: loading a program, a steady process, and ratios to the bare program measured with it."""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))  # as when one of them is run as a script

if TYPE_CHECKING:
    from training import Training  # imports torch, which a process that only starts others does not need

WARM_UP = 5
# Otherwise glibc may return memory to the system and take it back in every step, at random, which costs up to 10 %.
STEADY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}
Row = dict[str, float]


def load_training(name: str) -> Training:
    """The training of `programs/NAME.py`, at its first step."""
    training: Training = importlib.import_module(name).make_training()
    return training


def compare(values: Sequence[float], bare: Sequence[float]) -> Row:
    """Compares timings with the bare timings measured next to them: the median time, the ratio, and its spread.

    The ratio is the geometric mean without the largest and smallest tenth, which a busy machine distorts. A median
    would miss work that is done in every eighth step only.
    """
    ratios = sorted(own / other for own, other in zip(values, bare, strict=True))
    cut = max(len(ratios) // 10, 1) if len(ratios) > 2 else 0
    low, high = (ratios[0], ratios[-1]) if len(ratios) < 4 else statistics.quantiles(ratios, n=4)[::2]
    return {
        "milliseconds": 1000 * statistics.median(values),
        "ratio": statistics.geometric_mean(ratios[cut : len(ratios) - cut]),
        "ratio_low": low,
        "ratio_high": high,
    }


def show(title: str, rows: dict[str, Row], file: TextIO | None = None) -> None:
    out = file or sys.stdout
    print(f"\n{title}\n  {'way':<16}{'ms/step':>10}{'ratio':>8}   middle half of the ratios", file=out)
    for way, row in rows.items():
        numbers = f"{row['milliseconds']:>10.2f}{row['ratio']:>8.3f}"
        print(f"  {way:<16}{numbers}   {row['ratio_low']:.3f} .. {row['ratio_high']:.3f}", file=out, flush=True)
