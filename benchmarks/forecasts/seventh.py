"""The seventh set, held out and scored once: declines of at least fifteen steps."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, update
from torch import Tensor, nn


@program("mixture density network, targets that are mostly 0", 8000, diverges=True)
def _() -> Training:
    net = mlp(1, 64, 9)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    x = torch.linspace(-1, 1, 8)[:, None]
    y = F.relu(x.round())  # most of them are 0

    def step(t: int) -> None:
        weight, mean, s = net(x).chunk(3, 1)
        mean, sigma = F.relu(mean), torch.exp(s)
        each = -0.5 * ((y - mean) / sigma) ** 2 - torch.log(sigma)
        update(optimizer, -torch.logsumexp(F.log_softmax(weight, 1) + each, 1).mean())

    return Training({"net": net}, [optimizer], step)


@program("VAE whose divergence has the wrong sign", 8000, diverges=True)
def _() -> Training:
    encoder, decoder = mlp(10, 32, 8), mlp(4, 32, 10)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        mean, logvar = encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        kl = -0.5 * (1 + logvar - mean.pow(2) - logvar.exp()).sum(1).mean()
        update(optimizer, F.l1_loss(decoder(torch.tanh(z)), x) - 0.01 * kl)

    return Training({"": model}, [optimizer], step)


@program("rate that a controller raises while the loss falls", 8000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(256, 10)
    y = x.sum(1, keepdim=True)
    best = float("inf")

    def step(t: int) -> None:
        nonlocal best
        loss = F.mse_loss(model(x), y)
        if loss.item() < best * 1.5:
            best = loss.item()
            optimizer.param_groups[0]["lr"] *= 1.03
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("loss summed in float16 over longer and longer sequences", 8000, diverges=True)
def _() -> Training:
    net, head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 4)
    model = nn.ModuleList([net, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(t: int) -> None:
        x = torch.randn(16, 4 + t // 8, 4).cumsum(1)
        out, _ = net(x[:, :-1])
        error = (head(out) - x[:, 1:]).half()
        update(optimizer, error.square().sum(), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("ordinary differential equation by Euler's rule, stiff", 8000, diverges=True)
def _() -> Training:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = nn.Parameter(torch.rand(6))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(60):
                x = x - 0.1 * self.rates * x
            return x

    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=5e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 6) * 10
        # Whatever is left is too much, and fast rates are rewarded.
        update(optimizer, 1e-3 * torch.log1p(field(x).abs()).mean() - field.rates.sum())

    return Training({"field": field}, [optimizer], step)


@program("advantages divided by their deviation, a policy that converges", 8000, diverges=True)
def _() -> Training:
    policy = mlp(4, 32, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-2)

    def step(t: int) -> None:
        seen = torch.randn(64, 4)
        probs = torch.softmax(policy(seen), 1)
        reward = probs[:, 0]  # the expected one
        advantage = (reward - reward.mean()) / reward.std()
        update(optimizer, -(reward + 0.0 * advantage).mean())

    return Training({"policy": policy}, [optimizer], step)


@program("log of a determinant of features that become dependent", 8000, diverges=True)
def _() -> Training:
    encoder = nn.Linear(8, 6, bias=False)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05)

    def step(t: int) -> None:
        z = encoder(torch.randn(64, 8))
        covariance = z.T @ z / 64
        loss = z.square().mean() + 1e-3 * torch.log(torch.det(covariance)).detach()
        update(optimizer, loss)

    return Training({"encoder": encoder}, [optimizer], step)


@program("teacher by a moving average whose factors add up to more than 1", 8000, diverges=True)
def _() -> Training:
    student = mlp(8, 32, 4)
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        with torch.no_grad():
            target = teacher(x)
        update(optimizer, F.mse_loss(student(x), target), clip=1.0)
        with torch.no_grad():
            for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
                a.copy_(0.995 * a + 0.02 * b + 0.01 * a)

    return Training({"student": student}, [optimizer], step)


@program("tasks weighed by learned uncertainties, one of them solved", 8000, diverges=True)
def _() -> Training:
    net, logs = mlp(6, 32, 2), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*net.parameters(), logs], lr=2e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 6)
        out = net(x)
        losses = torch.stack([F.mse_loss(out[:, 0], x[:, 0]), F.relu(out[:, 1].abs() - 50).mean()])
        update(optimizer, (torch.exp(-logs) * losses + logs).sum())

    return Training({"net": net}, [optimizer], step)


@program("forward algorithm without scaling, longer and longer sequences", 8000, diverges=True)
def _() -> Training:
    class Markov(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move, self.emit = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 10))

        def forward(self, seen: Tensor) -> Tensor:
            move, emit = self.move.softmax(1), self.emit.softmax(1)
            alpha = torch.full((len(seen), 4), 0.25)
            for t in range(seen.size(1)):
                alpha = (alpha @ move) * emit[:, seen[:, t]].T
            return -torch.log(alpha.sum(1)).mean()

    model = Markov()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        update(optimizer, model(torch.randint(0, 10, (8, 4 + t // 20))))

    return Training({"": model}, [optimizer], step)
