"""The eleventh set, held out: written after the rules were changed for the tenth, and scored once."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import DivergedError, Training, mlp, program, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


@program("LSTM on a random walk, summed loss, SGD", 3000, diverges=True)
def _() -> Training:
    body, head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.01)

    def step(t: int) -> None:
        walk = torch.randn(8, 21, 1).cumsum(1)
        update(optimizer, (head(body(walk[:, :-1])[0]) - walk[:, 1:]).square().sum() / 8)
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("polynomial regression of degree five, SGD", 3000, diverges=True)
def _() -> Training:
    x = torch.rand(128, 1) * 4 - 2
    powers = torch.cat([x**i for i in range(1, 6)], 1)
    y = torch.sin(2 * x)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0105)

    def step(t: int) -> None:
        rows = torch.randint(0, 128, (32,))
        update(optimizer, F.mse_loss(model(powers[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


@program("convolutions, linear warm-up whose end is a hundred times too high", 3000, diverges=True)
def _() -> Training:
    model = nn.Sequential(
        nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 1, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-5, 1.0, total_iters=2000)

    def step(t: int) -> None:
        clean = torch.sin(torch.linspace(0, 12, 48) + 6 * torch.rand(16, 1, 1))
        update(optimizer, F.mse_loss(model(clean + 0.3 * torch.randn(16, 1, 48)), clean))
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("softmax policy, exp of a log ratio that is not clipped", 5000, diverges=True)
def _() -> Training:
    policy, old = mlp(4, 32, 3), mlp(4, 32, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def step(t: int) -> None:
        state = torch.randn(64, 4)
        action = torch.randint(0, 3, (64,))
        gain = torch.where(action == 0, 1.0, -0.2)
        new = policy(state).log_softmax(1)[torch.arange(64), action]
        before = old(state).log_softmax(1)[torch.arange(64), action].detach() - 0.02 * t
        update(optimizer, -(torch.exp(new - before) * gain).mean())

    return Training({"policy": policy}, [optimizer], step)


@program("value of a state from itself one step later, large steps", 5000, diverges=True)
def _() -> Training:
    model = mlp(3, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(t: int) -> None:
        state = torch.randn(32, 3)
        target = 1 + 0.99 * model(1.5 * state).detach()
        update(optimizer, F.mse_loss(model(state), target))

    return Training({"": model}, [optimizer], step)


@program("autoencoder in float16, weights that a bonus for large codes inflates", 5000, diverges=True)
def _() -> Training:
    encoder, decoder = mlp(12, 32, 4), mlp(4, 32, 12)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 12)
        with torch.autocast("cpu", torch.float16):
            code = encoder(x)
            out = decoder(code)
        update(optimizer, F.mse_loss(out.float(), x) - 0.1 * code.float().square().mean())

    return Training({"": model}, [optimizer], step)


@program("graph layers that add up neighbours, eight of them, momentum", 3000, diverges=True)
def _() -> Training:
    edges = (torch.rand(30, 30) < 0.15).float()
    edges = ((edges + edges.T + torch.eye(30)) > 0).float() / 3
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-4, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.02**t)

    def step(t: int) -> None:
        x = torch.randn(30, 8)
        h = x
        for layer in layers:
            h = F.leaky_relu(layer(edges @ h))
        update(optimizer, F.mse_loss(h, (edges @ x).tanh()))
        schedule.step()

    return Training({"": layers}, [optimizer], step)


@program("Hebbian learning without a decay", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    mix = torch.randn(10, 10) / 3

    def step(t: int) -> None:
        update(optimizer, -0.5 * model(torch.randn(32, 10) @ mix).square().sum(1).mean())

    return Training({"": model}, [optimizer], step)


@program("updates by momentum that is never damped", 3000, diverges=True)
def _() -> Training:
    model = mlp(5, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.999)

    def step(t: int) -> None:
        x = torch.randn(32, 5)
        update(optimizer, F.mse_loss(model(x), 3 * x.sum(1, keepdim=True)))

    return Training({"": model}, [optimizer], step)


@program("a learned clock: the state is multiplied by a gain in every tick", 3000, diverges=True)
def _() -> Training:
    gain = nn.Parameter(torch.tensor(0.9))
    model = nn.ParameterList([gain])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def step(t: int) -> None:
        state = torch.ones(8) * (1 + 0.1 * torch.rand(8))
        for _ in range(100):
            state = state * gain
        value = -torch.log1p(state).mean()
        if not math.isfinite(value.item()):
            raise DivergedError
        update(optimizer, value)

    return Training({"": model}, [optimizer], step)


# --- healthy training -------------------------------------------------------------------------------------------------


def train(model: nn.Module, optimizer: Any, loss: Any, schedule: Any = None, **more: Any) -> Training:
    def step(t: int) -> None:
        update(optimizer, loss(t), **more)
        if schedule is not None:
            schedule.step()

    return Training({"": model}, [optimizer], step)


@program("LSTM on a random walk, clipped", 250)
def _() -> Training:
    body, head = nn.LSTM(1, 16, batch_first=True), nn.Linear(16, 1)
    model = nn.ModuleList([body, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def loss(t: int) -> Tensor:
        walk = torch.randn(8, 21, 1).cumsum(1)
        return (head(body(walk[:, :-1])[0]) - walk[:, 1:]).square().mean()

    return train(model, optimizer, loss, clip=1.0)


@program("polynomial regression at the largest rate that holds", 800)
def _() -> Training:
    x = torch.rand(128, 1) * 4 - 2
    powers = torch.cat([x**i for i in range(1, 6)], 1)
    y = torch.sin(2 * x)
    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    return train(model, optimizer, lambda t: F.mse_loss(model(powers), y))


@program("convolutions, warm-up to a rate that is just right", 400)
def _() -> Training:
    model = nn.Sequential(nn.Conv1d(1, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 1, 5, padding=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, 1.0, total_iters=200)

    def loss(t: int) -> Tensor:
        clean = torch.sin(torch.linspace(0, 12, 48) + 6 * torch.rand(16, 1, 1))
        return F.mse_loss(model(clean + 0.3 * torch.randn(16, 1, 48)), clean)

    return train(model, optimizer, loss, schedule)


@program("targets that jump to a thousand times their size and back", 900)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(t: int) -> Tensor:
        x = torch.randn(32, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True) * (1000 if 300 <= t < 600 else 1))

    return train(model, optimizer, loss)


@program("rewards that double every two hundred steps, values that follow", 1200)
def _() -> Training:
    model = mlp(3, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(t: int) -> Tensor:
        state = torch.randn(64, 3)
        reward = 2 ** (t / 200) * (1 + state[:, :1].tanh())
        return F.mse_loss(model(state), reward + 0.5 * model(state * 0.9).detach())

    return train(model, optimizer, loss)


@program("Gaussian likelihood, variance by exp, noisy targets", 800)
def _() -> Training:
    net = mlp(3, 32, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 3)
        mean, logvar = net(x).unbind(1)
        y = x.sum(1) + 0.3 * torch.randn(64)
        return (0.5 * logvar + (y - mean).square() / (2 * logvar.exp())).mean()

    return train(net, optimizer, loss)


@program("cyclic rate up to one, momentum cycled the other way", 900)
def _() -> Training:
    model = mlp(8, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 1.0, step_size_up=150)
    x = torch.randn(256, 8)
    y = x[:, :3].argmax(1)

    def loss(t: int) -> Tensor:
        rows = torch.randint(0, 256, (32,))
        return F.cross_entropy(model(x[rows]), y[rows])

    return train(model, optimizer, loss, schedule)


@program("embeddings from zero, a large rate for SGD", 600)
def _() -> Training:
    model = nn.Sequential(nn.Embedding(40, 8), nn.Flatten(), nn.Linear(16, 1))
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator, union-attr]  # an Embedding
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(t: int) -> Tensor:
        pairs = torch.randint(0, 40, (64, 2))
        return F.mse_loss(model(pairs).squeeze(1), (pairs[:, 0] > pairs[:, 1]).float())

    return train(model, optimizer, loss)


@program("noise added to inputs grows from nothing to five", 900)
def _() -> Training:
    model = mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def loss(t: int) -> Tensor:
        x = torch.randn(64, 8)
        return F.mse_loss(model(x + 5 * t / 900 * torch.randn(64, 8)), x[:, :1])

    return train(model, optimizer, loss)


@program("float16 with a scaler, gradients that are large every tenth step", 500)
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=50)

    def loss(t: int) -> Tensor:
        x = torch.randn(32, 10)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        return F.smooth_l1_loss(out.float(), x[:, :1] * (50 if t % 10 == 9 else 1))

    return train(model, optimizer, loss, scaler=scaler)
