"""The state of training goes into a capsule and comes back into other objects, each where it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firstnan.capsule import file
from firstnan.capsule.content import Capsule, load
from firstnan.capsule.state import Capture, Restorer
from firstnan.gate.gate import Gate
from firstnan.records import Report
from firstnan.tensors.models import TrainingObjects


class Training:
    """Two models of one class with an optimizer each, an average, loose weights, a scaler, a schedule."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.one, self.two, self.average = (self.net() for _ in range(3))
        self.loose = torch.randn(3, requires_grad=True)
        self.of_one = torch.optim.Adam([{"params": self.one.parameters()}, {"params": [self.loose], "lr": 0.5}], lr=0.1)
        self.of_two = torch.optim.SGD(self.two.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.of_two, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**seed)  # type: ignore[attr-defined]

    @staticmethod
    def net() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        net[2].weight = net[0].weight
        return net

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.of_one.zero_grad()
            self.of_two.zero_grad()
            loss = self.one(torch.randn(4, 3)).mean() + self.two(torch.randn(4, 3)).mean() + self.loose.sum()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.of_one)
            self.scaler.step(self.of_two)
            self.scaler.update()
            self.schedule.step()

    def objects(self, *order: nn.Module) -> TrainingObjects:
        found = TrainingObjects.find([self.of_one, self.of_two], {str(i): m for i, m in enumerate(order)})
        mine = [s for s in found.scalers if s is self.scaler]
        return TrainingObjects(found.models, found.optimizers, mine, found.schedulers)

    def state(self) -> list[Any]:
        nets = [m.state_dict() for m in (self.one, self.two, self.average)]
        return [*nets, self.loose, *(o.state_dict() for o in (self.of_one, self.of_two)), self.schedule.state_dict(),
                self.scaler.state_dict()]  # fmt: skip


def kept(training: Training, folder: Path, objects: TrainingObjects) -> Capsule:
    gate = Gate()
    manifest, tensors, _ = Capture(objects, gate, []).within(1 << 30)
    entries = {"report": Report("nonfinite", 7).to_dict(), "environment": {}, "sources": {}}
    return load(file.write(folder / "x.capsule", {**manifest, **entries}, tensors))


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def test_everything_that_trains_comes_back(tmp_path: Path) -> None:
    here, there = Training(1), Training(2)
    here.train(5)
    there.train(1)
    capsule = kept(here, tmp_path, here.objects(here.one, here.two, here.average))
    assert not equal(here.state(), there.state())
    memory = there.one[0].weight.data_ptr()
    restorer = Restorer(capsule, there.objects(there.one, there.two, there.average))
    restorer.weights()
    restorer.training()
    assert restorer.notes == []
    assert equal(here.state(), there.state())
    assert there.one[0].weight is there.one[2].weight
    assert there.one[0].weight.data_ptr() == memory, "the program's own tensors are written, not replaced"
    for training in (here, there):
        torch.manual_seed(9)
        training.train(3)
    assert equal(here.state(), there.state()), "and training goes on as it would have"


def test_models_are_known_by_what_an_optimizer_trains_not_by_when_they_are_found() -> None:
    training = Training(1)
    training.average = training.two  # only those two live here
    models = [training.two, training.one]
    found = TrainingObjects.find([training.of_one, training.of_two])
    mine = [m for m in found.models if any(m.parameters.get("0.weight") is n[0].weight for n in models)]
    assert [m.parameters["0.weight"] is n[0].weight for m, n in zip(mine, reversed(models), strict=True)] == [
        True,
        True,
    ]


def test_an_optimizer_that_is_not_there_and_one_of_another_kind(tmp_path: Path) -> None:
    here, there = Training(1), Training(2)
    here.train(3)
    capsule = kept(here, tmp_path, here.objects(here.one, here.two, here.average))
    other = torch.optim.RMSprop(there.one.parameters(), lr=0.3)
    restorer = Restorer(capsule, TrainingObjects.find([other], {"": there.one}))
    restorer.weights()
    restorer.training()
    assert restorer.optimizers == [other, None]
    assert any("no optimizer of this program matches the captured SGD" in note for note in restorer.notes)
    assert sum("no model of this program matches the captured Sequential" in note for note in restorer.notes) == 2
    assert equal(there.one.state_dict(), here.one.state_dict())


def test_a_capsule_over_the_limit_leaves_the_optimizers_state_out(tmp_path: Path) -> None:
    training = Training(1)
    training.train(1)
    objects = training.objects(training.one)
    capture = Capture(objects, Gate(), [])
    whole, tensors, missing = capture.within(1 << 30)
    size = sum(t.nbytes for t in tensors.values())
    assert missing == ""
    less, fewer, missing = capture.within(size - 1)
    assert "the optimizer state" in missing
    assert missing in less["left_out"]
    assert sum(t.nbytes for t in fewer.values()) < size
    assert whole["optimizers"][0]["groups"][0]["parameters"][0][2] is not None
    assert less["optimizers"][0]["groups"][0]["parameters"][0][2] is None
