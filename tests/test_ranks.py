"""Processes that train together: the first to fail is named, replicas stay alike, and nobody hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[1] / "src"

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
        return (out - torch.log(x.sum(1, keepdim=True))).square().mean()  # here
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

BACKWARD = """
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(12):
        x = torch.rand(8, 6, generator=draw) + 0.1
        target = model(x)
        bad = step == 6 and rank == 0
        spread = (target * 0 if bad else target).square().sum(1).sqrt().mean()  # here
        optimizer.zero_grad()
        (loss_of(target, x) + 0.01 * spread).backward()  # not here
        optimizer.step()
    dist.destroy_process_group()
"""

HEALTHY = LOADER.replace("data[81] = 0", "")

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

DETECTOR = """
    from firstnan import NaNDetector, NonFiniteError
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    detector = NaNDetector(model, optimizer, on_nonfinite=sys.argv[1])
    raised = False
    try:
        with detector:
            for step in range(60):
                x = torch.rand(8, 6, generator=draw) + 0.1
                if step in (5, 9) and rank == size - 1:
                    x[3] = 0
                optimizer.zero_grad()
                loss_of(model(x), x).backward()
                optimizer.step()
    except NonFiniteError:
        raised = True
    content = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    report = detector.report
    found = {
        "weights": hashlib.sha256(content).hexdigest(),
        "finite": all(bool(p.isfinite().all()) for p in net.parameters()),
        "line": report.origin.site.line if report and report.origin else None,
        "cause": report.cause.slug if report and report.cause else None,
        "raised": raised,
    }
    open(f"found{rank}.json", "w").write(json.dumps(found))
    dist.barrier()
"""

SHARDED = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (size,))
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)

    def train(steps):
        for step in range(steps):
            x = torch.rand(8, 6, generator=draw) + 0.1
            if bad_data and step == 7 and rank == size - 1:
                x[3] = 0
            optimizer.zero_grad()
            loss_of(net(x), x).backward()
            if not bad_data and step == 5 and rank == 0:
                net[0].weight.grad.to_local()[0, 0] = float("nan")  # in the part of one rank only
            optimizer.step()
"""

SHARDED_RUN = (
    SHARDED
    + """
    bad_data = True
    train(20)
    dist.destroy_process_group()
"""
)

SHARDED_SKIP = (
    SHARDED
    + """
    from firstnan import NaNDetector
    bad_data = False
    with NaNDetector(net, optimizer, on_nonfinite="skip") as detector:
        train(20)
    finite = all(bool(p.to_local().isfinite().all()) for p in net.parameters())
    kinds = [event.kind for event in detector.events]
    steps = optimizer.state[net[0].weight]["step"].item()
    open(f"found{rank}.json", "w").write(json.dumps({"finite": finite, "kinds": kinds, "steps": steps}))
    dist.barrier()
"""
)


def run(folder: Path, text: str, *words: str, ranks: int = 2, firstnan: bool = True) -> list[tuple[int, str]]:
    """Starts the ranks of a program as a launcher does; returns exit code and stderr of each."""
    (folder / "train.py").write_text(textwrap.dedent(BEGIN) + textwrap.dedent(text))
    with socket.socket() as any_socket:
        any_socket.bind(("127.0.0.1", 0))
        port = any_socket.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "firstnan", "run", "--json", "out.json"] if firstnan else [sys.executable]
    processes = [
        subprocess.Popen(
            [*command, "train.py", *words],
            cwd=folder,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def answer(folder: Path, name: str = "out.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())  # type: ignore[no-any-return]


def line_of(folder: Path, mark: str = "# here") -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return max(i for i, line in enumerate(lines, 1) if line.endswith(mark))


def test_the_rank_with_the_bad_sample_is_named(tmp_path: Path) -> None:
    (first, quiet), (second, told) = run(tmp_path, LOADER)
    assert (first, second) == (3, 3)
    found, other = answer(tmp_path), answer(tmp_path, "out.rank0.json")
    assert (found["rank"], found["world_size"], found["step"]) == (1, 2, 5)
    assert found["origin"]["line"] == line_of(tmp_path)
    assert (found["batch"]["dataset_indices"], found["batch"]["confirmed"]) == ([81], True)
    assert found["remedies"][0]["failing_step_finite"]
    assert [one["what"] for one in found["ranks"]] == ["received", "created"]
    assert other["cause"]["slug"] == "collective"
    assert answer(tmp_path, "out.rank1.json")["origin"] == found["origin"]
    assert "rank 1 of 2" in told
    assert "created on rank 1; received from another by rank 0" in told
    assert "firstnan" not in quiet


def test_a_gradient_without_a_loader(tmp_path: Path) -> None:
    run(tmp_path, BACKWARD, "--verify", "0")
    found = answer(tmp_path)
    assert (found["rank"], found["step"], found["origin"]["phase"]) == (0, 6, "backward")
    assert found["origin"]["line"] == line_of(tmp_path, "# here")


def test_healthy_ranks_are_silent(tmp_path: Path) -> None:
    assert run(tmp_path, HEALTHY) == [(0, ""), (0, "")]
    assert answer(tmp_path)["verdict"] == "clean"
    assert not list(tmp_path.glob("out.rank*"))


def test_a_rank_that_raises_something_else_holds_nobody_up(tmp_path: Path) -> None:
    (first, _), (second, error) = run(tmp_path, DIES)
    assert (first, second) == (1, 1)
    assert error.rstrip().endswith("ValueError: the disk is full")
    assert answer(tmp_path)["verdict"] == "clean"


@pytest.mark.parametrize("policy", ["skip", "rollback", "warn", "raise"])
def test_replicas_stay_alike(tmp_path: Path, policy: str) -> None:
    codes = [code for code, _ in run(tmp_path, DETECTOR, policy, firstnan=False)]
    assert codes == [0, 0]
    first, second = answer(tmp_path, "found0.json"), answer(tmp_path, "found1.json")
    assert first["weights"] == second["weights"]
    assert first["finite"] is (policy != "warn")
    assert (first["raised"], second["raised"]) == (policy == "raise", policy == "raise")
    if policy != "warn":
        assert (first["line"], first["cause"]) == (None, "collective")
        assert (second["line"], second["cause"]) == (line_of(tmp_path), "log_of_zero")


def test_sharded_weights_are_gathered_for_the_replay(tmp_path: Path) -> None:
    run(tmp_path, SHARDED_RUN)
    found = answer(tmp_path)
    assert (found["rank"], found["step"]) == (1, 7)
    assert found["origin"]["line"] == line_of(tmp_path)
    assert found["batch"]["bad_samples"] == [3]


def test_ranks_that_see_a_part_of_the_gradients_decide_together(tmp_path: Path) -> None:
    assert [code for code, _ in run(tmp_path, SHARDED_SKIP, firstnan=False)] == [0, 0]
    for name in ("found0.json", "found1.json"):
        found = answer(tmp_path, name)
        assert (found["finite"], found["steps"]) == (True, 19)
        assert found["kinds"].count("skipped") == 1
