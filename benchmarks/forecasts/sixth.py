"""The sixth set, held out: declines of at least fifteen steps, written together with the fifth and only scored."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, update
from torch import nn


@program("softmax by hand without its maximum, inputs that drift", 8000, diverges=True)
def _() -> Training:
    model = mlp(6, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    centres = torch.randn(3, 6) * 3

    def step(t: int) -> None:
        y = torch.randint(0, 3, (64,))
        logits = model((centres[y] + torch.randn(64, 6)) * (1 + t / 50))
        e = torch.exp(logits)
        p = e / e.sum(1, keepdim=True)
        update(optimizer, -torch.log(p[torch.arange(64), y] + 1e-7).mean())

    return Training({"": model}, [optimizer], step)


@program("reservoir that is run longer and longer", 6000, diverges=True)
def _() -> Training:
    torch.manual_seed(1)
    inner, read = torch.randn(32, 32) * 0.4, nn.Linear(32, 1)
    optimizer = torch.optim.Adam(read.parameters(), lr=1e-3)

    def step(t: int) -> None:
        length = 5 + t // 4
        x, h = torch.randn(8, length, 32) * 0.1, torch.zeros(8, 32)
        for k in range(length):
            h = torch.relu(h @ inner + x[:, k])
        update(optimizer, F.l1_loss(read(h), torch.ones(8, 1)), clip=1.0)

    return Training({"read": read}, [optimizer], step)


@program("contrastive embeddings that are not normalised, float16", 8000, diverges=True)
def _() -> Training:
    encoder = mlp(10, 64, 32)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)

    def step(t: int) -> None:
        x = torch.randn(64, 10)
        one, two = encoder(x + 0.3 * torch.randn(64, 10)), encoder(x + 0.3 * torch.randn(64, 10))
        logits = one.half() @ two.half().T
        spread = one.norm(dim=1).mean()  # meant against collapse
        update(optimizer, F.cross_entropy(logits.float(), torch.arange(64)) - 0.1 * spread)

    return Training({"encoder": encoder}, [optimizer], step)


@program("running sums of inputs in float16", 6000, diverges=True)
def _() -> Training:
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    total, count = torch.zeros(6, dtype=torch.float16), torch.zeros((), dtype=torch.float16)

    def step(t: int) -> None:
        nonlocal total, count
        x = torch.randn(64, 6) + 1.5
        total, count = total + x.sum(0).half(), count + 64
        centre = total / count
        update(optimizer, F.mse_loss(model(x - centre.float()), x[:, :1]))

    return Training({"": model}, [optimizer], step)


class Heavy(torch.optim.Optimizer):
    """Momentum by hand, whose factor is above 1."""

    def __init__(self, params: Any, lr: float, factor: float) -> None:
        super().__init__(params, {"lr": lr, "factor": factor})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is used here
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    kept = self.state[p].setdefault("velocity", torch.zeros_like(p))
                    kept.mul_(group["factor"]).add_(p.grad)
                    p.sub_(group["lr"] * kept)


@program("momentum by hand with a factor above 1", 6000, diverges=True)
def _() -> Training:
    model = mlp(8, 32, 1, act=nn.Tanh)
    optimizer = Heavy(model.parameters(), lr=1e-4, factor=1.02)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        update(optimizer, F.mse_loss(model(x), x.sum(1, keepdim=True)))

    return Training({"": model}, [optimizer], step)


@program("log of a raw scale parameter that falls", 6000, diverges=True)
def _() -> Training:
    mean, sigma = nn.Linear(4, 1), nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.Adam([*mean.parameters(), sigma], lr=2e-2)
    weights = torch.randn(4, 1)

    def step(t: int) -> None:
        x = torch.randn(64, 4)
        error = x @ weights - mean(x)
        update(optimizer, (0.5 * (error / sigma).square() + torch.log(sigma)).mean())

    return Training({"mean": mean}, [optimizer], step)


@program("boosting by multiplicative weights that are not normalised", 8000, diverges=True)
def _() -> Training:
    model = mlp(6, 16, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(128, 6)
    y = (x[:, 0] * x[:, 1] > 0).float()
    y[:20] = 1 - y[:20]
    weights = torch.ones(128)

    def step(t: int) -> None:
        nonlocal weights
        logits = model(x)[:, 0]
        wrong = ((logits > 0).float() != y).float()
        weights = weights * torch.exp(0.25 * wrong)
        loss = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        update(optimizer, (weights * loss).sum() / weights.sum())

    return Training({"": model}, [optimizer], step)
