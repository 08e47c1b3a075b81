"""Loops that belong to a library: it fetches the batches (one ahead), counts them, and updates with a closure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from firstnan import NaNDetector, NonFiniteError
from firstnan.tensors.models import unwrapped
from zygote import Zygote

pytest_plugins = ["zygote"]

LIBRARY = """\
import torch


class Fetcher:
    # Knows in advance whether a batch is the last one, and never hands out more than there are.
    def __init__(self, loader, ahead):
        self.iterator, self.left, self.waiting = iter(loader), len(loader), []
        for _ in range(ahead):
            self.waiting.append(next(self.iterator))

    def fetch(self):
        if self.left == 0:
            raise StopIteration
        self.left -= 1
        if not self.waiting:
            return next(self.iterator)
        batch = self.waiting.pop(0)
        try:
            self.waiting.append(next(self.iterator))
        except StopIteration:
            pass
        return batch


class Closure:
    def __init__(self, step, batch):
        self.step, self.batch = step, batch

    def __call__(self):
        loss = self.step(self.batch)
        loss.backward()
        return loss


def generated(fetcher, advance):
    # A loop that cannot be taken from its source: it is left and entered again.
    while True:
        try:
            advance(fetcher)
        except StopIteration:
            return
        yield


class Trainer:
    def __init__(self, ahead):
        self.ahead = ahead

    def fit(self, module, loader):
        self.module, self.optimizer = module, module.configure()
        self.run(Fetcher(loader, self.ahead))
        if self.ahead >= 0:
            self.run(Fetcher(loader, self.ahead))

    def run(self, fetcher):
        if self.ahead < 0:
            list(generated(fetcher, self.advance))
            return
        while True:
            try:
                self.advance(fetcher)
            except StopIteration:
                break

    def advance(self, fetcher):
        batch = fetcher.fetch()
        self.optimize({"batch": batch})

    def optimize(self, kwargs):
        self.optimizer.zero_grad()
        self.optimizer.step(Closure(self.module.training_step, kwargs["batch"]))
"""

PROGRAM = """\
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from loops import Trainer


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        x, y = batch
        loss = ((self.layer(x).squeeze(1) - y) ** 2 / y).mean()  # born: training
        return loss

    def configure(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


torch.manual_seed(0)
x, y = torch.randn(64, 4), torch.rand(64) + 0.5
y[37] = 0.0
loader = DataLoader(TensorDataset(x, y), batch_size=8)
net, trainer = Net(), Trainer(ahead=int(sys.argv[1]))
if len(sys.argv) > 2:
    from firstnan import NaNDetector

    with NaNDetector(net):
        trainer.fit(net, loader)
else:
    trainer.fit(net, loader)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "loops.py").write_text(LIBRARY)
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nsys.path.append({str(folder)!r})\n" + PROGRAM)
    return path


LINE = 2 + PROGRAM[: PROGRAM.index("# born")].count("\n") + 1


@pytest.mark.parametrize("ahead", ["-1", "0", "1", "2"])
def test_line_batch_and_sample_in_the_loop_of_a_library(firstnan: Zygote, program: Path, ahead: str) -> None:
    result = firstnan(["run", program, ahead], cwd=program.parent)
    assert (result.origin["line"], result.found["step"], result.cause) == (LINE, 4, "div_by_zero")
    batch = result.found["batch"]
    if ahead == "2":  # which of the batches fetched so far the step uses is not known then
        return
    assert (batch["index"], batch["bad_samples"], batch["dataset_indices"]) == (4, [5], [37])
    assert batch["confirmed"]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["-1", "0", "1"])
def test_a_detector_around_the_library_adopts_its_optimizer(program: Path, ahead: str) -> None:
    command = [sys.executable, program, ahead, "detector"]
    done = subprocess.run(
        command,
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
    )
    assert done.returncode == 1
    assert f"created in forward, step 4, at train.py:{LINE}" in done.stderr
    assert "batch 4, sample 5 of 8, dataset index 37, confirmed by" in done.stderr


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_the_closure_of_a_torch_optimizer_runs_before_its_gradients_are_judged(policy: str) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x).sum().sqrt().log()
        loss.backward()
        return loss

    x = torch.ones(2, 3)
    with torch.no_grad():
        model.weight.fill_(1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with NaNDetector(model, optimizer, on_nonfinite=policy, guard="off") as detector:  # type: ignore[arg-type]
        assert optimizer.step(closure) is not None
        assert len(calls) == 1
        good = [p.detach().clone() for p in model.parameters()]
        assert not all(map(torch.equal, before, good))
        x = -torch.ones(2, 3)
        if policy == "raise":
            with pytest.raises(NonFiniteError):
                optimizer.step(closure)
        else:
            optimizer.step(closure)
            assert detector.summary()["skipped"] == 1
        assert all(map(torch.equal, good, [p.detach() for p in model.parameters()]))


def test_closures_leave_the_numbers_as_they_are() -> None:
    def train(watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        detector = NaNDetector(model, optimizer).attach() if watched else None

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            return loss.item()

        losses = [optimizer.step(closure) for _ in range(5)]
        assert all(isinstance(loss, float) for loss in losses)
        if detector is not None:
            detector.detach()
        return [*(p.detach() for p in model.parameters()), torch.tensor(losses)]

    assert all(map(torch.equal, train(False), train(True)))


def test_lbfgs_calls_its_closure_as_often_as_without_us() -> None:
    def count(watched: bool) -> int:
        torch.manual_seed(0)
        model, calls = torch.nn.Linear(4, 1), []
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        detector = NaNDetector(model, optimizer).attach() if watched else None
        x = torch.randn(8, 4)

        def closure() -> torch.Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if detector is not None:
            detector.detach()
        return len(calls)

    assert count(False) == count(True) > 1


class Wrapped(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: without the fields of one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list:  # type: ignore[override, type-arg]
        return self.optimizer.param_groups

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()


def test_a_wrapped_optimizer_is_watched_inside() -> None:
    model = torch.nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Wrapped(inner)
    assert unwrapped(optimizer) is inner
    assert unwrapped(inner) is inner
    with NaNDetector(model, optimizer, guard="off") as detector:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert detector.summary()["steps"] == 1


def test_the_last_batch_of_a_loader_that_was_fetched_ahead(firstnan: Zygote, program: Path) -> None:
    """The step with it begins when the loader has nothing more, not when the batch was fetched."""
    text = (
        program.read_text()
        .replace("y[37]", "y[61]")
        .replace("self.layer(x)", "torch.dropout(self.layer(x), 0.5, True)")
    )
    program.write_text(text)
    found = firstnan(["run", program, "1"], cwd=program.parent).found
    assert (found["step"], found["reproduced"]) == (7, "deterministic")
    assert (found["batch"]["dataset_indices"], found["batch"]["confirmed"]) == ([61], True)
