"""Measures what watching a training costs inside one process, as ratios to the bare loop beside it.

    python benchmarks/overhead.py [--rounds N] [--only NAME...] [--ways WAY...] [--json FILE] [--markdown]

Every model has a process of its own, and in it two trainings that are the same. In a turn one of them is watched and
the other one is bare, and they make their steps alternately, so that what else happens on the machine meets both. From
round to round they change places, and the ways of watching take their turns in a new order.
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

from side_by_side import STEADY, Row, compare, load_training, show

if TYPE_CHECKING:
    from training import Training

Step = Callable[[], None]
Watch = Callable[[], AbstractContextManager[Step]]
"""Entered at the start of a turn; what it gives makes one watched step. Entering and leaving are not timed."""


@dataclass(frozen=True)
class Model:
    title: str
    rounds: int
    turn: int = 8
    """Steps of a turn, of each of the two: a multiple of eight, since some things are looked at in every eighth."""
    row: int = 1
    """So many are made in a row, where a single one is too short for the clock and the caches."""
    first: int = 1
    """Steps of a turn that are not timed: those that set up, and learn, what is set up once in a run."""


MODELS = {
    "gpt30m": Model("GPT 30 M", 10),
    "gpt": Model("GPT 4 M", 16, turn=32, first=16),
    "gpt_512": Model("GPT 4 M, 512 tokens", 16, turn=32, first=16),
    "gpt_clipped": Model("GPT 4 M, clipped", 16, turn=32, first=16),
    "cnn": Model("CNN", 12, turn=64, first=70),
    "mlp": Model("tiny MLP", 48, turn=256, row=8, first=70),
    "digits": Model("MLP of 10 k", 48, turn=320, row=16, first=70),
}
# The first steps of every training; a detector looks more closely at the first ones of a run.
_BEGINNING = 20


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


def isnan_mode(training: Training) -> Watch:
    """The same question for every operator, forward, backward and in the update: the dispatch mode of the forums."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                readable = isinstance(t, torch.Tensor) and t.is_floating_point() and "empty" not in func.__name__
                if readable and (torch.isnan(t).any() or torch.isinf(t).any()):
                    raise ArithmeticError(f"non-finite result of {func}")
            return out

    return around(training, Look)


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
    every: int = 1
    """Takes part in every so manieth round: what costs ten per cent and more is known soon."""
    learns: bool = False
    """Its first steps are not like the others."""


WAYS = {
    "bare": Way("bare loop", bare),  # measured beside itself: how far from 1 it is says what the numbers are worth
    "gate": Way("`NaNDetector`: gate", detector(), learns=True),
    "layers": Way("`NaNDetector`: gate + layer watch", detector(layers=True), learns=True),
    "stats": Way("`NaNDetector`: gate + layer watch + stats", detector(layers=True, stats=64), 4, learns=True),
    "trace": Way("`firstnan.trace()`", trace, every=4),
    "detect_anomaly": Way("`torch.autograd.detect_anomaly`", detect_anomaly, every=4),
    "isnan_hooks": Way("forward hooks, `isnan().any()` and `isinf().any()`", isnan_hooks, every=4),
    "isnan_mode": Way("dispatch mode, `isnan().any()` and `isinf().any()`", isnan_mode, every=4),
    "transformers": Way("Transformers' `DebugUnderflowOverflow`", transformers, every=4),
}


@dataclass(frozen=True)
class Result:
    """What was measured on one model: a row for each way."""

    title: str
    parameters: int
    rounds: int
    rows: dict[str, Row]
    skipped: dict[str, str]
    """Way -> why it was not measured."""
    versions: dict[str, str]


def measure(name: str, ways: list[str], rounds: int | None) -> Result:
    """Two trainings under all ways in turn, in this process."""
    model, trainings = MODELS[name], [load_training(name) for _ in range(2)]
    rounds = rounds or model.rounds
    watches: dict[str, list[Watch]] = {}
    skipped: dict[str, str] = {}
    for way in dict.fromkeys(["bare", *ways]):
        try:
            watches[way] = [WAYS[way].make(training) for training in trainings]
        except ImportError as missing:
            skipped[way] = str(missing)
    for way in ("bare", *(way for way in watches if WAYS[way].learns)):
        for watch in watches[way]:
            with watch() as step:
                timed(step, _BEGINNING)
    seconds: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in watches}
    shuffle = random.Random(0)
    for number in range(rounds):
        for way in shuffle.sample(list(watches), len(watches)):
            if number % WAYS[way].every == 0:
                watched = number // WAYS[way].every % 2
                time_turn(watches[way][watched], trainings[1 - watched], model, *seconds[way])
    return Result(
        model.title,
        parameters=sum(p.numel() for p in trainings[0].model.parameters()),
        rounds=rounds,
        rows={way: compare(*pair) for way, pair in seconds.items()},
        skipped=skipped,
        versions=versions(),
    )


def time_turn(watch: Watch, other: Training, model: Model, own: list[float], neighbour: list[float]) -> None:
    """Adds the seconds of every row of steps, watched and bare."""
    bare_step = untouched(other)
    with watch() as step:
        gc.collect()  # what one way leaves behind is not for another one to clear away
        for _ in range(model.first):
            step()
        timed(bare_step, model.row)  # with which the first row begins
        for number in range(model.turn // model.row):
            both = [(step, own), (bare_step, neighbour)]
            for one, times in both if number % 2 else reversed(both):
                times.append(timed(one, model.row))


def timed(step: Step, times: int) -> float:
    """Seconds of the processor a step: what the machine gives to others is not counted, and nothing here waits."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


def untouched(training: Training) -> Step:
    """A step with torch's own backward, while a detector beside it has put its own around that."""
    import torch

    own = torch.autograd.backward

    def step() -> None:
        there, torch.autograd.backward = torch.autograd.backward, own
        try:
            training.next_step()
        finally:
            torch.autograd.backward = there

    return step


def stay_on_one_processor() -> None:
    """What moves from one to another, whose neighbours are busy with other things, halts and hurries."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


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
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of every way (default: by model)")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--markdown", action="store_true", help="end with the table of the README on standard output")
    options = parser.parse_args()
    os.environ.update(STEADY)  # read by the C library of the processes that start now
    stay_on_one_processor()
    results: dict[str, Result] = {}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for name in options.only:
            result = results[name] = processes.submit(measure, name, options.ways, options.rounds).result()
            title = f"{result.title}: {result.parameters:,} parameters, {result.rounds} rounds"
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
