"""Measures what watching a training costs inside one process, as ratios to the bare loop beside it.

    python benchmarks/overhead.py [--steps N] [--only NAME...] [--ways WAY...] [--json FILE] [--markdown]

Every model has a process of its own, in which one training goes on from turn to turn. A turn is a few steps of the bare
loop and a few steps of one way of watching, in alternating order; the ways take their turns in a new order every round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from side_by_side import STEADY, WARM_UP, Row, compare, load_training, show

if TYPE_CHECKING:
    from training import Training

Step = Callable[[], None]
Watch = Callable[[], AbstractContextManager[Step]]
"""Entered at the start of a turn; what it gives makes one watched step. Entering and leaving are not timed."""


@dataclass(frozen=True)
class Model:
    title: str
    block: int
    """Steps of one turn: enough for the timer. Eight where there are buffers, which are read every eighth step."""
    steps: int
    """Measured steps of every way."""
    first: int = 1
    """Steps of a turn that are not timed: those that set up, and learn, what is set up once in a run."""


MODELS = {
    "mlp": Model("tiny MLP", 40, 600, first=70),
    "digits": Model("MLP of 10 k", 160, 2400, first=70),
    "cnn": Model("CNN", 8, 192),
    "gpt": Model("GPT 4 M", 4, 96),
    "gpt30m": Model("GPT 30 M", 2, 28),
}


def bare(training: Training) -> Watch:
    return lambda: nullcontext(training.next_step)


def detector(**options: Any) -> Callable[[Training], Watch]:
    """A `NaNDetector` that lives as long as the training, attached in its own turns only."""

    def make(training: Training) -> Watch:
        from firstnan import NaNDetector

        watching = NaNDetector(training.model, training.optimizer, **options)

        @contextmanager
        def turn() -> Iterator[Step]:
            with watching:
                batches = iter(watching.batches(training.batches))
                yield lambda: training.step(next(batches))

        return turn

    return make


def trace(training: Training) -> Watch:
    from firstnan import trace

    return around(training, trace)


def detect_anomaly(training: Training) -> Watch:
    import torch

    warnings.filterwarnings("ignore", message="Anomaly Detection")
    return around(training, torch.autograd.detect_anomaly)


def around(training: Training, context: Callable[[], AbstractContextManager[object]]) -> Watch:
    """What is used around a step is entered and left within the timed part."""

    def step() -> None:
        with context():
            training.next_step()

    @contextmanager
    def turn() -> Iterator[Step]:
        yield step

    return turn


def isnan_hooks(training: Training) -> Watch:
    """The forward hook that everybody writes, on every layer without children."""
    import torch

    def look(module: Any, inputs: Any, output: Any) -> None:
        if torch.isnan(output).any() or torch.isinf(output).any():
            raise ArithmeticError(f"non-finite output of {module}")

    @contextmanager
    def turn() -> Iterator[Step]:
        layers = [module for module in training.model.modules() if not any(module.children())]
        handles = [module.register_forward_hook(look) for module in layers]
        try:
            yield training.next_step
        finally:
            for handle in handles:
                handle.remove()

    return turn


def transformers(training: Training) -> Watch:
    from transformers.debug_utils import DebugUnderflowOverflow

    @contextmanager
    def turn() -> Iterator[Step]:
        before = {module: set(module._forward_hooks) for module in training.model.modules()}
        DebugUnderflowOverflow(training.model)
        try:
            yield training.next_step
        finally:  # it keeps no handles
            for module, known in before.items():
                for key in set(module._forward_hooks) - known:
                    del module._forward_hooks[key]

    return turn


@dataclass(frozen=True)
class Way:
    title: str
    make: Callable[[Training], Watch]


WAYS = {
    "bare": Way("bare loop", bare),  # measured beside itself: how far from 1 it is says what the numbers are worth
    "gate": Way("`NaNDetector`: gate", detector()),
    "layers": Way("`NaNDetector`: gate + layer watch", detector(layers=True)),
    "stats": Way("`NaNDetector`: gate + layer watch + stats", detector(layers=True, stats=64)),
    "trace": Way("`firstnan.trace()`", trace),
    "detect_anomaly": Way("`torch.autograd.detect_anomaly`", detect_anomaly),
    "isnan_hooks": Way("forward hooks, `isnan().any()` and `isinf().any()`", isnan_hooks),
    "transformers": Way("Transformers' `DebugUnderflowOverflow`", transformers),
}


@dataclass(frozen=True)
class Result:
    """What was measured on one model: a row for each way."""

    title: str
    parameters: int
    steps: int
    rows: dict[str, Row]
    skipped: dict[str, str]
    """Way -> why it was not measured."""
    versions: dict[str, str]


def measure(name: str, ways: list[str], steps: int | None) -> Result:
    """One training under all ways in turn, in this process."""
    model, training = MODELS[name], load_training(name)
    block = min(model.block, steps or model.steps)
    rounds = (steps or model.steps) // block
    watches: dict[str, Watch] = {}
    skipped: dict[str, str] = {}
    for way in dict.fromkeys(["bare", *ways]):
        try:
            watches[way] = WAYS[way].make(training)
        except ImportError as missing:
            skipped[way] = str(missing)
    for _ in range(WARM_UP):
        training.next_step()
    seconds: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in watches}
    shuffle = random.Random(0)
    for number in range(rounds):
        for way in shuffle.sample(list(watches), len(watches)):
            own, neighbour = seconds[way]
            pair = [(watches[way], own), (watches["bare"], neighbour)]
            for watch, times in pair if number % 2 else reversed(pair):
                times.append(time_turn(watch, block, model.first))
    return Result(
        model.title,
        parameters=sum(p.numel() for p in training.model.parameters()),
        steps=rounds * block,
        rows={way: compare(*pair) for way, pair in seconds.items()},
        skipped=skipped,
        versions=versions(),
    )


def time_turn(watch: Watch, steps: int, first: int) -> float:
    """Seconds a step, the first ones of the turn left out."""
    with watch() as step:
        for _ in range(first):
            step()
        gc.collect()  # what one way leaves behind is not for another one to clear away
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps


def versions() -> dict[str, str]:
    """Of what was measured, as far as it is loaded."""
    names = ("torch", "firstnan", "transformers")
    return {name: str(sys.modules[name].__version__) for name in names if name in sys.modules}


def markdown(results: list[Result]) -> str:
    """The table of the README: milliseconds for the bare loop, ratios to it for the ways."""
    table = [["time of a step", *(result.title for result in results)], ["---", *("---:" for _ in results)]]
    for way, kind in WAYS.items():
        if any(way in result.rows for result in results):
            table.append([kind.title, *(cell(way, result.rows.get(way)) for result in results)])
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def cell(way: str, row: Row | None) -> str:
    if row is None:
        return "–"
    if way == "bare":
        return f"{row['milliseconds']:.{2 if row['milliseconds'] < 10 else 0}f} ms"
    return f"{row['ratio']:.3f}" if row["ratio"] < 1.1 else f"{row['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps of every way (default: by model)")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--markdown", action="store_true", help="end with the table of the README on standard output")
    options = parser.parse_args()
    os.environ.update(STEADY)  # read by the C library of the processes that start now
    results: dict[str, Result] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in options.only:
            result = results[name] = processes.submit(measure, name, options.ways, options.steps).result()
            title = f"{result.title}: {result.parameters:,} parameters, {result.steps} steps each"
            show(title, result.rows, sys.stderr if options.markdown else sys.stdout)
            for way, why in result.skipped.items():
                print(f"  {way:<16} skipped: {why}", file=sys.stderr)
            if options.json:
                found = {done: asdict(rows) for done, rows in results.items()}
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        print(markdown(list(results.values())))


if __name__ == "__main__":
    main()
