"""Measures forecasts: how long before the first non-finite value they come, and how many healthy trainings get one.

    python benchmarks/forecast.py [--only NAME...] [--set first|second|third|all] [--verbose]

The rule was made with the programs of the first set; those of the second were written after it was fixed. Those of the
third were written before the forecasts of weights, operators and attention, which were made with all three in view.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from firstnan import NaNDetector
from firstnan.records import NaNEvent

torch.set_num_threads(1)
LEAD = 5
"""A warning is in time if it comes so many steps before the first non-finite value."""


class DivergedError(Exception):
    """A loss or gradient is not finite."""


Step = Callable[[int], None]


@dataclass
class Training:
    models: dict[str, nn.Module]
    optimizers: list[Any]
    step: Step


def update(optimizer: Any, loss: Tensor, clip: float | None = None, scaler: Any = None) -> None:
    """One update, if loss and gradients are finite."""
    if not math.isfinite(loss.item()):
        raise DivergedError
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 1:
            raise DivergedError
        return
    loss.backward()
    if any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in parameters):
        raise DivergedError
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    if not all(bool(torch.isfinite(v).all()) for v in kept):
        raise DivergedError


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(*[part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), act())][:-1])


@dataclass(frozen=True)
class Program:
    name: str
    diverges: bool
    steps: int
    make: Callable[[], Training]
    group: str = "first"


PROGRAMS: list[Program] = []


def program(name: str, steps: int, *, diverges: bool = False, group: str = "first") -> Callable[[Any], Any]:
    def add(make: Callable[[], Training]) -> Callable[[], Training]:
        PROGRAMS.append(Program(name, diverges, steps, make, group))
        return make

    return add


@dataclass
class Outcome:
    name: str
    diverges: bool
    failed: int | None = None
    """The first step with a non-finite value."""
    forecasts: list[NaNEvent] = field(default_factory=list)
    others: list[NaNEvent] = field(default_factory=list)
    """Warnings of the growth guard."""

    @property
    def lead(self) -> int | None:
        """Steps between the first forecast and the failure."""
        steps = [e.step for e in self.forecasts if e.kind == "forecast" and e.step is not None]
        return self.failed - min(steps) if steps and self.failed is not None else None

    @property
    def guard_lead(self) -> int | None:
        steps = [e.step for e in self.others if e.step is not None]
        return self.failed - min(steps) if steps and self.failed is not None else None


def run(program: Program) -> Outcome:
    torch.manual_seed(0)
    training, found = program.make(), Outcome(program.name, program.diverges)

    def noticed(event: NaNEvent) -> None:
        if event.kind in ("forecast", "withdrawn"):
            found.forecasts.append(event)
        elif event.kind in ("spike", "explosion"):
            found.others.append(event)

    with NaNDetector(training.models, training.optimizers, layers=True, on_nonfinite="warn", on_event=noticed):
        for t in range(program.steps):
            try:
                training.step(t)
            except DivergedError:
                found.failed = t
                break
    return found


# --- the first set: training that diverges ------------------------------------------------------------------------


def regression(model: nn.Module, optimizer: Any, *, noise: float = 0.1, scale: float = 1.0, **more: Any) -> Training:
    x = torch.randn(512, 10)
    y = x.sum(1, keepdim=True) * scale

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.mse_loss(model(x[rows]), y[rows] + noise * torch.randn(32, 1)), **more)

    return Training({"": model}, [optimizer], step)


def classification(model: nn.Module, optimizer: Any, *, before: Step = lambda t: None, **more: Any) -> Training:
    x = torch.randn(512, 10)
    y = x[:, :3].argmax(1)

    def step(t: int) -> None:
        before(t)
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]), **more)

    return Training({"": model}, [optimizer], step)


def rate(optimizer: Any, of: Callable[[int], float]) -> Step:
    def before(t: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = of(t)

    return before


@program("linear regression, rate too high", 2000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=1.2))


@program("linear regression, rate slightly too high", 4000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=1.0))


@program("momentum 0.99 and a large rate", 2000, diverges=True)
def _() -> Training:
    model = mlp(10, 32, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.99))


@program("warm-up that overshoots", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-3 * t), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("RNN that explodes", 3000, diverges=True)
def _() -> Training:
    cell, head = nn.RNN(4, 16, nonlinearity="relu", batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        x = torch.randn(16, 30, 4)
        update(optimizer, F.mse_loss(head(cell(x)[0][:, -1]), x.sum((1, 2))[:, None]))

    return Training({"": model}, [optimizer], step)


@program("deep network without normalisation, large rate", 2000, diverges=True)
def _() -> Training:
    model = mlp(10, 64, 64, 64, 64, 1, act=nn.Identity)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 2e-4 * t), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("value function that blows up (off-policy)", 5000, diverges=True)
def _() -> Training:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    a, b = torch.tensor([[1.0, 0.2]]), torch.tensor([[2.0, 0.5]])

    def step(t: int) -> None:
        target = 0.99 * model(b).detach() + 0.1
        update(optimizer, F.mse_loss(model(a), target))

    return Training({"": model}, [optimizer], step)


@program("float16 activations, weights that grow without decay", 3000, diverges=True)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x[torch.randint(0, 512, (32,))])
        update(optimizer, -0.1 * out.float().abs().clamp(max=1e30).log1p().mean() - 3e-3 * out.float().abs().mean())

    return Training({"": model}, [optimizer], step)


@program("float16 logits that grow", 4000, diverges=True)
def _() -> Training:
    q, k = nn.Linear(16, 32), nn.Linear(16, 32)
    model = nn.ModuleDict({"q": q, "k": k})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 16)

    class Scores(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a @ b.T

    model["scores"] = scores = Scores()

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            s = scores(q(x), k(x))
        update(optimizer, -(torch.diagonal(s.float()).mean() - s.float().mean()) * 0.01)

    return Training({"": model}, [optimizer], step)


@program("GAN whose generator runs away", 5000, diverges=True)
def _() -> Training:
    g, d = nn.Linear(4, 2), nn.Linear(2, 1)
    og, od = torch.optim.SGD(g.parameters(), lr=0.5), torch.optim.SGD(d.parameters(), lr=0.5)

    def step(t: int) -> None:
        noise = torch.randn(32, 4)
        loss_d = d(g(noise).detach()).mean() - d(torch.randn(32, 2) + 1).mean()
        loss_g = -d(g(noise)).mean()
        update(og, loss_g)
        update(od, loss_d)

    return Training({"g": g, "d": d}, [og, od], step)


@program("Adam without its epsilon's help, exponential head", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        update(optimizer, -(model(x[rows]).exp()).mean())

    return Training({"": model}, [optimizer], step)


@program("residual network of linear maps", 3000, diverges=True)
def _() -> Training:
    layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(8)])
    head = nn.Linear(16, 1)
    model = nn.ModuleDict({"layers": layers, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
    x = torch.randn(256, 16)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        h = x[rows]
        for layer in layers:
            h = h + 0.3 * layer(h)
        update(optimizer, F.mse_loss(head(h), x[rows].sum(1, keepdim=True)))

    return Training({"": model}, [optimizer], step)


# --- the first set: healthy training ------------------------------------------------------------------------------


@program("classification with Adam", 600)
def _() -> Training:
    model = mlp(10, 32, 3)
    return classification(model, torch.optim.Adam(model.parameters(), lr=3e-3))


@program("regression with SGD", 600)
def _() -> Training:
    model = mlp(10, 32, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=0.02))


@program("loss that goes to 0", 1500)
def _() -> Training:
    model = nn.Linear(10, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=0.1), noise=0.0)


@program("catapult: a rate at the edge of stability", 800)
def _() -> Training:
    model = mlp(10, 256, 1)
    return regression(model, torch.optim.SGD(model.parameters(), lr=0.12), noise=0.0)


@program("warm-up", 800)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    return classification(model, optimizer, before=rate(optimizer, lambda t: 1e-5 + 3e-3 * min(t / 400, 1)))


@program("warm restarts", 1000)
def _() -> Training:
    model = mlp(10, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    cosine = rate(optimizer, lambda t: 0.25 * (1 + math.cos(math.pi * (t % 200) / 200)) + 1e-3)
    return classification(model, optimizer, before=cosine)


@program("batches with outliers", 1000)
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        y = x[rows].sum(1, keepdim=True)
        y = y * 300 if t % 97 == 50 else y
        update(optimizer, F.mse_loss(model(x[rows]), y), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("head that starts at zero", 800)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    last: Any = model[-1]
    nn.init.zeros_(last.weight)
    return classification(model, torch.optim.SGD(model.parameters(), lr=0.1))


@program("saddle: tiny initial weights", 1500)
def _() -> Training:
    model = mlp(10, 32, 32, 1, act=nn.Tanh)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.02)
    return regression(model, torch.optim.SGD(model.parameters(), lr=0.1))


@program("GAN, non-saturating", 800)
def _() -> Training:
    g, d = mlp(4, 32, 2), mlp(2, 32, 1)
    og, od = torch.optim.Adam(g.parameters(), lr=2e-3), torch.optim.Adam(d.parameters(), lr=2e-3)

    def step(t: int) -> None:
        real, fake = torch.randn(32, 2) + 2, g(torch.randn(32, 4))
        update(od, F.softplus(d(fake.detach())).mean() + F.softplus(-d(real)).mean())
        update(og, F.softplus(-d(g(torch.randn(32, 4)))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("WGAN with clipped weights", 1000)
def _() -> Training:
    g, d = mlp(4, 32, 2), mlp(2, 32, 1)
    og, od = torch.optim.RMSprop(g.parameters(), lr=1e-3), torch.optim.RMSprop(d.parameters(), lr=1e-3)

    def step(t: int) -> None:
        update(od, d(g(torch.randn(32, 4)).detach()).mean() - d(torch.randn(32, 2) * 3).mean())
        with torch.no_grad():
            for p in d.parameters():
                p.clamp_(-0.1, 0.1)
        update(og, -d(g(torch.randn(32, 4))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("float16 with a scaler", 600)
def _() -> Training:
    model = mlp(10, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(512, 10)
    y = x[:, :3].argmax(1)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        update(optimizer, loss, scaler=scaler)

    return Training({"": model}, [optimizer], step)


@program("float16 with large but steady activations", 800)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x = torch.randn(512, 10) * 300
    y = x[:, :3].argmax(1)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[rows]) / 300, y[rows])
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("separable classes: logits grow without end", 3000)
def _() -> Training:
    model = mlp(10, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(512, 10)
    y = (x[:, 0] > 0).long()
    x[:, 0] += (2 * y - 1) * 2

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x[rows]), y[rows])
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("embeddings that grow", 1500)
def _() -> Training:
    table, head = nn.Embedding(100, 16), nn.Linear(16, 100)
    model = nn.ModuleDict({"table": table, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        words = torch.randint(0, 100, (64,))
        update(optimizer, F.cross_entropy(head(table(words)), (words * 7 + 1) % 100))

    return Training({"": model}, [optimizer], step)


@program("LSTM", 300)
def _() -> Training:
    cell, head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(16, 12, 4)
        update(optimizer, F.mse_loss(head(cell(x)[0][:, -1]), x[..., 0].sum(1, keepdim=True)), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("policy gradient", 800)
def _() -> Training:
    model = mlp(4, 32, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 4)
        choice = torch.distributions.Categorical(logits=model(x))
        action = choice.sample()
        reward = (action == x[:, :3].argmax(1)).float() * 10 + torch.randn(32) * 5
        update(optimizer, -(choice.log_prob(action) * (reward - reward.mean())).mean())

    return Training({"": model}, [optimizer], step)


@program("Q-learning with a target network", 1200)
def _() -> Training:
    model, target = mlp(4, 32, 2), mlp(4, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        if t % 50 == 0:
            target.load_state_dict(model.state_dict())
        s, a = torch.randn(32, 4), torch.randint(0, 2, (32, 1))
        with torch.no_grad():
            value = s[:, :1] + 0.95 * target(torch.randn(32, 4)).max(1, keepdim=True).values
        update(optimizer, F.smooth_l1_loss(model(s).gather(1, a), value))

    return Training({"": model}, [optimizer], step)


@program("targets whose scale grows", 1500)
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.mse_loss(model(x[rows]), x[rows].sum(1, keepdim=True) * (1 + t / 30)))

    return Training({"": model}, [optimizer], step)


@program("long plateau", 2500)
def _() -> Training:
    model = mlp(10, 16, 1, act=nn.Sigmoid)
    return regression(model, torch.optim.SGD(model.parameters(), lr=1e-4))


# --- the second set, written after the rule was fixed: training that diverges ------------------------------------


@program("regulariser with the wrong sign", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x = torch.randn(256, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        loss = F.mse_loss(model(x[rows]), x[rows, :1]) - 4 * sum(p.square().sum() for p in model.parameters())
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("discount above 1", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Embedding(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(t: int) -> None:
        s = torch.randint(0, 8, (32,))
        target = 0.5 + 1.3 * model((s + 1) % 8).detach()
        update(optimizer, F.mse_loss(model(s), target))

    return Training({"": model}, [optimizer], step)


@program("reward without a bound, float16", 3000, diverges=True, group="second")
def _() -> Training:
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.rand(32, 8))
        update(optimizer, -out.float().mean())

    return Training({"": model}, [optimizer], step)


@program("momentum on a quadratic, beyond stability", 3000, diverges=True, group="second")
def _() -> Training:
    weights = nn.ParameterList([nn.Parameter(torch.randn(20))])
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.42, momentum=0.9)
    curvature = torch.linspace(0.1, 10, 20)
    return Training({"": weights}, [optimizer], lambda t: update(optimizer, 0.5 * (curvature * weights[0] ** 2).sum()))


@program("learned temperature that runs away, float16", 3000, diverges=True, group="second")
def _() -> Training:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.temperature = nn.Linear(10, 3), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.features(x) * self.temperature.exp().to(torch.float16)

    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(256, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x[rows])
        update(optimizer, F.cross_entropy(logits.float(), x[rows, :3].argmax(1)) * 0.1 - 0.2 * model.temperature)

    return Training({"": model}, [optimizer], step)


@program("hidden state that is never reset", 3000, diverges=True, group="second")
def _() -> Training:
    cell, head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)
    nn.init.orthogonal_(cell.weight, gain=1.15)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    state = torch.randn(4, 8)

    def step(t: int) -> None:
        nonlocal state
        state = cell(state) + 0.1 * torch.randn(4, 8)
        update(optimizer, head(state).square().mean())
        state = state.detach()

    return Training({"": model}, [optimizer], step)


@program("schedule that multiplies the rate", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-3 * 1.01**t), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("variance that collapses", 3000, diverges=True, group="second")
def _() -> Training:
    mean, deviation = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    weights = nn.ParameterList([mean, deviation])
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.05)

    def step(t: int) -> None:
        x = torch.ones(16, 4)
        update(optimizer, (0.5 * (x - mean) ** 2 * torch.exp(-2 * deviation) + deviation).mean())

    return Training({"": weights}, [optimizer], step)


@program("Q-learning without a target network", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        s = torch.rand(32, 4)
        with torch.no_grad():
            target = 0.1 + 0.99 * model(1.5 * s + 0.2).max(1).values
        a = torch.randint(0, 2, (32, 1))
        update(optimizer, F.mse_loss(model(s).gather(1, a).squeeze(1), target))

    return Training({"": model}, [optimizer], step)


@program("convolution, summed loss", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Conv1d(4, 4, 5, padding=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        x = torch.randn(4, 4, 32)
        update(optimizer, F.mse_loss(model(x), x.flip(-1), reduction="sum"))

    return Training({"": model}, [optimizer], step)


@program("loss with the wrong sign", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(256, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, -F.mse_loss(model(x[rows]), x[rows, :1]))

    return Training({"": model}, [optimizer], step)


@program("Poisson regression, rate too high", 3000, diverges=True, group="second")
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(256, 10)
    y = torch.poisson((x[:, :1] * 0.5 + 1).exp())

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, F.poisson_nll_loss(model(x[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


# --- the second set: healthy training -----------------------------------------------------------------------------


@program("CNN with batch norm", 150, group="second")
def _() -> Training:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(128, 1, 8, 8), torch.randint(0, 4, (128,))

    def step(t: int) -> None:
        rows = torch.randint(0, 128, (16,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


@program("small transformer", 150, group="second")
def _() -> Training:
    table, block = nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    model = nn.Sequential(table, block, nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randint(0, 32, (8, 12))
        update(optimizer, F.cross_entropy(model(x).flatten(0, 1), (x * 3 + 1).flatten() % 32), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("variational autoencoder", 600, group="second")
def _() -> Training:
    enc, dec = mlp(10, 32, 8), mlp(4, 32, 10)
    model = nn.ModuleDict({"enc": enc, "dec": dec})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        mean, log_var = enc(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
        update(optimizer, F.mse_loss(dec(z), x) * 10 + kl)

    return Training({"": model}, [optimizer], step)


@program("weight of a loss term that grows a thousandfold", 1200, group="second")
def _() -> Training:
    model = mlp(10, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        update(optimizer, F.mse_loss(model(x), x) * 2 ** min(t / 60, 12))

    return Training({"": model}, [optimizer], step)


@program("cyclic rate with a high peak", 900, group="second")
def _() -> Training:
    model = mlp(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return classification(model, optimizer, before=rate(optimizer, lambda t: 0.01 + 0.8 * abs((t % 200) / 100 - 1)))


@program("noisy labels, high rate", 800, group="second")
def _() -> Training:
    model = mlp(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (16,))
        update(optimizer, F.cross_entropy(model(x[rows]), torch.randint(0, 3, (16,))))

    return Training({"": model}, [optimizer], step)


@program("contrastive loss with a learned temperature", 800, group="second")
def _() -> Training:
    left, right, scale = nn.Linear(10, 8), nn.Linear(10, 8), nn.Parameter(torch.tensor(2.0))
    model = nn.ModuleList([left, right, nn.ParameterList([scale])])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        a, b = F.normalize(left(x), dim=1), F.normalize(right(x + 0.1 * torch.randn(32, 10)), dim=1)
        update(optimizer, F.cross_entropy(a @ b.T * scale.exp().clamp(max=100), torch.arange(32)))

    return Training({"": model}, [optimizer], step)


@program("bfloat16 autocast", 500, group="second")
def _() -> Training:
    model = mlp(10, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x[rows]), x[rows, :3].argmax(1))
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("float16 with a scaler and hard batches", 700, group="second")
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=30)

    def step(t: int) -> None:
        x = torch.randn(32, 10) * (30 if t % 80 == 40 else 1)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        update(optimizer, loss, scaler=scaler)

    return Training({"": model}, [optimizer], step)


@program("returns that grow while the policy learns", 800, group="second")
def _() -> Training:
    model, critic = mlp(4, 32, 2), mlp(4, 32, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 4)
        choice = torch.distributions.Categorical(logits=model(x))
        action = choice.sample()
        value = (action == (x[:, 0] > 0)).float() * (1 + t / 20)
        advantage = value - critic(x).squeeze(1)
        update(optimizer, -(choice.log_prob(action) * advantage.detach()).mean() + advantage.square().mean())

    return Training({"model": model, "critic": critic}, [optimizer], step)


@program("sequences that get longer, summed loss", 600, group="second")
def _() -> Training:
    cell, head = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(8, 2 + t // 60, 2)
        update(optimizer, F.mse_loss(head(cell(x)[0]), x[..., :1].cumsum(1), reduction="sum"))

    return Training({"": model}, [optimizer], step)


@program("two tasks in turn, of different scale", 1000, group="second")
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        update(optimizer, F.mse_loss(model(x), x[:, :1]) * (1000 if t // 100 % 2 else 1))

    return Training({"": model}, [optimizer], step)


@program("rare features a thousand times as large", 1500, group="second")
def _() -> Training:
    model = mlp(10, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        if t % 131 == 100:
            x[0] *= 1000
        update(optimizer, F.mse_loss(model(x), x[:, :1].clamp(-50, 50)))

    return Training({"": model}, [optimizer], step)


@program("new head on a trained body", 900, group="second")
def _() -> Training:
    body, head = mlp(10, 32, 16), nn.Linear(16, 3)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        if t == 450:
            with torch.no_grad():
                head.weight.normal_(std=3)
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(head(body(x[rows])), x[rows, :3].argmax(1)))

    return Training({"": model}, [optimizer], step)


@program("energies that fall, held by a penalty", 1200, group="second")
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(t: int) -> None:
        low, high = model(torch.randn(32, 4)), model(torch.randn(32, 4) + 2)
        update(optimizer, (low - high).mean() + 0.02 * (low**2 + high**2).mean())

    return Training({"": model}, [optimizer], step)


@program("distillation at a high temperature", 500, group="second")
def _() -> Training:
    teacher, model = mlp(10, 64, 5), mlp(10, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        soft = (teacher(x).detach() * 20 / 4).softmax(1)
        update(optimizer, F.kl_div((model(x) / 4).log_softmax(1), soft, reduction="batchmean") * 16)

    return Training({"": model}, [optimizer], step)


@program("one-cycle rate with Adam", 800, group="second")
def _() -> Training:
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-4 + 0.03 * math.sin(math.pi * t / 800) ** 2), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("Adam at a rate that is too high, but bounded", 800, group="second")
def _() -> Training:
    model = mlp(10, 32, 32, 3)
    return classification(model, torch.optim.Adam(model.parameters(), lr=0.1))


@program("unnormalised inputs, loss of millions at the start", 800, group="second")
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 10) * 1e3
        update(optimizer, F.mse_loss(model(x), x.sum(1, keepdim=True)))

    return Training({"": model}, [optimizer], step)


@program("linear autoencoder from small weights", 1500, group="second")
def _() -> Training:
    model = mlp(10, 4, 10, act=nn.Identity)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        x[:, 4:] = 0
        update(optimizer, F.mse_loss(model(x), x))

    return Training({"": model}, [optimizer], step)


# --- the third set, written before forecasts of weights, operators and attention: training that diverges -----------


@program("Adam, rate that doubles every hundred steps", 4000, diverges=True, group="third")
def _() -> Training:
    model = mlp(10, 32, 32, 1, act=nn.Identity)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-3 * 2 ** (t / 100)), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("momentum with clipped gradients that point outwards, float16", 4000, diverges=True, group="third")
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x[torch.randint(0, 512, (32,))])
        update(optimizer, -out.float().square().mean(), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("log of a probability that falls to 0", 6000, diverges=True, group="third")
def _() -> Training:
    logit = nn.ParameterList([nn.Parameter(torch.zeros(4))])
    optimizer = torch.optim.SGD(logit.parameters(), lr=0.2)

    def step(t: int) -> None:
        chance = torch.exp(-logit[0].square())
        update(optimizer, 0.1 * torch.log(chance).mean() - 0.1 * logit[0].mean())

    return Training({"": logit}, [optimizer], step)


@program("division by a standard deviation that collapses", 6000, diverges=True, group="third")
def _() -> Training:
    features, head = nn.Linear(8, 8), nn.Linear(8, 1)
    model = nn.ModuleList([features, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(64, 8)

    def step(t: int) -> None:
        h = features(x)
        with torch.no_grad():
            features.weight.mul_(0.97)
        normal = (h - h.mean(0)).detach() / h.var(0).detach()
        update(optimizer, (head(normal * 1e-3) - x[:, :1]).abs().mean() * 1e-3 + h.square().mean())

    return Training({"": model}, [optimizer], step)


@program("normalising flow whose scale runs away", 6000, diverges=True, group="third")
def _() -> Training:
    log_scale = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(log_scale.parameters(), lr=0.02)

    def step(t: int) -> None:
        x = torch.randn(64, 4)
        s = log_scale(x)
        z = x * torch.exp(s)
        update(optimizer, -(s.mean() * 2) + 1e-30 * z.abs().clamp(max=1e3).mean())

    return Training({"": log_scale}, [optimizer], step)


@program("actor and critic without a target, returns that feed back", 5000, diverges=True, group="third")
def _() -> Training:
    actor, critic = mlp(4, 16, 2), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.05)

    def step(t: int) -> None:
        s = torch.randn(32, 4)
        following = 1.4 * s + 0.3
        target = 0.2 + 0.98 * critic(following).detach()
        error = target - critic(s)
        choice = torch.distributions.Categorical(logits=actor(s).clamp(-5, 5))
        a = choice.sample()
        update(optimizer, error.square().mean() - (choice.log_prob(a) * error.detach().clamp(-1, 1).squeeze(1)).mean())

    return Training({"actor": actor, "critic": critic}, [optimizer], step)


@program("transformer with attention logits that grow, float16", 4000, diverges=True, group="third")
def _() -> Training:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x) @ self.k(x).transpose(-1, -2)
            return scores.softmax(-1) @ self.v(x)

    model = Attention()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(t: int) -> None:
        x = torch.randn(4, 8, 16)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        sharp = (model.q(x) * model.k(x)).sum(-1).mean()
        update(optimizer, (out.float() - x).square().mean() - 0.004 * sharp)

    return Training({"": model}, [optimizer], step)


@program("recurrent state with a gain that is learned", 4000, diverges=True, group="third")
def _() -> Training:
    gain = nn.ParameterList([nn.Parameter(torch.ones(8) * 0.9)])
    optimizer = torch.optim.SGD(gain.parameters(), lr=1e-3)

    def step(t: int) -> None:
        h = torch.rand(8)
        for _ in range(30):
            h = h * gain[0]
        update(optimizer, -h.clamp(max=1e20).log1p().mean() - h.mean() * 1e-3)

    return Training({"": gain}, [optimizer], step)


@program("GAN, discriminator far ahead, gradients not bounded", 5000, diverges=True, group="third")
def _() -> Training:
    g, d = mlp(4, 16, 2), mlp(2, 16, 1)
    og = torch.optim.SGD(g.parameters(), lr=0.3, momentum=0.5)
    od = torch.optim.SGD(d.parameters(), lr=0.3, momentum=0.5)

    def step(t: int) -> None:
        z = torch.randn(32, 4)
        update(od, d(g(z).detach()).mean() - d(torch.randn(32, 2) + 2).mean())
        update(og, -d(g(z)).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("weight decay with the wrong sign", 5000, diverges=True, group="third")
def _() -> Training:
    model = mlp(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), x[rows, :3].argmax(1)))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)

    return Training({"": model}, [optimizer], step)


# --- the third set: healthy training --------------------------------------------------------------------------------


@program("long warm-up to a high rate, momentum", 1500, group="third")
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    return classification(model, optimizer, before=rate(optimizer, lambda t: 0.2 * min(t / 1000, 1)))


@program("warm restarts with a regression that spikes", 1500, group="third")
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    training = regression(model, optimizer, clip=5.0)
    before, step = rate(optimizer, lambda t: 0.02 * (1 + math.cos(math.pi * (t % 300) / 300)) + 1e-4), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("scale-invariant weights that grow without decay", 2000, group="third")
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    return classification(model, torch.optim.SGD(model.parameters(), lr=1.0))


@program("DCGAN in small", 200, group="third")
def _() -> Training:
    g = nn.Sequential(nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))
    d = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1))
    og, od = (torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.999)) for m in (g, d))

    def step(t: int) -> None:
        real = torch.randn(16, 1, 8, 8).cumsum(-1) / 3
        fake = torch.tanh(g(torch.randn(16, 8, 1, 1)))
        update(od, F.softplus(d(fake.detach())).mean() + F.softplus(-d(real)).mean())
        update(og, F.softplus(-d(torch.tanh(g(torch.randn(16, 8, 1, 1))))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("WGAN with a gradient penalty", 400, group="third")
def _() -> Training:
    g, d = mlp(4, 32, 2), mlp(2, 32, 1, act=nn.Tanh)
    og, od = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.0, 0.9)) for m in (g, d))

    def step(t: int) -> None:
        real, fake = torch.randn(32, 2) * 2 + 3, g(torch.randn(32, 4))
        mixed = (real + (fake.detach() - real) * torch.rand(32, 1)).requires_grad_()
        slope = torch.autograd.grad(d(mixed).sum(), mixed, create_graph=True)[0].norm(dim=1)
        update(od, d(fake.detach()).mean() - d(real).mean() + 10 * (slope - 1).square().mean())
        update(og, -d(g(torch.randn(32, 4))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("PPO with clipped ratios", 800, group="third")
def _() -> Training:
    model, critic = mlp(4, 32, 3, act=nn.Tanh), mlp(4, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], lr=3e-3)
    data: dict[str, Tensor] = {}

    def step(t: int) -> None:
        if t % 10 == 0:
            s = torch.randn(64, 4)
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=model(s))
                a = choice.sample()
                data.update(s=s, a=a, old=choice.log_prob(a), r=(a == s[:, :3].argmax(1)).float() * 5 * (1 + t / 100))
        logp = torch.distributions.Categorical(logits=model(data["s"])).log_prob(data["a"])
        value = critic(data["s"]).squeeze(1)
        gain = (data["r"] - value).detach()
        ratio = (logp - data["old"]).exp()
        worse = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        update(optimizer, -worse.mean() + (data["r"] - value).square().mean(), clip=0.5)

    return Training({"model": model, "critic": critic}, [optimizer], step)


@program("actor and critic with rewards that rise a hundredfold", 1500, group="third")
def _() -> Training:
    model, critic = mlp(4, 32, 2), mlp(4, 32, 1)
    optimizer = torch.optim.Adam([*model.parameters(), *critic.parameters()], lr=1e-2)

    def step(t: int) -> None:
        s = torch.randn(32, 4)
        choice = torch.distributions.Categorical(logits=model(s))
        a = choice.sample()
        r = (a == (s[:, 0] > 0)).float() * 100 ** (t / 1500) * 3
        gain = r - critic(s).squeeze(1)
        update(optimizer, gain.square().mean() - (choice.log_prob(a) * gain.detach()).mean())

    return Training({"model": model, "critic": critic}, [optimizer], step)


@program("one bad batch in a hundred, SGD without clipping", 1200, group="third")
def _() -> Training:
    model = mlp(10, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        y = x.sum(1, keepdim=True) * (40 if t % 100 == 60 else 1)
        update(optimizer, F.mse_loss(model(x), y))

    return Training({"": model}, [optimizer], step)


@program("loss spikes that come back, Adam with a small beta2", 1500, group="third")
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.8))
    return classification(model, optimizer)


@program("sharp attention: copy the marked token", 700, group="third")
def _() -> Training:
    class Copy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = nn.Parameter(torch.randn(16) * 0.1), nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            weights = (self.k(x) @ self.q).softmax(-1)
            return (weights[:, None] @ self.v(x)).squeeze(1)

    model = Copy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x, marked = torch.randn(32, 12, 16), torch.randint(0, 12, (32,))
        x[..., 0] = -1
        x[torch.arange(32), marked, 0] = 2
        update(optimizer, F.mse_loss(model(x), x[torch.arange(32), marked]))

    return Training({"": model}, [optimizer], step)


@program("variances learned of clean data, with a floor", 1500, group="third")
def _() -> Training:
    model = mlp(4, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 4)
        mean, log_var = model(x).chunk(2, 1)
        log_var = log_var.clamp(min=-8)
        update(optimizer, (0.5 * (x[:, :1] - mean) ** 2 * torch.exp(-log_var) + 0.5 * log_var).mean())

    return Training({"": model}, [optimizer], step)


@program("contrastive learning with batch norm, embeddings that shrink", 600, group="third")
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        a, b = (F.normalize(model(x + 0.1 * torch.randn(32, 10)), dim=1) for _ in range(2))
        update(optimizer, F.cross_entropy(a @ b.T * 10, torch.arange(32)))

    return Training({"": model}, [optimizer], step)


@program("strong weight decay: everything shrinks", 2000, group="third")
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    return classification(model, optimizer)


@program("learned weights of tasks, exp of minus s", 2000, group="third")
def _() -> Training:
    model, s = mlp(10, 32, 2), nn.Parameter(torch.zeros(2))
    both = nn.ModuleDict({"model": model, "s": nn.ParameterList([s])})
    optimizer = torch.optim.Adam(both.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        errors = (model(x) - x[:, :2] * torch.tensor([1.0, 10.0])).square().mean(0)
        update(optimizer, (torch.exp(-s) * errors + s).sum())

    return Training({"": both}, [optimizer], step)


@program("embedding and head trained from zero, float16", 1200, group="third")
def _() -> Training:
    table, head = nn.Embedding(50, 32), nn.Linear(32, 50)
    nn.init.zeros_(head.weight)
    model = nn.ModuleDict({"table": table, "head": head})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def step(t: int) -> None:
        words = torch.randint(0, 50, (64,))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(head(table(words)), (words + 1) % 50)
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


def show(outcomes: Iterable[Outcome], verbose: bool) -> None:
    outcomes = list(outcomes)
    for one in outcomes:
        events = [e.message for e in one.forecasts + one.others]
        if one.diverges:
            mark = "in time" if one.lead is not None and one.lead >= LEAD else "LATE" if one.failed else "DID NOT FAIL"
            told = f"fails in step {one.failed}, forecast {one.lead} steps before (guard {one.guard_lead})"
        else:
            mark = "FALSE" if one.forecasts else "quiet"
            told = f"failed in {one.failed}" if one.failed else f"guard: {len(one.others)}" if one.others else ""
        print(f"{mark:<13}{one.name}: {told}", *(events[:4] if verbose else ()), sep="\n    ", flush=True)
    lost, healthy = [o for o in outcomes if o.diverges and o.failed], [o for o in outcomes if not o.diverges]
    in_time = sum(o.lead is not None and o.lead >= LEAD for o in lost)
    print(f"forecast {LEAD} or more steps before: {in_time} of {len(lost)} that diverge")
    print(f"false forecasts: {sum(bool(o.forecasts) for o in healthy)} of {len(healthy)} healthy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--set", choices=("first", "second", "third", "fourth", "all"), default="all")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    wanted = [
        p
        for p in PROGRAMS
        if options.set in ("all", p.group) and (not options.only or any(text in p.name for text in options.only))
    ]
    show([run(p) for p in wanted], options.verbose)


if __name__ == "__main__":
    main()
