"""What many ranks exchange, and what that costs.

    python benchmarks/ranks.py answer [--ranks N...]
    python benchmarks/ranks.py count [--ranks N...]
    python benchmarks/ranks.py cost [--rounds N] [--wrappers ddp fsdp] [--replicas N]

`answer` lets N simulated ranks fail at once: each is a thread with the code that a real rank runs, the store is torch's
own, and the report is one that a program has really caused. It counts messages and bytes, and the seconds until all
ranks know which of them was first (fixes are not tried). The threads share the cores of one machine: a real job is
faster.

`count` trains in N real processes under `firstnan run` and `NaNDetector`, and counts what our code calls: the store,
collectives, and `unshard()` with all that it calls. What the program and torch exchange themselves is left out.

`cost` trains a GPT of 4 M parameters in 2 processes, twice in each: one training is bare and one is watched, and their
steps alternate. CPU seconds are compared, since waiting for the other process depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from inspect import isfunction, signature
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
    # A thread that waits for the interpreter wakes up after every such interval: thousands would do nothing else.
    sys.setswitchinterval(1.0)
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


# --- what real ranks exchange -------------------------------------------------------------------------------------

TRAINS = """
import sys
import exchange_counter
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)

def train(what, wrapper, fails=False, **detector):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    if detector:
        from firstnan import NaNDetector
        detector = NaNDetector(model, optimizer, **detector)
        detector.attach()
    for step in range(50):
        if step == (40 if fails else 10):  # the first steps may differ from the rest
            exchange_counter.begin(what, 1 if fails else 40)
        x = torch.rand(8, 8)
        if fails and step == 40 and rank == size - 1:
            x[3] = 0
        optimizer.zero_grad()
        (model(x) - torch.log(x.sum(1, keepdim=True))).square().mean().backward()
        optimizer.step()
        if fails and step == 40:
            break
    exchange_counter.begin("", 1)
    if detector:
        detector.detach()
    dist.barrier()
"""

PROGRAMS = {
    "run": """
train("a healthy step, DDP, `firstnan run`", "ddp")
train("a healthy step, `fully_shard`, `firstnan run`", "fsdp")
""",
    "run ddp": 'train("a failing step, DDP, `firstnan run`", "ddp", fails=True)',
    "run fsdp": 'train("a failing step, `fully_shard`, `firstnan run`", "fsdp", fails=True)',
    "detector": """
train("a healthy step, DDP, `NaNDetector`", "ddp", on_nonfinite="skip")
train("a healthy step, DDP, `NaNDetector(check_replicas=1)`", "ddp", on_nonfinite="skip", check_replicas=1)
train("a healthy step, `fully_shard`, `NaNDetector`", "fsdp", on_nonfinite="skip")
train("a failing step, DDP, `NaNDetector`", "ddp", fails=True, on_nonfinite="skip")
train("a failing step, `fully_shard`, `NaNDetector`", "fsdp", fails=True, on_nonfinite="skip")
""",
}


class ExchangeCounter:
    """Counts the calls that firstnan makes, by what the program does meanwhile."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self._now, self._within, self._process = "", 0, os.getpid()

    def begin(self, what: str, steps: int) -> None:
        self._now = what
        self.found.setdefault(what, {"steps": steps, "store": 0, "collectives": 0, "bytes": 0})

    def install(self) -> None:
        import torch.distributed as dist
        from torch import Tensor
        from torch.distributed import distributed_c10d
        from torch.distributed.fsdp import FSDPModule

        def counted(function: Callable[..., Any], kind: str, size: Callable[..., int]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                ours = self._within or sys._getframe(1).f_globals.get("__name__", "").startswith("firstnan.")
                within, self._within = self._within, 0  # what it calls itself is not counted again
                try:
                    result = function(*args, **kwargs)
                finally:
                    self._within = within
                if ours and os.getpid() == self._process:
                    self.add(kind, size(result, *args, **kwargs))
                return result

            return call

        def tensor_bytes(result: Any, *args: Any, **kwargs: Any) -> int:
            flat = [t for one in (*args, *kwargs.values()) for t in (one if isinstance(one, list) else [one])]
            return sum(t.nbytes for t in flat if isinstance(t, Tensor))

        for name, function in list(vars(distributed_c10d).items()):
            if name.startswith("_") or not isfunction(function) or "async_op" not in signature(function).parameters:
                continue
            replacement = counted(function, "collectives", tensor_bytes)
            setattr(distributed_c10d, name, replacement)
            setattr(dist, name, replacement)
        unshard = FSDPModule.unshard

        def unshard_counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            ours = sys._getframe(1).f_globals.get("__name__", "").startswith("firstnan.")
            self._within += ours
            try:
                return unshard(module, *args, **kwargs)
            finally:
                self._within -= ours

        FSDPModule.unshard = unshard_counted  # type: ignore[method-assign]
        default_store = distributed_c10d._get_default_store

        def store() -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            return CallCounter(default_store(), self) if caller.startswith("firstnan.") else default_store()

        distributed_c10d._get_default_store = store

    def add(self, kind: str, size: int) -> None:
        if self._now:
            self.found[self._now][kind] += 1
            self.found[self._now]["bytes"] += size


class CallCounter:
    """A store whose calls are counted."""

    def __init__(self, store: Any, counter: ExchangeCounter) -> None:
        self._store, self._counter = store, counter

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._store, name)

        def call(*args: Any) -> Any:
            result = original(*args)
            if name != "has_extended_api":
                self._counter.add("store", sum(map(_size, (*args, result))))
            return result

        return call


def counted(options: argparse.Namespace) -> None:
    """One rank of `count`."""
    import runpy

    counter = ExchangeCounter()
    counter.install()
    sys.modules["exchange_counter"] = counter  # type: ignore[assignment]
    sys.argv, sys.path[0] = ["firstnan", *options.words], os.getcwd()
    try:
        if options.words[0] == "run":
            runpy.run_module("firstnan", run_name="__main__")
        else:
            runpy.run_path(options.words[0], run_name="__main__")
    finally:
        counter.found.pop("", None)
        Path(f"{os.environ['RANK']}.json").write_text(json.dumps(counter.found))


def count(options: argparse.Namespace) -> None:
    head = ("when", "ranks", "store calls a rank", "collectives a rank", "bytes a rank")
    print(f"| {' | '.join(head)} |\n| --- |{' ---: |' * (len(head) - 1)}")
    for name, text in PROGRAMS.items():
        for size in options.ranks:
            for what, each in _counts(name, text, size).items():
                numbers = (
                    _span([one[kind] / one["steps"] for one in each]) for kind in ("store", "collectives", "bytes")
                )
                print(f"| {what} | {size} | {' | '.join(numbers)} |", flush=True)


def _counts(name: str, text: str, size: int) -> dict[str, list[dict[str, Any]]]:
    """What each rank of a program has counted, by what the program did."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(TRAINS + text)
        with socket.socket() as any_socket:
            any_socket.bind(("127.0.0.1", 0))
            port = any_socket.getsockname()[1]
        words = ["run", "--verify", "0", "--json", "out.json"] if name.startswith("run") else []
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "counted", "--", *words, "train.py"],
                cwd=folder,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        told = [rank.communicate()[1] for rank in ranks]
        expected = 3 if "ddp" in name or "fsdp" in name else 0
        assert all(rank.returncode == expected for rank in ranks), told
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    return {what: [one[what] for one in found] for what in found[0]}


def _span(numbers: list[float]) -> str:
    low, high = (f"{n:,.1f}".removesuffix(".0") for n in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


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
    counts = commands.add_parser("count", help="what real ranks exchange, counted")
    counts.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    counts.set_defaults(run=count)
    one = commands.add_parser("counted", help="one rank of `count`")
    one.add_argument("words", nargs="+")
    one.set_defaults(run=counted)
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
