"""Processes that train together: the first to fail is named, replicas stay alike, and nobody hangs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from firstnan.diagnose.rules import received
from firstnan.engine import ranks as module
from firstnan.engine.children import _bad_elements
from firstnan.engine.ranks import Ranks, World
from firstnan.engine.workers import WorkerReports
from firstnan.gate.by_hand import HandWritten
from firstnan.gate.gate import Trip
from firstnan.observe import collectives
from firstnan.records import Noticed, Origin, RankFinding, Report
from firstnan.report.sentences import ranks_line
from zygote import SOURCE, Zygote, ask

pytest_plugins = ["zygote"]

LIMIT = 120.0
"""Seconds after which a rank is ended: a test that hangs fails."""

BEGIN = """
    import hashlib, json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))
    draw = torch.Generator().manual_seed(rank)

    def loss_of(out, x):
        return (out - torch.log(x.sum(1, keepdim=True))).square().mean()  # forward

    def sharded(net):
        from torch.distributed.fsdp import fully_shard
        for layer in (net[0], net[2], net):
            fully_shard(layer)
        return net
"""

LOADER = """
    data = torch.rand(160, 6) + 0.1
    data[81] = 0
    dataset = TensorDataset(data)
    loader = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, shuffle=False))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            loss_of(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()
"""

HEALTHY = LOADER.replace("data[81] = 0", "")

FAULTS = """
    wrapper, fault, guilty = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if fault == "optimizer":  # the other ranks do not come
        from firstnan.engine import ranks
        ranks._PATIENCE = 2.0
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net) if wrapper == "ddp" else sharded(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(9):
        x = torch.rand(8, 6, generator=draw) + 0.1
        bad = fault if step == 6 and guilty in (rank, -1) else ""
        if bad == "data":
            x[3, 2] = float("nan")  # data
        if bad == "forward":
            x[3] = 0
        out = model(x)
        extra = torch.log(torch.zeros(())) if bad == "constant" else 0.0  # constant
        spread = (out * 0 if bad == "backward" else out).square().sum(1).sqrt().mean()  # backward
        optimizer.zero_grad()
        loss = loss_of(out, x) + 0.01 * spread + extra
        if bad == "ignored":
            loss = nn.functional.cross_entropy(torch.cat([out, -out], 1), torch.full((8,), -100))  # ignored
        loss.backward()
        if bad == "optimizer":
            optimizer.param_groups[0]["lr"] = float("nan")
        optimizer.step()  # optimizer
"""

SERVER = """
    from firstnan.engine import ranks
    ranks._PATIENCE = 2.0  # rank 1 comes to no update
    optimizer = torch.optim.SGD(net.parameters(), 1e-3) if rank == 0 else None
    for step in range(9):
        for p in net.parameters():
            dist.broadcast(p.data, 0)
        if rank:
            x = torch.rand(8, 6, generator=draw) + 0.1
            x[3] = 0 if step == 6 else x[3]
            net.zero_grad()
            loss_of(net(x), x).backward()
        for p in net.parameters():
            p.grad = torch.zeros_like(p) if rank == 0 else p.grad
            dist.reduce(p.grad, 0)
        if optimizer is not None:
            optimizer.step()
"""

TENSOR_PARALLEL = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    fault, guilty = sys.argv[1], int(sys.argv[2])
    if fault == "gradient":  # the other rank does not come
        from firstnan.engine import ranks
        ranks._PATIENCE = 2.0

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 1)

        def forward(self, x, bad):
            h = torch.tanh(self.up(x))
            if bad == "hidden":
                h = h / (h - h)  # hidden
            if bad == "gradient":
                h = h + 0 * (h * 0).sqrt()  # gradient
            return self.down(h)

    net, draw = Net(), torch.Generator().manual_seed(7)
    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(9):
        x = torch.rand(8, 6, generator=draw) + 0.1
        bad = fault if step == 6 and guilty in (rank, -1) else ""
        if bad == "forward":
            x[3] = 0
        if bad == "weight":
            with torch.no_grad():
                net.up.weight.to_local()[2, 3] = float("nan")  # weight
        optimizer.zero_grad()
        loss_of(model(x, bad), x).backward()
        optimizer.step()
"""

DIES = """
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(12):
        if step == 4 and rank == 1:
            raise ValueError("the disk is full")
        x = torch.rand(8, 6, generator=draw) + 0.1
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()
"""

HANGS = """
    import signal, time
    from firstnan.engine import ranks
    ranks._PATIENCE = ranks._ANSWERED_WITHIN = 2.0
    how, guilty, wrapper = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net) if wrapper == "ddp" else net
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    open(f"{rank}.pid", "w").write(str(os.getpid()))
    for step in range(9):
        x = torch.rand(8, 6, generator=draw) + 0.1
        if step == 6 and rank == guilty:
            x[3] = 0
        if step == 6 and rank != guilty:
            while not os.path.exists(f"out.rank{guilty}.json"):  # the other has failed
                time.sleep(0.02)
            if how == "sleep":
                time.sleep(1e6)
            if how == "late":
                time.sleep(6)
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "exit":
                os._exit(7)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise ValueError("the disk is full")
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()
"""

SICK = """
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    calls, process = 0, os.getpid()

    def card(x):  # fails once, and not in a replay
        global calls
        calls += 1
        return x * float("nan") if calls == 5 and rank == 1 and os.getpid() == process else x

    for step in range(9):
        x = torch.rand(8, 6, generator=draw) + 0.1
        out = model(x)
        if sys.argv[1] == "loss":
            out = card(out)
        elif out.requires_grad:
            out.register_hook(card)
        optimizer.zero_grad()
        loss_of(out, x).backward()
        optimizer.step()
"""

PIPELINE = """
    stage = nn.Sequential(nn.Linear(6, 16), nn.Tanh()) if rank == 0 else nn.Linear(16, 1)
    optimizer = torch.optim.SGD(stage.parameters(), 1e-2)
    for step in range(9):
        x = torch.rand(8, 6, generator=draw) + 0.1
        optimizer.zero_grad()
        if rank == 0:
            if step == 6:
                x[3] = -1
            h = stage(x.log())  # first stage
            dist.send(h.detach(), 1)
            gradient = torch.empty_like(h)
            dist.recv(gradient, 1)
            h.backward(gradient)
        else:
            h = torch.empty(8, 16)
            dist.recv(h, 0)
            h.requires_grad_()
            stage(h).square().mean().backward()
            dist.send(h.grad, 0)
        optimizer.step()
"""

POLICIES = """
    import copy, logging
    from firstnan import NaNDetector, NonFiniteError
    logging.disable()
    initial = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def fail(step, x, fault):
        \"\"\"On the last rank only.\"\"\"
        if fault == "forward" and step in (5, 9) and rank == size - 1:
            x[3] = 0
        return x

    def train(wrapper, policy, fault):
        net = copy.deepcopy(initial)
        model = DDP(net) if wrapper == "ddp" else sharded(net)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        detector = NaNDetector(model, optimizer, on_nonfinite=policy, snapshot_every=4)
        raised, updates = False, 0
        try:
            with detector:
                for step in range(60):
                    x = fail(step, torch.rand(8, 6, generator=draw) + 0.1, fault)
                    out = model(x)
                    bad = fault == "backward" and step in (5, 9) and rank == size - 1
                    spread = (out * 0 if bad else out).square().sum(1).sqrt().mean()
                    optimizer.zero_grad()
                    (loss_of(out, x) + 0.01 * spread).backward()
                    if wrapper == "fsdp" and fault == "shard" and step == 5 and rank == 0:
                        net[0].weight.grad.to_local()[0, 0] = float("nan")  # in the part of one rank only
                    optimizer.step()
        except NonFiniteError:
            raised = True
        weights = [p.full_tensor() if wrapper == "fsdp" else p for p in net.parameters()]
        content = b"".join(p.detach().numpy().tobytes() for p in weights)
        report = detector.report
        return {
            "weights": hashlib.sha256(content).hexdigest(),
            "finite": all(bool(p.isfinite().all()) for p in weights),
            "updates": [optimizer.state[p]["step"].item() for p in net.parameters()],
            "line": report.origin.site.line if report and report.origin else None,
            "cause": report.cause.slug if report and report.cause else None,
            "dropped": [e.step for e in detector.events if e.kind in ("skipped", "rolled_back")],
            "raised": raised,
        }

    found = {"/".join(case): train(*case) for case in json.loads(sys.argv[1])}
    open(f"found{rank}.json", "w").write(json.dumps(found))
    dist.barrier()
"""

REPLICAS = """
    import copy, logging
    from firstnan import NaNDetector
    logging.disable()
    initial = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def average(net):
        for p in net.parameters():
            dist.all_reduce(p.grad)

    def train(how, drifts):
        net = copy.deepcopy(initial)
        if how == "stages":  # no replicas
            nn.init.normal_(net[0].weight, generator=draw)
        model = DDP(net) if how == "ddp" else net
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with NaNDetector(model, optimizer, check_replicas=2) as detector:
            for step in range(20):
                x = torch.rand(8, 6, generator=draw)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if how == "by hand":
                    average(net)
                optimizer.step()
                if drifts and step == 12 and rank == 1:
                    net[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 20
                dist.barrier()
        return [(e.kind, e.message, e.step, e.layer) for e in detector.events]

    quiet = [train(how, False) for how in ("ddp", "by hand", "stages")]
    found = {"quiet": quiet, "drift": train("ddp", True)}
    open(f"found{rank}.json", "w").write(json.dumps(found))
    dist.barrier()
"""


EXCHANGES = """
    import logging
    import torch.distributed.nn.functional as exchange
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from firstnan import NaNDetector
    logging.disable()

    def count(model, x, fails):  # rank 0 has nothing to count, but the others have
        kept = torch.zeros(8) if rank == 0 else torch.ones(8)
        number = kept.sum()
        dist.all_reduce(number)
        if fails and rank == 1:
            x[3] = 0
        return ((model(x) - x.sum(1, keepdim=True).log()).square().mean(1) * kept).sum() / number  # count

    def norm(model, x, fails):
        x[:, 2] = 0.25 if fails else x[:, 2]
        mean = exchange.all_reduce(x.mean(0)) / size
        spread = exchange.all_reduce((x - mean).square().mean(0)).sqrt()
        return model((x - mean) / spread).square().mean()  # norm

    def half(model, x, fails):
        total = (x.sum() * (1500 if fails else 1)).half()
        dist.all_reduce(total)  # half
        return model(x).square().mean() * total.float()

    def hook(model, x, fails):
        return model(x * 3e3 if fails and rank == 1 else x).square().mean() * (1e3 if fails else 1)

    def experts(model, x, fails):
        x[6] = x[6] * 1e4 if fails and rank == 0 else x[6]  # row 2 of those that rank 1 gets
        own = model(x)
        seen = exchange.all_to_all_single(torch.empty_like(own), own).abs()
        return torch.log1p(torch.exp(seen)).mean()  # experts

    def gather(model, x, fails):
        x[3] = 0 if fails and rank == 1 else x[3]
        own = x / x.norm(dim=1, keepdim=True)  # gather
        return model(torch.cat(exchange.all_gather(own))).square().mean()

    def zero(model, x, fails):
        x[3] = 0 if fails and rank == 1 else x[3]
        return (model(x) - x.sum(1, keepdim=True).log()).square().mean()  # zero

    def stages(model, x, fails):
        inner = model(x)
        if rank == 0:
            dist.send((inner * (0 if fails else 1)).detach(), 1)
            gradient = torch.empty_like(inner)
            dist.recv(gradient, 1)
            return (inner * gradient.nan_to_num()).sum()
        dist.recv(inner.detach(), 0)
        seen = inner / inner.norm()  # stages
        dist.send(torch.ones_like(inner), 0)
        return seen.square().mean()

    def train(case):
        torch.manual_seed(0)
        net = nn.Linear(6, 2)
        model = net if case is stages else DDP(net)
        if case is hook:
            model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        if case is zero:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1e-3)
        with NaNDetector(model, optimizer, on_nonfinite="skip") as detector:
            for step in range(9):
                x = torch.rand(8, 6, generator=draw) + 0.1
                loss = case(model, x, step == 6)
                optimizer.zero_grad()
                loss.backward()  # hook
                optimizer.step()
        found = detector.report
        if case is experts:
            return [found.origin.site.line, found.batch.bad_samples] if rank else None
        return found and [found.step, found.origin and found.origin.site.line, found.cause and found.cause.slug]

    found = {case.__name__: train(case) for case in (count, norm, half, hook, zero, stages, experts, gather)}
    open(f"found{rank}.json", "w").write(json.dumps(found))
    dist.barrier()
"""

LEAVES = """
    import math

    def train():
        model = DDP(nn.Linear(6, 6))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        for step in range(9):
            x = torch.rand(8, 6, generator=draw)
            if step == 6 and rank == 1:
                x[3] = 0
            share = x / x.sum(1, keepdim=True)  # own check
            loss = (model(x) - share).square().mean()
            if math.isnan(loss.item()):
                raise RuntimeError("the loss is NaN")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    try:
        train()
    finally:
        dist.destroy_process_group()
"""

STOPS = """
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(9):
        x = torch.rand(8, 6, generator=draw)
        if step == 6 and rank == 1:
            x[3] = 0
        loss = loss_of(model(x), x)
        bad = torch.tensor(float(not torch.isfinite(loss)))
        dist.all_reduce(bad)
        if bad:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
    sys.exit(5)
"""

ACCUMULATES = """
    import contextlib

    model, step = DDP(net), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def pair(micro):
        a, b = torch.rand(4, 6, generator=draw), torch.rand(4, 6, generator=draw)
        return (a, a.clone()) if micro == 21 and rank == 1 else (a, b)

    pairs = (pair(micro) for micro in range(40))
    for micro in range(40):
        a, b = FETCHED
        last = micro % 4 == 3
        with contextlib.nullcontext() if last else model.no_sync():
            net.eval()
            loss = (model(a) - model(b)).square().sum(1).sqrt().mean()  # backward
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    dist.barrier()
"""


ALONE = """
    import time

    MODEL
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(3):
        x = torch.rand(4, 6, generator=draw)
        if step == 2 and rank == 1:
            x = CHANGED
        loss = (model(x).square().sum(1).log() + 20).mean()  # alone
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    came = False
    for _ in range(120):  # less than a rank is waited for
        came = came or os.path.exists("out.json")
        time.sleep(0 if came else 0.1)
    print(came)
"""


@dataclass(frozen=True)
class Job:
    """Starts the ranks of a program as a launcher does, in forks of a process that has torch already."""

    zygote: Zygote
    folder: Path

    def __call__(self, text: str, *words: str, ranks: int = 2, options: str | None = "") -> list[tuple[int, str]]:
        """Exit code and stderr of each rank; `options` of `firstnan run`, or None for plain python."""
        (self.folder / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
        with socket.socket() as any_socket:
            any_socket.bind(("127.0.0.1", 0))
            port = any_socket.getsockname()[1]
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = ["run", "--json", "out.json", *(options or "").split()] if options is not None else []

        def start(rank: int) -> tuple[int, str]:
            env = {**self.zygote.environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            out, err = self.folder / f"{rank}.out", self.folder / f"{rank}.err"
            request = {"argv": [*command, "train.py", *words], "plain": options is None, "cwd": str(self.folder)}
            request |= {"env": env, "limit": LIMIT, "stdout": str(out), "stderr": str(err)}
            code = ask(self.zygote.address, request | {"executable": self.zygote.executable})
            return code, err.read_text()

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(start, range(ranks)))

    def answer(self, name: str = "out.json") -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())  # type: ignore[no-any-return]

    def line(self, mark: str) -> int:
        lines = (self.folder / "train.py").read_text().splitlines()
        return max(i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))


@pytest.fixture
def job(firstnan: Zygote, tmp_path: Path) -> Job:
    return Job(firstnan, tmp_path)


def test_the_rank_with_the_bad_sample_is_named(job: Job) -> None:
    (first, quiet), (second, told) = job(LOADER)
    assert (first, second) == (3, 3)
    found, other = job.answer(), job.answer("out.rank0.json")
    assert (found["rank"], found["world_size"], found["step"]) == (1, 2, 5)
    assert found["origin"]["line"] == job.line("forward")
    assert (found["batch"]["dataset_indices"], found["batch"]["confirmed"]) == ([81], True)
    assert found["remedies"][0]["failing_step_finite"]
    assert [one["what"] for one in found["ranks"]] == ["received", "created"]
    assert other["cause"]["slug"] == "collective"
    assert job.answer("out.rank1.json")["origin"] == found["origin"]
    assert "rank 1 of 2" in told
    assert "created on rank 1; received from another by rank 0" in told
    assert "firstnan" not in quiet


@pytest.mark.parametrize("fault", ["forward", "backward", "data", "optimizer"])
@pytest.mark.parametrize(("wrapper", "ranks"), [("ddp", 2), ("ddp", 4), ("fsdp", 4)])
def test_a_fault_on_one_rank(job: Job, wrapper: str, ranks: int, fault: str) -> None:
    guilty = ranks - 1
    results = job(FAULTS, wrapper, fault, str(guilty), ranks=ranks, options="--verify 0")
    assert results[guilty][0] == 3
    found = job.answer()
    assert (found["rank"], found["world_size"], found["step"]) == (guilty, ranks, 6)
    assert (found["origin"]["line"], found["reproduced"]) == (job.line(fault), "deterministic")
    if fault in ("forward", "data"):
        assert found["batch"]["bad_samples"] == [3]
    what = {one["rank"]: one["what"] for one in found["ranks"]}
    assert what.pop(guilty) == "created"
    # An update goes wrong after the exchange: the others are healthy until they meet the lack of this rank.
    assert set(what.values()) == {"unknown" if fault == "optimizer" else "received"}


@pytest.mark.parametrize("fault", ["constant", "ignored"])
def test_a_bad_loss_with_finite_gradients_of_spread_weights(job: Job, fault: str) -> None:
    """The others get nothing bad from it, but have to come to gather the weights."""
    job(FAULTS, "fsdp", fault, "1", options="--verify 0")
    found = job.answer()
    assert (found["rank"], found["step"], found["noticed"]["what"]) == (1, 6, "loss")
    assert (found["origin"]["line"], found["reproduced"]) == (job.line(fault), "deterministic")


def test_a_part_of_a_gradient_is_not_compared_with_the_whole() -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def bad(tensor: Any) -> Any:
        return _bad_elements(Trip(Noticed("gradient", "weight"), [tensor], before_update=True))

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        part = DTensor.from_local(torch.full((2,), math.nan), init_device_mesh("cpu", (2,)), [Shard(0)])
        assert tuple(part.shape) == (4,)
        assert (bad(part), bad(torch.full((4,), math.nan))) == ([((2,), 2)], [((4,), 4)])
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_fixes_of_spread_weights_are_tried_in_the_failing_step(job: Job, fault: str) -> None:
    """An update needs the parts of all ranks, so it is where the trial ends."""
    (_, first), (_, second) = job(FAULTS, "fsdp", fault, "1")
    best = job.answer()["remedies"][0]
    assert (best["tried"], best["failing_step_finite"], best["steps_finite_after"]) == (True, True, 0)
    assert "firstnan" not in first
    assert "not tried beyond step 6: each rank holds a part of the weights" in " ".join(second.split())


def test_a_rank_without_an_optimizer_is_named(job: Job) -> None:
    (first, _), (second, told) = job(SERVER)
    assert (first, second) == (3, 3)
    found = job.answer()
    assert (found["rank"], found["step"], found["origin"]["line"]) == (1, 6, job.line("forward"))
    assert [one["what"] for one in found["ranks"]] == ["received", "created"]
    assert "not tried: this rank had gone on with its step" in " ".join(told.split())


def test_samples_of_spread_weights_are_confirmed(job: Job) -> None:
    """Each question is a child of its own, which needs no other rank."""
    spread = "model = sharded(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))"
    job(LOADER.replace("model = DDP(net)", spread), options="--verify 0")
    found = job.answer()
    assert (found["rank"], found["step"], found["batch"]["dataset_indices"]) == (1, 5, [81])
    assert found["batch"]["confirmed"]


@pytest.mark.parametrize(("fault", "guilty"), [("forward", -1), ("hidden", 1), ("gradient", 1), ("weight", 1)])
def test_tensor_parallel_weights(job: Job, fault: str, guilty: int) -> None:
    job(TENSOR_PARALLEL, fault, str(guilty), options="--verify 0")
    found = job.answer()
    assert (found["rank"], found["world_size"]) == (max(guilty, 0), 2)
    assert found["origin"]["line"] == job.line(fault)
    others = {one["what"] for one in found["ranks"] if one["rank"] != found["rank"]}
    # The gradient of a part of the weights is this rank's own; the other is healthy until it misses this one.
    assert others == {{"forward": "created", "gradient": "unknown"}.get(fault, "received")}
    if fault == "weight":
        assert (found["cause"]["slug"], found["origin"]["label"]) == ("nan_parameter", "up.weight")
    if fault == "gradient":
        assert found["noticed"]["name"] == "up.weight"


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_fault_on_all_ranks(job: Job, wrapper: str) -> None:
    assert [code for code, _ in job(FAULTS, wrapper, "forward", "-1", ranks=4, options="--verify 0")] == [3, 3, 3, 3]
    found = job.answer()
    assert (found["rank"], found["step"], found["origin"]["line"]) == (0, 6, job.line("forward"))
    assert [one["what"] for one in found["ranks"]] == ["created"] * 4


def test_healthy_ranks_are_silent(job: Job) -> None:
    assert job(HEALTHY, options="--check-replicas 2") == [(0, ""), (0, "")]
    assert (job.answer()["verdict"], job.answer()["world_size"]) == ("clean", 2)
    assert not list(job.folder.glob("out.rank*"))


def test_a_rank_that_raises_something_else_holds_nobody_up(job: Job) -> None:
    (first, _), (second, error) = job(DIES)
    assert (first, second) == (1, 1)
    assert error.rstrip().endswith("ValueError: the disk is full")
    assert job.answer()["verdict"] == "clean"


def _torchrun(folder: Path, text: str, *words: str) -> subprocess.Popen[str]:
    """Starts two ranks with torch's own launcher."""
    (folder / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    watched = ["-m", "firstnan", "run", "--verify", "0", "--json", "out.json", "train.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    with (folder / "err").open("w") as err:
        return subprocess.Popen([sys.executable, *launch, *watched, *words], cwd=folder, stderr=err, text=True, env=env)


def _appears(path: Path, text: str) -> None:
    until = time.monotonic() + LIMIT
    while text not in path.read_text():
        assert time.monotonic() < until, f"{text!r} is not in {path.read_text()}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("raise", "1"), ("exit", "7"), ("kill", "-9")])
def test_the_launcher_ends_a_rank_that_has_found_something(tmp_path: Path, how: str, code: str) -> None:
    guilty = 1 if how == "raise" else 0
    with _torchrun(tmp_path, HANGS, how, str(guilty), "ddp") as launcher:
        assert launcher.wait(LIMIT) == 1
    told = (tmp_path / "err").read_text()
    assert told.count("firstnan: -Inf created in forward, step 6") == 1
    assert f"rank {guilty} of 2" in told
    root_cause = told.partition("Root Cause")[2]
    assert re.findall(r"(rank|exitcode) +: (-?[0-9]+)", root_cause) == [("rank", str(1 - guilty)), ("exitcode", code)]
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["rank"], found["world_size"], found["step"], found["verdict"]) == (guilty, 2, 6, "nonfinite")
    if how == "raise":
        assert "ValueError: the disk is full" in told


@pytest.mark.slow
def test_a_launcher_that_is_watched_ends_with_our_exit_code_and_hands_our_options_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(LOADER))
    (tmp_path / "firstnan.pth").write_bytes((SOURCE.parent / "firstnan.pth").read_bytes())
    begin = f"import site; site.addsitedir({str(tmp_path)!r})"  # what an installed firstnan.pth does
    (tmp_path / "sitecustomize.py").write_text(begin)
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    options = ["run", "--verify", "0", "--json", "out.json", "-o", "out.md"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "firstnan", *options, *launch, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 3
    assert json.loads((tmp_path / "out.json").read_text())["remedies"][0]["tried"] is False
    assert "created on rank 1" in (tmp_path / "out.md").read_text()
    assert not list(tmp_path.glob("firstnan-found-*"))


LAUNCHES = """
import os, socket, subprocess, sys

if "RANK" not in os.environ:
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(any_socket.getsockname()[1])}
    command = [sys.executable, __file__, *sys.argv[1:]]
    ranks = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}) for rank in range(2)]
    sys.exit(1 if any([one.wait() for one in ranks]) else 0)
"""


def test_ranks_that_the_program_starts_itself(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LAUNCHES + textwrap.dedent(BEGIN) + textwrap.dedent(LOADER))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert result.code == 3
    assert result.report is not None
    assert (result.report["rank"], result.report["world_size"], result.report["step"]) == (1, 2, 5)
    assert result.report["batch"]["dataset_indices"] == [81]


SPAWNED = """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, store):
    dist.init_process_group("gloo", store, rank=rank, world_size=2)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for step in range(3):
        x = torch.full((8, 4), -1.0 if rank == 1 and step == 1 else 1.0)
        optimizer.zero_grad()
        (net(x) + torch.log(x)).square().mean().backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()

if __name__ == "__main__":
    mp.spawn(train, ("STORE",), nprocs=2)
"""


FETCHED = """
    import numpy

    class Scaled(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            x = numpy.full(6, 0.5, "float32") if i == 21 else numpy.random.default_rng(i).random(6, "float32")
            x = (x - x.min()) / (x.max() - x.min())  # scaled
            return x + numpy.float32(0.1)
    loader = DataLoader(Scaled(), 8, sampler=DistributedSampler(range(64), shuffle=False), num_workers=1)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x in loader:
        optimizer.zero_grad()
        loss_of(model(x), x).backward()
        optimizer.step()
"""


def test_a_fix_of_the_data_is_tried_with_the_batch_fetched_again(job: Job) -> None:
    assert [code for code, _ in job(FETCHED)] == [3, 3]
    found = job.answer()
    assert (found["rank"], found["origin"]["line"], found["step"]) == (1, job.line("scaled"), 1)
    assert found["batch"]["dataset_indices"] == [21]
    fix = found["remedies"][0]
    assert (fix["failing_step_finite"], fix["steps_finite_after"]) == (True, 2), fix


def test_ranks_that_are_spawned(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED.replace("STORE", (tmp_path / "store").as_uri()))
    result = firstnan(["run", "--verify", "0", "train.py"], cwd=tmp_path)
    assert result.code == 3
    assert result.report is not None
    assert (result.report["rank"], result.report["world_size"], result.report["step"]) == (1, 2, 1)
    assert [one["what"] for one in result.report["ranks"]] == ["received", "created"]
    early = "firstnan: in a process that the program has started: NaN created in forward, step 1"
    assert result.stderr.count(early) == 1


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_sleeps_says_what_it_has_found(tmp_path: Path) -> None:
    with _torchrun(tmp_path, HANGS, "sleep", "1", "ddp") as launcher:
        _appears(tmp_path / "err", "rank 1 has waited 2 seconds in its backward pass for the other ranks")
        assert "firstnan: -Inf created in forward, step 6" in (tmp_path / "err").read_text()
        launcher.send_signal(signal.SIGTERM)  # its ranks are held in a collective, or sleep
        assert launcher.wait(LIMIT) == 1
    assert (tmp_path / "err").read_text().count("firstnan: -Inf created") == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["rank"], found["verdict"]) == (1, "nonfinite")
    assert [one["what"] for one in found["ranks"]] == ["unknown", "created"]


def test_a_rank_that_comes_late_after_all(job: Job) -> None:
    (_, other), (code, told) = job(HANGS, "late", "1", "ddp")
    assert code == 3
    assert told.count("firstnan: -Inf created in forward, step 6") == 1
    assert "rank 1 has waited 2 seconds in its backward pass" in told
    assert "created on rank 1; received from another by rank 0" in told
    assert job.answer()["remedies"][0]["failing_step_finite"]
    assert "firstnan" not in other


def test_the_process_that_holds_the_store_is_stopped(job: Job) -> None:
    pool = ThreadPoolExecutor(1)
    running = pool.submit(job, HANGS, "stop", "1", "none", options="--verify 0")
    try:
        until = time.monotonic() + LIMIT
        err = job.folder / "1.err"
        while not err.exists() or "rank 1 of 2" not in err.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.kill(int((job.folder / "0.pid").read_text()), signal.SIGKILL)
        codes = [code for code, _ in running.result()]
        pool.shutdown()
    assert codes == [-9, 3]
    found = job.answer()
    assert (found["rank"], found["step"], found["origin"]["line"]) == (1, 6, job.line("forward"))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_rank_that_differs_from_its_own_replay(job: Job, where: str) -> None:
    results = job(SICK, where)
    assert [code for code, _ in results] == [3, 3]
    found = job.answer()
    assert (found["step"], found["cause"]["slug"], found["reproduced"]) == (4, "transient", "transient")
    if where == "loss":
        assert (found["rank"], found["ranks"][1]["what"]) == (1, "transient")
        assert "only the first time, not when replayed, on rank 1" in results[1][1]
    else:  # the gradients of all ranks are averaged before anybody sees them
        assert "which one is not known" in found["cause"]["why"]


@pytest.mark.parametrize("fetched", ["pair(micro)", "next(pairs)"])
def test_a_gradient_of_an_earlier_micro_batch(job: Job, fetched: str) -> None:
    """The turn that comes to the update is finite: the step takes four turns of the loop."""
    job(ACCUMULATES.replace("FETCHED", fetched))
    found = job.answer()
    assert (found["rank"], found["step"], found["origin"]["line"]) == (1, 5, job.line("backward"))
    assert [one["what"] for one in found["ranks"]] == ["received", "created"]
    assert found["remedies"][0]["failing_step_finite"] or fetched == "next(pairs)"


def test_the_first_stage_of_a_pipeline(job: Job) -> None:
    job(PIPELINE, options="--verify 0")
    found = job.answer()
    assert (found["rank"], found["step"], found["origin"]["line"]) == (0, 6, job.line("first stage"))
    assert [one["what"] for one in found["ranks"]] == ["created", "received"]


CASES = [
    *((("ddp", policy, "forward")) for policy in ("skip", "rollback", "warn", "raise")),
    *((("ddp", policy, "backward")) for policy in ("skip", "rollback")),
    *((("fsdp", policy, fault)) for policy in ("skip", "rollback") for fault in ("forward", "backward")),
    ("fsdp", "skip", "shard"),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_stay_alike(job: Job, ranks: int) -> None:
    results = job(POLICIES, json.dumps(CASES), ranks=ranks, options=None)
    assert [code for code, _ in results] == [0] * ranks, results
    found = [job.answer(f"found{rank}.json") for rank in range(ranks)]
    for wrapper, policy, fault in CASES:
        each = [one[f"{wrapper}/{policy}/{fault}"] for one in found]
        first, last = each[0], each[-1]
        assert all(one["weights"] == first["weights"] for one in each), (wrapper, policy, fault)
        assert all(one["updates"] == first["updates"] for one in each)
        assert all(one["dropped"] == first["dropped"] for one in each)
        assert all(one["raised"] is (policy == "raise") for one in each)
        assert first["finite"] is (policy != "warn")
        if policy in ("skip", "rollback"):
            assert first["dropped"] == ([5] if fault == "shard" else [5, 9])
        if policy == "skip":
            assert set(first["updates"]) == {60 - len(first["dropped"])}
        if policy != "warn" and fault != "shard":
            assert all((one["line"], one["cause"]) == (None, "collective") for one in each[:-1])
            assert last["line"] == job.line("forward") if fault == "forward" else last["line"] is not None


def test_steps_that_exchange_values(job: Job) -> None:
    results = job(EXCHANGES, options=None)
    assert [code for code, _ in results] == [0, 0], results
    first, second = job.answer("found0.json"), job.answer("found1.json")
    assert first["count"] == first["zero"] == first["hook"] == [6, None, "collective"]
    assert second["count"] == [6, job.line("count"), "log_of_zero"]
    assert second["zero"] == [6, job.line("zero"), "log_of_zero"]
    assert first["norm"] == second["norm"] == [6, job.line("norm"), "zero_over_zero"]
    assert first["half"] == second["half"] == [6, job.line("half"), "low_precision_overflow"]
    assert second["hook"] == [6, job.line("hook"), "low_precision_overflow"]
    assert second["experts"] == [job.line("experts"), None]  # no sample of this rank
    assert second["gather"] == [6, job.line("gather"), "zero_over_zero"]
    assert (first["stages"], second["stages"]) == (None, [6, job.line("stages"), "zero_over_zero"])


def test_a_program_that_leaves_its_group_before_it_ends_with_its_own_error(job: Job) -> None:
    _, (code, error) = job(LEAVES)
    assert code == 3
    assert "RuntimeError: the loss is NaN" in error
    assert "tried: step 6 is finite" in error
    found = job.answer("out.rank1.json")
    assert (found["origin"]["line"], found["cause"]["slug"]) == (job.line("own check"), "zero_over_zero")
    assert found["batch"]["bad_samples"] == [3]
    assert [one["what"] for one in found["ranks"]] == ["unknown", "created"]


def test_ranks_that_stop_together_at_a_bad_loss(job: Job) -> None:
    """The step is replayed before the rank leaves its group: after that the model could not be called."""
    (first, _), (second, _) = job(STOPS, options="--verify 0")
    assert (first, second) == (5, 3)
    found = job.answer("out.rank1.json")
    assert (found["step"], found["origin"]["line"], found["batch"]["bad_samples"]) == (6, job.line("forward"), [3])


def test_replicas_that_drift_apart(job: Job) -> None:
    results = job(REPLICAS, ranks=4, options=None)
    assert [code for code, _ in results] == [0] * 4, results
    found = [job.answer(f"found{rank}.json") for rank in range(4)]
    assert all(one["quiet"] == [[], [], []] for one in found)
    ((kind, message, step, name),) = [event for one in found for event in one["drift"]]
    assert (kind, step, name) == ("replicas", 13, "2.weight")
    assert "replicas differ after step 13: parameter 2.weight has other values on rank 1 than on rank" in message
    assert message.endswith("they were equal after step 11")


def test_weights_whose_memory_is_freed_until_they_are_gathered_again() -> None:
    weight = torch.ones(8, requires_grad=True)
    weight.untyped_storage().resize_(0)
    hand_written = HandWritten()
    hand_written.note([weight], [torch.ones(8)])
    assert hand_written.backward_without_step() is None


# The exchange, without processes.


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.3)
    monkeypatch.setattr(module, "_LATER", 0.0)
    monkeypatch.setattr(module, "_LONGEST", 2.0)


def finding(rank: int, size: int, step: int, *, created: bool = False, noticed: str = "gradient") -> Report:
    cause = None if created else received(rank, size)
    origin = Origin("forward", "log", "aten.log.default") if created else None
    return Report("nonfinite", step=step, cause=cause, origin=origin, rank=rank, noticed=Noticed(noticed))  # type: ignore[arg-type]


def exchanged(reports: list[Report | None], store: Any) -> list[Report | None]:
    """What each rank gets; None in the place of a rank that does not come."""
    size = len(reports)

    def one(rank: int) -> Report | None:
        report = reports[rank]
        return Ranks(World(rank, size, False), store).exchange(report) if report is not None else None

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.usefixtures("hurried")
def test_the_earliest_step_is_first_and_what_was_created_comes_before_what_was_received() -> None:
    reports: list[Report | None] = [finding(rank, 100, 7) for rank in range(100)]
    reports[40] = finding(40, 100, 7, created=True)
    found = exchanged(reports, dist.HashStore())
    assert [rank for rank, one in enumerate(found) if one is not None] == [40]
    assert found[40] is not None
    assert [one.rank for one in found[40].ranks if one.what == "created"] == [40]
    assert ranks_line(found[40].ranks, 100).endswith("36 more ranks are not listed")
    reports[60] = finding(60, 100, 6)
    assert [rank for rank, one in enumerate(exchanged(reports, dist.HashStore())) if one is not None] == [60]


def test_ranks_that_were_spawned_have_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = WorkerReports()
    for rank, created in ((0, False), (2, True)):
        monkeypatch.setattr(os, "getpid", lambda rank=rank: rank)
        reports.add(replace(finding(rank, 3, 7, created=created), world_size=3))
    found = reports.first()
    assert found is not None
    assert (found.rank, [one.what for one in found.ranks]) == (2, ["received", "unknown", "created"])


@pytest.mark.usefixtures("hurried")
def test_ranks_that_do_not_come() -> None:
    reports = [None, finding(1, 4, 7), finding(2, 4, 7, created=True), None]
    found = exchanged(reports, dist.HashStore())
    assert [one is not None for one in found] == [False, False, True, False]
    assert found[2] is not None
    assert [one.what for one in found[2].ranks] == ["unknown", "received", "created", "unknown"]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("begun", [True, False])
def test_a_rank_that_still_investigates_is_waited_for(begun: bool) -> None:
    store = dist.HashStore()
    received, created = (Ranks(World(rank, 2, False), store) for rank in range(2))
    received.begin()
    if begun:
        created.begin()
        created.begin()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(received.exchange, finding(0, 2, 7))
        time.sleep(1.5 * module._PATIENCE)
        late = created.exchange(finding(1, 2, 7, created=True))
        assert [early.result() is None, late is not None] == [begun, begun]


def test_a_failure_that_others_get_nothing_of_is_answered_at_once(job: Job) -> None:
    """Finite gradients of an empty batch."""
    job(ALONE.replace("MODEL", "model = DDP(net.eval())").replace("CHANGED", "x[:0]"), options="--verify 0")
    found = job.answer()
    assert (found["rank"], found["step"]) == (1, 2)
    assert [one["what"] for one in found["ranks"]] == ["unknown", "created"]
    assert (job.folder / "0.out").read_text() == "True\n"


def test_ranks_that_got_nothing_of_it_are_not_waited_for() -> None:
    """A loss may be bad while its gradients are finite: nobody else finds anything, however long one waits."""
    ranks = Ranks(World(1, 3, False), dist.HashStore())
    began = time.monotonic()
    ranks.announce(finding(1, 3, 7, created=True))
    first = ranks.exchange(finding(1, 3, 7, created=True), by_all=False)
    assert first is not None
    assert [one.what for one in first.ranks] == ["unknown", "created", "unknown"]
    assert time.monotonic() - began < 10


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(("noticed", "named"), [("loss", "rank 1"), ("gradient", "not known")])
def test_nobody_has_created_it(noticed: str, named: str) -> None:
    found = exchanged([finding(0, 2, 7), finding(1, 2, 7, noticed=noticed)], dist.HashStore())
    (first,) = [one for one in found if one is not None]
    assert first.cause is not None
    assert (first.cause.slug, first.reproduced) == ("transient", "transient")
    assert named in first.cause.why


@pytest.mark.usefixtures("hurried")
def test_the_store_is_gone() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ConnectionError("Broken pipe")

    ranks = Ranks(World(1, 2, False), Gone())
    report = finding(1, 2, 7)
    told = ranks.exchange(report)
    assert told == replace(report, ranks=(RankFinding(0, "unknown"), RankFinding(1, "received", 7)))
    ranks.settle(report)
    ranks.wait_for_end()
    assert ranks.answer() is None


def test_what_all_ranks_foresee_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(module, "_default_store", lambda: store)
    monkeypatch.setattr(module, "world", lambda: World(0, 3, False))
    assert [Ranks().says_first("forecast 1") for _ in range(3)] == [True, False, False]
    assert Ranks().says_first("forecast 2")


@pytest.mark.usefixtures("hurried")
def test_the_answer_reaches_rank_0_before_anybody_ends() -> None:
    store, order = dist.HashStore(), []
    first, other = (Ranks(World(rank, 2, False), store) for rank in (1, 0))
    created = finding(1, 2, 7, created=True)

    def receive() -> None:
        assert other.exchange(finding(0, 2, 7)) is None
        answer = other.answer()
        assert answer is not None
        assert answer.rank == 1
        order.append("written")
        other.written()
        other.wait_for_end()
        order.append("ended")

    thread = threading.Thread(target=receive)
    thread.start()
    report = first.exchange(created)
    assert report is not None
    first.settle(report)
    order.append("settled")
    thread.join()
    assert order[0] == "written"


def test_collectives_are_kept_within_a_limit_and_only_if_they_can_be_copied() -> None:
    kept, frame = collectives.Collectives(), sys._getframe()

    def is_kept(tensor: torch.Tensor, step: int) -> bool:
        call = kept.begin("all_reduce", (tensor,), {}, step, frame)
        kept.left()
        return call is not None

    large = torch.zeros(collectives._MOST_BYTES // 8)  # half of the limit
    assert not is_kept(torch.eye(4).to_sparse(), 0)
    assert [is_kept(large, 0) for _ in range(3)] == [True, True, False]
    assert is_kept(large, 1)
