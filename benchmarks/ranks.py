"""What many ranks exchange, and what that costs.

    python benchmarks/ranks.py answer [--ranks N...]
    python benchmarks/ranks.py cost [--rounds N] [--wrappers ddp fsdp] [--replicas N]

`answer` lets N simulated ranks fail at once: each is a thread with the code that a real rank runs, the store is torch's
own, and the report is one that a program has really caused. It counts messages and bytes, and the seconds until all
ranks know which of them was first (fixes are not tried). The threads share the cores of one machine: a real job is
faster.

`cost` trains a GPT of 4 M parameters in 2 processes, twice in each: one training is bare and one is watched, and their
steps alternate. CPU seconds are compared, since waiting for the other process depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from side_by_side import STEADY, compare, load_training, show

_PROCESSES = 4
FAILS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters())
for x in torch.utils.data.DataLoader([torch.rand(8) * (i != 77) for i in range(160)], batch_size=8):
    optimizer.zero_grad()
    (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean().backward()
    optimizer.step()
"""


class CountingStore:
    """A store that counts what goes through it."""

    def __init__(self, store: Any) -> None:
        self._store, self.messages, self.bytes = store, 0, 0

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._store, name)

        def call(*args: Any) -> Any:
            result = original(*args)
            self.messages += 1
            self.bytes += sum(map(_size, (*args, result)))
            return result

        return call if name != "has_extended_api" else original


def _size(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 8


# --- the answer of many ranks -------------------------------------------------------------------------------------


def simulate(size: int, report: dict[str, Any]) -> dict[str, float]:
    """Lets `size` ranks fail; returns what was exchanged and how long it took."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, None, True)
    context = get_context("spawn")
    results = context.Queue()
    parts = [range(size)[i::_PROCESSES] for i in range(min(_PROCESSES, size))]
    workers = [context.Process(target=_ranks, args=(p, size, server.port, report, results, len(parts))) for p in parts]
    for worker in workers:
        worker.start()
    told = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    return {
        "ranks": size,
        "messages": sum(one["messages"] for one in told),
        "bytes": sum(one["bytes"] for one in told),
        "decided": max(one["decided"] for one in told),
        "over": max(one["over"] for one in told),
        "firsts": sum(one["firsts"] for one in told),
    }


def _ranks(part: range, size: int, port: int, content: dict[str, Any], results: Any, processes: int) -> None:
    """Some of the ranks, one thread each."""
    from torch.distributed import TCPStore

    from firstnan.engine.conclude import received
    from firstnan.engine.ranks import Ranks, World
    from firstnan.records import Report

    store = CountingStore(TCPStore("127.0.0.1", port, None, False))
    failed = Report.from_dict(content)
    threading.stack_size(256 * 1024)
    begin, decided, firsts = threading.Event(), [], []

    def rank(number: int) -> None:
        created = number == size // 3
        cause = failed.cause if created else received(number, size)
        report = replace(failed, rank=number, world_size=size, cause=cause, origin=failed.origin if created else None)
        ranks = Ranks(World(number, size, False), store)
        begin.wait()
        first = ranks.exchange(report)
        decided.append(time.monotonic())
        if first is not None:
            firsts.append(number)
            assert created
            assert any(one.what == "created" and one.rank == number for one in first.ranks)
            ranks.settle(first)
        elif number == 0:
            answer = ranks.answer()
            assert answer is not None
            assert answer.rank == size // 3
            ranks.written()
        ranks.wait_for_end()

    threads = [threading.Thread(target=rank, args=(number,)) for number in part]
    for thread in threads:
        thread.start()
    store._store.add("ready", 1)
    while store._store.add("ready", 0) < processes:
        time.sleep(0.01)
    started = time.monotonic()
    begin.set()
    for thread in threads:
        thread.join()
    over = time.monotonic() - started
    counts = {"messages": store.messages, "bytes": store.bytes, "firsts": len(firsts)}
    results.put({**counts, "decided": max(decided) - started, "over": over})


def real_report() -> dict[str, Any]:
    """The report of a program that fails."""
    with tempfile.TemporaryDirectory() as folder:
        program, out = Path(folder) / "train.py", Path(folder) / "out.json"
        program.write_text(FAILS)
        subprocess.run(
            [sys.executable, "-m", "firstnan", "run", "--json", out, program], check=False, stderr=subprocess.DEVNULL
        )
        return dict(json.loads(out.read_text()))


def answer(options: argparse.Namespace) -> None:
    report = real_report()
    print(f"a report of {len(json.dumps(report)):,} bytes", file=sys.stderr)
    head = ("ranks", "messages", "for each rank", "bytes for each rank", "first is known after", "all have ended after")
    print(f"| {' | '.join(head)} |\n|{' ---: |' * len(head)}")
    for size in options.ranks:
        row = simulate(size, report)
        assert row["firsts"] == 1
        each = row["messages"] / size, row["bytes"] / size
        times = row["decided"], row["over"]
        print(
            f"| {size:,} | {row['messages']:,} | {each[0]:.1f} | {each[1]:,.0f} | {times[0]:.1f} s | {times[1]:.1f} s |"
        )


# --- the cost of watching -----------------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> None:
    os.environ.update(STEADY, OMP_NUM_THREADS="1")
    for wrapper in options.wrappers:
        with tempfile.TemporaryDirectory() as folder:
            context = get_context("spawn")
            results = context.Queue()
            given = (f"{folder}/store", wrapper, options.rounds, options.beginning, options.replicas, results)
            workers = [context.Process(target=_trains, args=(rank, *given)) for rank in range(2)]
            for worker in workers:
                worker.start()
            pairs = [results.get() for _ in workers]
            for worker in workers:
                worker.join()
        names = list(pairs[0])
        rows = {}
        for name in names:  # of each step, the seconds of both processes
            watched, bare = (
                [a + b for a, b in zip(*times, strict=True)] for times in zip(*(p[name] for p in pairs), strict=True)
            )
            rows[name] = compare(watched, bare)
        show(f"GPT 4 M, {wrapper}, 2 processes, {options.rounds} rounds, CPU seconds of both", rows)


def _trains(rank: int, store: str, wrapper: str, rounds: int, beginning: int, replicas: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from firstnan import NaNDetector

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    made = [_training(wrapper, rank) for _ in range(2)]
    ways: dict[str, dict[str, Any]] = {"bare": {}, "gate": {}}
    if wrapper == "ddp" and replicas:
        ways["replicas"] = {"check_replicas": replicas}
    detectors = {
        name: [NaNDetector(model, optimizer, **given) for _, model, optimizer in made] if name != "bare" else None
        for name, given in ways.items()
    }
    own = torch.autograd.backward
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    shuffle = random.Random(0)

    def block(name: str, watched: int, steps: int, *, timed: bool) -> None:
        """Steps of both trainings in turn; one of them is watched."""
        found = detectors[name]
        step, bare = made[watched][0], made[1 - watched][0]
        if found is not None:
            found[watched].attach()
        patched = torch.autograd.backward

        def bare_step() -> None:  # as if nothing were patched
            torch.autograd.backward = own
            bare()
            torch.autograd.backward = patched

        try:
            for number in range(steps):
                both: list[tuple[Callable[[], None], list[float]]] = [
                    (step, times[name][0]),
                    (bare_step, times[name][1]),
                ]
                for one, seconds in both if number % 2 else both[::-1]:
                    start = time.process_time()
                    one()
                    if timed:
                        seconds.append(time.process_time() - start)
        finally:
            if found is not None:
                found[watched].detach()

    for name in ways:
        for watched in range(2):
            block(name, watched, beginning, timed=False)
    for number in range(rounds):
        for name in shuffle.sample(list(ways), len(ways)):
            block(name, number % 2, 2, timed=False)
            block(name, number % 2, 8, timed=True)
    results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def _training(wrapper: str, rank: int) -> tuple[Callable[[], None], Any, Any]:
    """One step of a GPT whose gradients are averaged with the other process; the model and its optimizer."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    training = load_training("gpt")
    model: Any = training.model
    for _ in range(rank):  # other batches than those of rank 0
        next(training.batches)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.modules():
            if type(layer).__name__ == "Block":
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        (tokens,) = next(training.batches)
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, model, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    answers = commands.add_parser("answer", help="what is exchanged at a failure")
    answers.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 128, 1024, 16384], metavar="N")
    answers.set_defaults(run=answer)
    costs = commands.add_parser("cost", help="what watching costs in 2 processes")
    costs.add_argument("--rounds", type=int, default=12, metavar="N")
    costs.add_argument("--wrappers", nargs="+", choices=("ddp", "fsdp"), default=["ddp", "fsdp"])
    costs.add_argument(
        "--beginning", type=int, default=10, metavar="N", help="first steps, not timed: a detector checks more in them"
    )
    costs.add_argument("--replicas", type=int, default=0, metavar="N", help="also compare replicas every N steps")
    costs.set_defaults(run=cost)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
