"""Measures what watching a training loop costs inside one process, as ratios to the bare loop measured with it.

    python benchmarks/overhead.py [--rounds N] [--only NAME...] [--ways WAY...] [--json FILE] [--markdown]

Every model has its own process with two identical trainings. In a block of steps one of them is watched and the other
is bare; they alternate, so a busy machine slows both down. From round to round the two are swapped, and the ways of
watching run in a new order.

The way `forecast` is the gate in one long run from its second step on, all steps together: history, and the few steps
that are sampled for forecasts, which the other ways leave out as outliers.
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
"""Entered at the start of a block; what it returns makes one watched step. Entering and leaving are not timed."""


@dataclass(frozen=True)
class Model:
    title: str
    rounds: int
    block: int = 8
    """Steps of each training in a block: a multiple of eight, since some checks run in every eighth step."""
    group: int = 1
    """Steps timed together, where a single step is too short for the clock and the caches."""
    untimed: int = 1
    """Steps at the start of a block that are not timed: they do the set-up that happens once in a run."""
    run: int = 1000
    """Steps of a whole run."""


MODELS = {
    "gpt30m": Model("GPT 30 M", 10, run=60),
    "gpt": Model("GPT 4 M", 16, block=32, untimed=16, run=200),
    "gpt_512": Model("GPT 4 M, 512 tokens", 16, block=32, untimed=16, run=100),
    "gpt_clipped": Model("GPT 4 M, clipped", 16, block=32, untimed=16, run=200),
    "cnn": Model("CNN", 12, block=64, untimed=70),
    "mlp": Model("tiny MLP", 48, block=256, group=8, untimed=70),
    "digits": Model("MLP of 10 k", 48, block=320, group=16, untimed=70),
}
# The first steps of every training, not timed: a detector checks more in the first steps of a run.
_BEGINNING = 20


def bare(training: Training) -> Watch:
    return lambda: nullcontext(training.next_step)


def detector(**options: Any) -> Callable[[Training], Watch]:
    """A `NaNDetector` that exists as long as the training, but is attached in its own blocks only."""

    def make(training: Training) -> Watch:
        from firstnan import NaNDetector

        watching = NaNDetector(training.model, training.optimizer, **options)

        @contextmanager
        def block() -> Iterator[Step]:
            with watching:
                batches = iter(watching.batches(training.batches))
                yield lambda: training.step(next(batches))

        return block

    return make


def trace(training: Training) -> Watch:
    from firstnan import trace

    return around(training, trace)


def detect_anomaly(training: Training) -> Watch:
    import torch

    warnings.filterwarnings("ignore", message="Anomaly Detection")
    return around(training, torch.autograd.detect_anomaly)


def around(training: Training, context: Callable[[], AbstractContextManager[object]]) -> Watch:
    """A context that is entered and left around every step, within the timed part."""

    def step() -> None:
        with context():
            training.next_step()

    @contextmanager
    def block() -> Iterator[Step]:
        yield step

    return block


def isnan_hooks(training: Training) -> Watch:
    """The forward hook that everybody writes, on every leaf layer."""
    import torch

    def look(module: Any, inputs: Any, output: Any) -> None:
        if torch.isnan(output).any() or torch.isinf(output).any():
            raise ArithmeticError(f"non-finite output of {module}")

    @contextmanager
    def block() -> Iterator[Step]:
        layers = [module for module in training.model.modules() if not any(module.children())]
        handles = [module.register_forward_hook(look) for module in layers]
        try:
            yield training.next_step
        finally:
            for handle in handles:
                handle.remove()

    return block


def isnan_mode(training: Training) -> Watch:
    """The same check for every operator, forward, backward and in the update: the dispatch mode found in forums."""
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
    def block() -> Iterator[Step]:
        before = {module: set(module._forward_hooks) for module in training.model.modules()}
        DebugUnderflowOverflow(training.model)
        try:
            yield training.next_step
        finally:  # it keeps no handles to remove its hooks with
            for module, known in before.items():
                for key in set(module._forward_hooks) - known:
                    del module._forward_hooks[key]

    return block


@dataclass(frozen=True)
class Way:
    title: str
    make: Callable[[Training], Watch]
    every: int = 1
    """Measured in every n-th round only: an overhead of ten per cent or more needs fewer measurements."""
    learns: bool = False
    """Its first steps are slower than the others."""
    whole: bool = False
    """Measured in a run of its own, all steps together."""


WAYS = {
    "bare": Way("bare loop", bare),  # compared with itself: its distance from 1 shows the noise
    "gate": Way("`NaNDetector`: gate", detector(), learns=True),
    "forecast": Way("`NaNDetector`: gate, all steps of a run, with forecasts", detector(), whole=True),
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
    """The measurements on one model, one row for each way."""

    title: str
    parameters: int
    rounds: int
    rows: dict[str, Row]
    skipped: dict[str, str]
    """Way -> why it was not measured."""
    versions: dict[str, str]


def measure(name: str, ways: list[str], rounds: int | None) -> Result:
    """Measures all ways on two identical trainings in this process."""
    model, trainings = MODELS[name], [load_training(name) for _ in range(2)]
    rounds = rounds or model.rounds
    watches: dict[str, list[Watch]] = {}
    skipped: dict[str, str] = {}
    for way in dict.fromkeys(["bare", *ways]):
        if WAYS[way].whole:
            continue
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
                time_block(watches[way][watched], trainings[1 - watched], model, *seconds[way])
    rows = {way: compare(*pair) for way, pair in seconds.items()}
    rows |= {way: measure_run(name, WAYS[way]) for way in ways if WAYS[way].whole}
    return Result(
        model.title,
        parameters=sum(p.numel() for p in trainings[0].model.parameters()),
        rounds=rounds,
        rows=rows,
        skipped=skipped,
        versions=versions(),
    )


def measure_run(name: str, way: Way) -> Row:
    """The ratio of all steps of a run together, and the range of the ratios of every fourth step."""
    steps, trainings = MODELS[name].run, [load_training(name) for _ in range(2)]
    watched, bare = list[float](), list[float]()
    bare_step = as_without_detector(trainings[1])
    with way.make(trainings[0])() as step:
        for number in range(steps):
            pair_of_steps = [(step, watched), (bare_step, bare)]
            for one, times in pair_of_steps if number % 2 else reversed(pair_of_steps):
                times.append(timed(one, 1))
    del watched[0], bare[0]
    parts = [sum(watched[i::4]) / sum(bare[i::4]) for i in range(4)]
    ratio = sum(watched) / sum(bare)
    milliseconds = 1000 * sum(watched) / len(watched)
    return {"milliseconds": milliseconds, "ratio": ratio, "ratio_low": min(parts), "ratio_high": max(parts)}


def time_block(watch: Watch, other: Training, model: Model, watched: list[float], bare: list[float]) -> None:
    """Adds the seconds of every group of steps, watched and bare."""
    bare_step = as_without_detector(other)
    with watch() as step:
        gc.collect()  # so one way does not pay for the garbage of another
        for _ in range(model.untimed):
            step()
        timed(bare_step, model.group)  # warms up the training that is timed first
        for number in range(model.block // model.group):
            pair_of_steps = [(step, watched), (bare_step, bare)]
            for one, times in pair_of_steps if number % 2 else reversed(pair_of_steps):
                times.append(timed(one, model.group))


def timed(step: Step, times: int) -> float:
    """CPU seconds per step, which do not include what else the machine does; nothing here waits."""
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


def as_without_detector(training: Training) -> Step:
    """A step with torch's own backward and no hook for all modules, even while a detector has set both."""
    import torch
    from torch.nn.modules.module import _global_forward_pre_hooks as hooks

    own = torch.autograd.backward

    def step() -> None:
        there, torch.autograd.backward = torch.autograd.backward, own
        pending = dict(hooks)
        hooks.clear()
        try:
            training.next_step()
        finally:
            torch.autograd.backward = there
            hooks.update(pending)

    return step


def pin_to_one_core() -> None:
    """A process that moves between cores varies in speed."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def versions() -> dict[str, str]:
    """The versions of the packages that were loaded."""
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
    parser.add_argument("--rounds", type=int, metavar="N", help="blocks of every way (default: depends on the model)")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS)
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table of the README to stdout at the end")
    options = parser.parse_args()
    os.environ.update(STEADY)  # read by the C library of the processes that start now
    pin_to_one_core()
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
