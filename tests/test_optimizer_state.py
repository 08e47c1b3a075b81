"""The state of optimizers is watched as the weights are; copies of a model and frozen parameters are told apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from firstnan.gate.gate import Gate
from firstnan.tensors.models import FROZEN, IN_COPY, Models, state_tensors
from zygote import Zygote

pytest_plugins = ["zygote"]


def trained(optimizer: Any, model: nn.Module, gate: Gate, *, steps: int, scale: float = 1.0) -> list[Any]:
    """What the gate notices in these steps."""
    seen = []
    for _ in range(steps):
        loss = model(torch.ones(4, 3)).square().mean() * scale
        optimizer.zero_grad()
        gate.backward_begins([loss])
        loss.backward()
        seen += gate.check_update(optimizer, False)
        gate.update_begins(optimizer)
        optimizer.step()
        seen += gate.update_ended(optimizer)
    return [trip.noticed for trip in seen]


def adam(**options: Any) -> tuple[Any, nn.Module, Gate]:
    torch.manual_seed(0)
    model, gate = nn.Linear(3, 2), Gate()
    gate.watch_models(Models({"": model}))
    return torch.optim.Adam(model.parameters(), lr=1e-3, **options), model, gate


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}])
def test_a_second_moment_that_overflows_is_noticed_at_once(options: dict[str, Any]) -> None:
    optimizer, model, gate = adam(**options)
    assert trained(optimizer, model, gate, steps=5) == []
    (noticed,) = trained(optimizer, model, gate, steps=1, scale=1e25)
    assert (noticed.what, noticed.name) == ("state", "exp_avg_sq of weight")


def test_large_gradients_that_do_not_overflow_are_not_noticed() -> None:
    optimizer, model, gate = adam()
    assert trained(optimizer, model, gate, steps=3, scale=1e16) == []


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_infinite_weights_that_are_not_trained_are_the_programs_own(kind: Any) -> None:
    model, gate = nn.Embedding(4, 3), Gate()
    with torch.no_grad():
        model.weight[0] = -torch.inf
    optimizer = kind(model.parameters(), lr=0.1)

    def step(row: int) -> list[Any]:
        optimizer.zero_grad()
        loss = model(torch.tensor([1, row])).square().mean()
        gate.backward_begins([loss])
        loss.backward()
        seen = [*gate.check_update(optimizer, False)]
        gate.update_begins(optimizer)
        optimizer.step()
        return [trip.noticed.what for trip in (*seen, *gate.update_ended(optimizer))]

    assert [step(2) for _ in range(3)] == [[], [], []]
    optimizer.zero_grad()
    assert gate.remaining_nonfinite() is None
    with torch.no_grad():
        model.weight[3] = torch.nan
    assert step(2) == ["parameter"]


@pytest.mark.parametrize("frugal", [False, True])
def test_state_that_went_bad_otherwise_is_noticed_after_some_updates(frugal: bool) -> None:
    optimizer, model, _ = adam()
    gate = Gate(frugal=frugal)
    trained(optimizer, model, gate, steps=2)
    optimizer.state[model.bias]["exp_avg_sq"][0] = torch.inf
    assert "state" in [noticed.what for noticed in trained(optimizer, model, gate, steps=64)]


def test_what_is_left_at_the_end_is_noticed() -> None:
    optimizer, model, gate = adam()
    trained(optimizer, model, gate, steps=2)
    assert gate.remaining_nonfinite() is None
    optimizer.state[model.bias]["exp_avg_sq"][0] = torch.inf
    left = gate.remaining_nonfinite()
    assert left is not None
    assert left.noticed.what == "state"


def test_numbers_that_an_optimizer_counts_with_may_be_infinite() -> None:
    class Plateau(torch.optim.SGD):
        """Keeps the least loss so far, which begins with infinity."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("least", torch.tensor(torch.inf))
            return super().step(closure)

    model, gate = nn.Linear(3, 2), Gate(thorough=True)
    optimizer = Plateau(model.parameters(), lr=1e-3, momentum=0.9)
    assert trained(optimizer, model, gate, steps=3) == []
    assert {name for _, name, _ in state_tensors(optimizer)} == {"momentum_buffer"}


# --- copies and frozen parameters ---------------------------------------------------------------------------------


def test_a_copy_and_frozen_parameters_have_names_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    average, other = copy.deepcopy(model), nn.Conv1d(1, 1, 1)
    models = Models({"": model})
    models._collect(average, "")
    models._collect(other, "head")
    models.tell_apart({id(p) for p in model[1].parameters()})
    assert models.name(model[1].weight) == "1.weight"
    assert models.name(model[0].weight) == f"0.weight {FROZEN}"
    assert models.name(average[1].weight) == f"1.weight {IN_COPY}"
    assert models.name(other.weight) == "head.weight"
    assert len(models.copied) == 2


# --- whole programs -----------------------------------------------------------------------------------------------

FREEZES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(64, 8)
for step in range(40):
    weight = 1e26 if step == 17 else 1.0
    loss = (weight * (model(x) - x[:, :1]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # <-
"""

AVERAGES = """
import copy
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
average = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(64, 8)
for step in range(20):
    loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, a in zip(model.parameters(), average.parameters()):
            a.mul_(DECAY).add_(p, alpha=0.1)
"""


def test_training_that_freezes_without_a_nan_is_found(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FREEZES)
    result = firstnan(["run", "--verify", "5", "train.py"], cwd=tmp_path)
    found, line = result.found, 1 + next(i for i, x in enumerate(FREEZES.splitlines()) if x.endswith("# <-"))
    assert (found["step"], found["origin"]["line"], result.cause) == (17, line, "optimizer_overflow")
    assert found["noticed"]["what"] == "state"
    assert "never updated again" in found["cause"]["why"]
    assert "clip_grad_norm_" in found["remedies"][0]["diff"]
    assert found["remedies"][0]["failing_step_finite"]


def test_an_average_of_the_weights_that_is_not_finite_is_not_training(firstnan: Zygote, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(AVERAGES.replace("DECAY", "0.9 / torch.tensor(float(step)) * step"))
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    assert result.code == 0
    assert "in a copy of the model that is not trained) holds NaN" in result.stderr
    (tmp_path / "train.py").write_text(AVERAGES.replace("DECAY", "0.9"))
    assert firstnan(["run", "train.py"], cwd=tmp_path).stderr == ""
