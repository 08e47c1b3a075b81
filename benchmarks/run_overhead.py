"""Measures what `firstnan run` and the tracer cost, as ratios to the bare program measured side by side.

    python benchmarks/run_overhead.py [--steps N] [--rounds R] [--json FILE] [--only whole|step] [PROGRAM...]

whole: `python program` and `firstnan run program` in two processes, alternating every few steps (a healthy run).
step:  one process, alternating every step: bare, under `detect_anomaly`, under the tracer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from side_by_side import PROGRAMS, STEADY, WARM_UP, Row, compare, load_training, show

BLOCK = 4  # steps before the other process continues
Seconds = dict[str, list[float]]


class Program:
    """A training program in its own process, which makes steps on request."""

    def __init__(self, path: Path, prefix: list[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *prefix, str(path)],
            env={**os.environ, **STEADY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, steps: int) -> float:
        """Seconds for this many steps."""
        if self._process.stdin is None or self._process.stdout is None:
            raise SystemExit("the program has no pipes")
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit("the program ended early")
        return float(answer)

    def end(self) -> None:
        self._process.communicate()


def measure_whole(path: Path, steps: int, rounds: int) -> Seconds:
    """Alternates plain python and `firstnan run` every few steps, so a busy machine slows both down.

    Every round starts two new processes, since the memory layout of a process alone makes a few per cent difference.
    """
    ways = {"bare": [], "firstnan run": ["-m", "firstnan", "run"]}
    seconds: Seconds = {way: [] for way in ways}
    for _ in range(rounds):
        programs = {way: Program(path, prefix) for way, prefix in ways.items()}
        for program in programs.values():
            program.run(WARM_UP)
        for _ in range(-(-steps // BLOCK)):
            for way, program in programs.items():
                seconds[way].append(program.run(BLOCK) / BLOCK)
        for program in programs.values():
            program.end()
    return seconds


def tracing() -> AbstractContextManager[object]:
    """The tracer for one step."""
    from firstnan.tracing.tracer import Tracer

    return Tracer()


def detecting_anomaly() -> AbstractContextManager[object]:
    import torch

    context: AbstractContextManager[object] = torch.autograd.detect_anomaly(check_nan=True)
    return context


def measure_step(name: str, steps: int) -> Seconds:
    """Alternates every step in this process; entering and leaving the context is part of the cost."""
    import warnings

    warnings.filterwarnings("ignore", message="Anomaly Detection")
    step = load_training(name).next_step
    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "bare": nullcontext,
        "detect_anomaly": detecting_anomaly,
        "tracer": tracing,
    }
    seconds: Seconds = {way: [] for way in ways}
    for number in range(steps + WARM_UP):
        for way, context in ways.items():
            start = time.perf_counter()
            with context():
                step()
            if number >= WARM_UP:
                seconds[way].append(time.perf_counter() - start)
    return seconds


def summary(seconds: Seconds) -> dict[str, Row]:
    return {way: compare(values, seconds["bare"]) for way, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=["gpt", "cnn"], help="names in benchmarks/programs")
    parser.add_argument("--steps", type=int, default=30, help="measured steps per run, after the warm-up")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each whole program")
    parser.add_argument("--only", choices=["whole", "step"], help="make only one of the two measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, Row]]] = {}
    for name in options.programs:
        found = results.setdefault(name, {})
        if options.only != "step":
            found["whole"] = summary(measure_whole(PROGRAMS / f"{name}.py", options.steps, options.rounds))
            show(f"{name}: whole program, {options.rounds} rounds of {options.steps} steps", found["whole"])
        if options.only != "whole":
            found["step"] = summary(measure_step(name, options.steps))
            show(f"{name}: step by step in one process, {options.steps} steps each", found["step"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
