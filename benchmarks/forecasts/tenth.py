"""The tenth set: ordinary mistakes in small programs of many kinds, and healthy trainings with strong movements.

It was written and scored before anything was changed for it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import DivergedError, Training, mlp, program, rate, update
from torch import Tensor, nn


def simple(model: nn.Module, optimizer: Any, loss: Callable[[], Tensor], *, schedule: Any = None, **more: Any) -> Any:
    """A loop of one model, one optimizer and one loss."""

    def step(t: int) -> None:
        update(optimizer, loss(), **more)
        if schedule is not None:
            schedule.step()

    return Training({"": model}, [optimizer], step)


def images(count: int = 256, size: int = 8, classes: int = 4) -> tuple[Tensor, Tensor]:
    labels = torch.randint(0, classes, (count,))
    patterns = torch.randn(classes, 1, size, size)
    return patterns[labels] + 0.5 * torch.randn(count, 1, size, size), labels


class TinyGPT(nn.Module):
    """A few layers of causal attention over a small alphabet."""

    def __init__(self, layers: int = 2, width: int = 32, vocab: int = 17, *, norm: bool = True) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, norm=norm) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int, *, norm: bool) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width) if norm else nn.Identity()
        self.second = nn.LayerNorm(width) if norm else nn.Identity()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = mlp(width, 4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / q.size(-1) ** 0.5
        hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(hidden, -1e4).softmax(-1) @ v)
        return x + self.feed(self.second(x))


def language_loss(model: nn.Module, batch: int = 16, length: int = 12) -> Tensor:
    """Count on from a random start, by a random amount."""
    start, by = torch.randint(0, 17, (batch, 1)), torch.randint(1, 4, (batch, 1))
    tokens = (start + by * torch.arange(length)) % 17
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


# --- training that diverges -------------------------------------------------------------------------------------------


@program("house prices, features not scaled", 6000, diverges=True)
def _() -> Training:
    x = torch.stack([torch.rand(200) * 200 + 50, torch.randint(1, 6, (200,)).float(), torch.rand(200) * 50], 1)
    price = x @ torch.tensor([3.0, 10.0, -1.0]) + 50
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-5)
    return simple(model, optimizer, lambda: F.mse_loss(model(x).squeeze(1), price))


@program("MLP on targets in the hundreds, SGD", 6000, diverges=True)
def _() -> Training:
    x = torch.randn(256, 10)
    y = 100 * x[:, :1] + 300
    model = mlp(10, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=4e-3)

    def loss() -> Tensor:
        rows = torch.randint(0, 256, (32,))
        return F.mse_loss(model(x[rows]), y[rows])

    return simple(model, optimizer, loss)


@program("CNN without normalisation, momentum, a rate that is warmed up too far", 6000, diverges=True)
def _() -> Training:
    x, y = images()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.LeakyReLU(), nn.Flatten(),
        nn.Linear(512, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 + t)

    def loss() -> Tensor:
        rows = torch.randint(0, 256, (32,))
        return F.mse_loss(model(x[rows]), F.one_hot(y[rows], 4).float())

    return simple(model, optimizer, loss, schedule=schedule)


@program("one cycle with a peak that is too high, regression", 1000, diverges=True)
def _() -> Training:
    x = torch.randn(512, 12)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    model = mlp(12, 64, 64, 1, act=nn.Tanh)
    head = nn.Linear(12, 1)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3.0, total_steps=1000)

    def loss() -> Tensor:
        rows = torch.randint(0, 512, (64,))
        return F.mse_loss(model(x[rows]) + head(x[rows]), y[rows])

    return simple(both, optimizer, loss, schedule=schedule)


@program("ReLU RNN that adds up long sequences", 6000, diverges=True)
def _() -> Training:
    rnn, head = nn.RNN(2, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss() -> Tensor:
        x = torch.rand(16, 40, 2)
        out, _ = rnn(x)
        return F.mse_loss(head(out[:, -1]), (x[:, :, 0] * x[:, :, 1]).sum(1, keepdim=True))

    return simple(model, optimizer, loss)


@program("transformer without norms, SGD with a rate that grows", 6000, diverges=True)
def _() -> Training:
    model = TinyGPT(3, norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.02)
    return simple(model, optimizer, lambda: language_loss(model), schedule=schedule)


@program("transformer without norms in float16, AdamW at a high rate", 6000, diverges=True)
def _() -> Training:
    model = TinyGPT(3, norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return language_loss(model)

    return simple(model, optimizer, loss)


@program("gradients that are never zeroed", 6000, diverges=True)
def _() -> Training:
    x = torch.randn(128, 6)
    y = x @ torch.randn(6, 1)
    model = mlp(6, 16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(t: int) -> None:
        parameters = list(model.parameters())
        rows = torch.randint(0, 128, (16,))
        loss = F.mse_loss(model(x[rows]), y[rows])
        if not math.isfinite(loss.item()):
            raise DivergedError
        loss.backward()
        if not all(bool(torch.isfinite(p.grad).all()) for p in parameters if p.grad is not None):
            raise DivergedError
        optimizer.step()

    return Training({"": model}, [optimizer], step)


@program("StepLR with a gamma above one", 6000, diverges=True)
def _() -> Training:
    x = torch.randn(512, 8)
    y = (x[:, :1] - x[:, 1:2]).tanh()
    model = mlp(8, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=1.5)

    def loss() -> Tensor:
        rows = torch.randint(0, 512, (32,))
        return F.mse_loss(model(x[rows]), y[rows])

    return simple(model, optimizer, loss, schedule=schedule)


@program("critic of a WGAN without any constraint, SGD", 6000, diverges=True)
def _() -> Training:
    critic, maker = mlp(2, 32, 32, 1, act=nn.LeakyReLU), mlp(4, 32, 2)
    first = torch.optim.SGD(critic.parameters(), lr=0.01)
    second = torch.optim.SGD(maker.parameters(), lr=1e-5)

    def step(t: int) -> None:
        real, fake = torch.randn(32, 2) + 2, maker(torch.randn(32, 4))
        update(first, critic(fake.detach()).mean() - critic(real).mean())
        if t % 5 == 4:
            update(second, -critic(maker(torch.randn(32, 4))).mean())

    return Training({"critic": critic, "maker": maker}, [first, second], step)


@program("reward is minimised: the sign of the loss is wrong, Adam, exponential utility", 6000, diverges=True)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        x = torch.randn(64, 4)
        return -torch.exp(model(x) + 0.1 * x[:, :1]).mean()

    return simple(model, optimizer, loss)


@program("VAE of grey levels from 0 to 15, variance by exp, rate warmed up", 6000, diverges=True)
def _() -> Training:
    encoder, decoder = mlp(64, 64, 16), mlp(8, 64, 64)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.02**t)
    x = torch.rand(256, 64) * 15

    def loss() -> Tensor:
        batch = x[torch.randint(0, 256, (32,))]
        mean, logvar = encoder(batch).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        return F.mse_loss(decoder(z), batch) + divergence

    return simple(model, optimizer, loss, schedule=schedule)


@program("pairs of embeddings, partition function by hand", 6000, diverges=True)
def _() -> Training:
    left, right = mlp(16, 64, 32), mlp(16, 64, 32)
    both = nn.ModuleList([left, right])
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-2)
    mix = torch.randn(16, 16)

    def loss() -> Tensor:
        x = torch.randn(32, 16)
        scores = left(x) @ right(x @ mix).T
        return (torch.log(torch.exp(scores).sum(1)) - scores.diagonal()).mean()

    return simple(both, optimizer, loss)


@program("softmax written out, classes far apart", 6000, diverges=True)
def _() -> Training:
    centers = torch.randn(5, 8) * 3
    model = mlp(8, 64, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        y = torch.randint(0, 5, (64,))
        raw = model(centers[y] + 0.3 * torch.randn(64, 8)).exp()
        share = raw / raw.sum(1, keepdim=True)
        return -torch.log(share[torch.arange(64), y]).mean() - 0.01 * raw.log().max()

    return simple(model, optimizer, loss)


@program("Baird's counterexample", 6000, diverges=True)
def _() -> Training:
    features = torch.zeros(7, 8)
    for i in range(6):
        features[i, i], features[i, 7] = 2.0, 1.0
    features[6, 6], features[6, 7] = 1.0, 2.0
    model = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1, 1, 1, 1, 1, 10, 1]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def loss() -> Tensor:
        target = 0.99 * model(features[6:]).detach()
        return F.mse_loss(model(features), target.expand(7, 1))

    return simple(model, optimizer, loss)


@program("fitted values with a discount of one and rewards in float16", 6000, diverges=True)
def _() -> Training:
    model = mlp(4, 64, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        state = torch.randn(32, 4).half()
        after = state * 0.9 + 0.1 * torch.randn(32, 4).half()
        target = 20 + model(after).detach()
        return F.smooth_l1_loss(model(state), target)

    return simple(model, optimizer, loss)


@program("memory that is carried over and never decays", 6000, diverges=True)
def _() -> Training:
    cell, head = nn.Linear(24, 16), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    with torch.no_grad():
        cell.weight[:, 8:] = torch.eye(16) * 1.02
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    memory = torch.zeros(32, 16)

    def loss() -> Tensor:
        nonlocal memory
        x = torch.randn(32, 8)
        state = cell(torch.cat([x, memory], 1))
        memory = state.detach()
        return F.smooth_l1_loss(head(state), x.sum(1, keepdim=True))

    return simple(model, optimizer, loss)


@program("loss scale that sinks: activations outgrow float16", 6000, diverges=True)
def _() -> Training:
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=200)
    x = torch.randn(512, 10)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", torch.float16):
            out = model(x[rows] * 1.03**count)
        return F.mse_loss(out.float(), x[rows, :1])

    def step(t: int) -> None:
        value = loss()
        if not math.isfinite(value.item()):
            raise DivergedError
        update(optimizer, value, scaler=scaler)

    return Training({"": model}, [optimizer], step)


@program("residual blocks without norms, depth 16, SGD slightly too fast", 6000, diverges=True)
def _() -> Training:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(16, 32, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + 0.3 * self.body(x)

    model = nn.Sequential(*[Residual() for _ in range(16)], nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.01**t)

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(model(x), x[:, :1] * x[:, 1:2])

    return simple(model, optimizer, loss, schedule=schedule)


@program("decay that multiplies by 1 + rate * decay", 8000, diverges=True)
def _() -> Training:
    x, y = images()
    model = nn.Sequential(nn.Flatten(), mlp(64, 32, 32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 0.1 * 0.05)

    return Training({"": model}, [optimizer], step)


@program("LBFGS without a line search", 2000, diverges=True)
def _() -> Training:
    model = mlp(3, 16, 1, act=nn.Softplus)
    x = torch.randn(100, 3) * 3
    y = (x.square().sum(1, keepdim=True)).sqrt() * 10
    optimizer = torch.optim.LBFGS(model.parameters(), lr=2.5, max_iter=1, history_size=3)

    def step(t: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if not math.isfinite(loss.item()):
                raise DivergedError
            loss.backward()
            return loss

        optimizer.step(closure)
        if not all(bool(torch.isfinite(p).all()) for p in model.parameters()):
            raise DivergedError

    return Training({"": model}, [optimizer], step)


@program("deep linear net of ten layers", 6000, diverges=True)
def _() -> Training:
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(10)])
    with torch.no_grad():
        for layer in model:
            nn.init.orthogonal_(layer.weight)  # type: ignore[arg-type]  # a Linear
    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 + t / 20)

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(model(x), 2 * x.roll(1, 1)) * 16

    return simple(model, optimizer, loss, schedule=schedule)


@program("policy with a learned deviation that shrinks, log density by hand", 8000, diverges=True)
def _() -> Training:
    model = mlp(3, 32, 1)
    deviation = nn.Parameter(torch.zeros(1))
    both = nn.ModuleList([model, nn.ParameterList([deviation])])
    optimizer = torch.optim.Adam(both.parameters(), lr=2e-2)

    def loss() -> Tensor:
        x = torch.randn(64, 3)
        mean = model(x)
        action = (mean + torch.randn_like(mean) * deviation.exp()).detach()
        reward = -(action - mean.detach()).square()
        density = -0.5 * ((action - mean) / deviation.exp()).square() - deviation
        advantage = (reward - reward.mean()) / reward.std()
        return -(advantage * density).mean()

    return simple(both, optimizer, loss)


@program("Euler steps through a learned field, horizon fixed, rate grows", 6000, diverges=True)
def _() -> Training:
    field = mlp(4, 32, 4, act=nn.Softplus)
    optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.01)

    def loss() -> Tensor:
        x = torch.randn(32, 4)
        goal = x.flip(1) * 2
        for _ in range(20):
            x = x + 0.3 * field(x)
        return F.mse_loss(x, goal)

    return simple(field, optimizer, loss, schedule=schedule)


@program("steps of an inner loop, their size learned", 6000, diverges=True)
def _() -> Training:
    start, size = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.tensor(0.02))
    model = nn.ParameterList([start, size])
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-4)

    def loss() -> Tensor:
        x, truth = torch.randn(30, 5) * torch.tensor([1.0, 1, 2, 2, 3]), torch.randn(5)
        y, weight = x @ truth, start
        for _ in range(5):
            weight = weight - size * (x.T @ (x @ weight - y)) / 30
        return F.mse_loss(x @ weight, y)

    return simple(model, optimizer, loss)


@program("features that drift away, SGD at the edge", 6000, diverges=True)
def _() -> Training:
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    day = 0

    def loss() -> Tensor:
        nonlocal day
        day += 1
        x = torch.randn(64, 6) * (1 + 0.005 * day)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    return simple(model, optimizer, loss)


@program("matrix completion with too large a step", 6000, diverges=True)
def _() -> Training:
    users, items = nn.Embedding(50, 8), nn.Embedding(40, 8)
    model = nn.ModuleList([users, items])
    truth = torch.randn(50, 8) @ torch.randn(8, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.09)

    def loss() -> Tensor:
        u, i = torch.randint(0, 50, (256,)), torch.randint(0, 40, (256,))
        return (users(u).mul(items(i)).sum(1) - truth[u, i]).square().sum() / 2

    return simple(model, optimizer, loss)


@program("logits by a bilinear form in bfloat16, penalty that rewards confidence", 8000, diverges=True)
def _() -> Training:
    model = nn.Bilinear(8, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    x = torch.randn(128, 8)
    y = x[:, :4].argmax(1)

    def loss() -> Tensor:
        rows = torch.randint(0, 128, (32,))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x[rows], x[rows].flip(1))
        return F.cross_entropy(logits.float(), y[rows]) - 0.1 * logits.float().square().mean()

    return simple(model, optimizer, loss)


@program("two players of a bilinear game, simultaneous ascent and descent", 8000, diverges=True)
def _() -> Training:
    a, b = nn.Linear(1, 8, bias=False), nn.Linear(1, 8, bias=False)
    game = torch.randn(8, 8)
    first = torch.optim.SGD(a.parameters(), lr=0.1)
    second = torch.optim.SGD(b.parameters(), lr=0.1)

    def step(t: int) -> None:
        u, v = a.weight.squeeze(1), b.weight.squeeze(1)
        low, high = u @ game @ v.detach(), -(u.detach() @ game @ v)
        update(first, low)
        update(second, high)

    return Training({"a": a, "b": b}, [first, second], step)


# --- healthy training -------------------------------------------------------------------------------------------------


@program("house prices, standardised", 500)
def _() -> Training:
    x = torch.randn(200, 3)
    price = x @ torch.tensor([30.0, 10.0, -5.0]) + 250
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return simple(model, optimizer, lambda: F.mse_loss(model(x).squeeze(1), price))


@program("targets in the thousands, Adam", 1500)
def _() -> Training:
    x = torch.randn(256, 10)
    y = 1000 * x[:, :1] + 3000
    model = mlp(10, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    return simple(model, optimizer, lambda: F.mse_loss(model(x), y))


@program("CNN, linear warm-up and cosine", 200)
def _() -> Training:
    x, y = images()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8),
        nn.ReLU(), nn.Flatten(), nn.Linear(512, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: (t + 1) / 40 if t < 40 else 0.5 * (1 + math.cos(math.pi * (t - 40) / 160))
    )

    def loss() -> Tensor:
        rows = torch.randint(0, 256, (32,))
        return F.cross_entropy(model(x[rows]), y[rows])

    return simple(model, optimizer, loss, schedule=schedule)


@program("CNN at a high rate that spikes and recovers", 250)
def _() -> Training:
    x, y = images()
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss() -> Tensor:
        rows = torch.randint(0, 256, (16,))
        return F.cross_entropy(model(x[rows]), y[rows])

    return simple(model, optimizer, loss)


@program("one cycle to a rate of two, tanh net", 1000)
def _() -> Training:
    x = torch.randn(512, 12)
    y = torch.sin(x[:, :1])
    model = mlp(12, 64, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=1001)

    def loss() -> Tensor:
        rows = torch.randint(0, 512, (64,))
        return F.mse_loss(model(x[rows]), y[rows])

    return simple(model, optimizer, loss, schedule=schedule)


@program("GRU that adds, clipped gradients", 200)
def _() -> Training:
    rnn, head = nn.GRU(2, 32, batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss() -> Tensor:
        x = torch.rand(16, 30, 2)
        return F.mse_loss(head(rnn(x)[0][:, -1]), (x[:, :, 0] * x[:, :, 1]).sum(1, keepdim=True))

    return simple(model, optimizer, loss, clip=1.0)


@program("ReLU RNN from the identity, clipped at one", 400)
def _() -> Training:
    rnn, head = nn.RNN(2, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
    with torch.no_grad():
        rnn.weight_hh_l0.copy_(torch.eye(32))
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        x = torch.rand(16, 30, 2)
        return F.mse_loss(head(rnn(x)[0][:, -1]), (x[:, :, 0] * x[:, :, 1]).sum(1, keepdim=True))

    return simple(model, optimizer, loss, clip=1.0)


@program("transformer, warm-up and AdamW", 350)
def _() -> Training:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 60))
    return simple(model, optimizer, lambda: language_loss(model), schedule=schedule, clip=1.0)


@program("transformer in bfloat16, no clipping", 300)
def _() -> Training:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_loss(model)

    return simple(model, optimizer, loss)


@program("transformer in float16 with a scaler", 250)
def _() -> Training:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=50)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return language_loss(model)

    return simple(model, optimizer, loss, scaler=scaler)


@program("StepLR with a gamma below one, loss spikes with restarts", 1200)
def _() -> Training:
    x = torch.randn(512, 8)
    y = (x[:, :1] - x[:, 1:2]).tanh()
    model = mlp(8, 32, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 200)

    def loss() -> Tensor:
        rows = torch.randint(0, 512, (32,))
        return F.mse_loss(model(x[rows]), y[rows])

    return simple(model, optimizer, loss, schedule=schedule)


@program("WGAN, critic clipped to a box", 800)
def _() -> Training:
    critic, maker = mlp(2, 64, 64, 1, act=nn.LeakyReLU), mlp(4, 32, 2)
    first = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    second = torch.optim.RMSprop(maker.parameters(), lr=1e-3)

    def step(t: int) -> None:
        for _ in range(2):
            real, fake = torch.randn(32, 2) + 2, maker(torch.randn(32, 4))
            update(first, critic(fake.detach()).mean() - critic(real).mean())
            with torch.no_grad():
                for p in critic.parameters():
                    p.clamp_(-0.1, 0.1)
        update(second, -critic(maker(torch.randn(32, 4))).mean())

    return Training({"critic": critic, "maker": maker}, [first, second], step)


@program("expected reward rises to a ceiling of a thousand", 1500)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss() -> Tensor:
        action = model(torch.randn(64, 4))
        return -(1000 * torch.sigmoid(action / 20 - 3) + action.clamp(max=0)).mean()

    return simple(model, optimizer, loss)


@program("VAE of scaled pixels", 500)
def _() -> Training:
    encoder, decoder = mlp(64, 64, 16), mlp(8, 64, 64)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.rand(256, 4) @ torch.rand(4, 64)

    def loss() -> Tensor:
        batch = x[torch.randint(0, 256, (32,))]
        mean, logvar = encoder(batch).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        return (decoder(z) - batch).square().sum(1).mean() * 10 + divergence

    return simple(model, optimizer, loss)


@program("VAE of pixels up to 255, Adam, a loss of millions that falls", 600)
def _() -> Training:
    encoder, decoder = mlp(64, 64, 16), mlp(8, 64, 64)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.rand(256, 64) * 255

    def loss() -> Tensor:
        batch = x[torch.randint(0, 256, (32,))]
        mean, logvar = encoder(batch / 255).chunk(2, 1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        return (decoder(z) - batch).square().sum(1).mean() + divergence

    return simple(model, optimizer, loss)


@program("contrastive pairs, temperature clamped at a hundred, half precision", 700)
def _() -> Training:
    left, right = mlp(16, 64, 32), mlp(16, 64, 32)
    scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
    both = nn.ModuleList([left, right, nn.ParameterList([scale])])
    optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)
    mix = torch.randn(16, 16)

    def step(t: int) -> None:
        x = torch.randn(32, 16)
        a, b = F.normalize(left(x), dim=1), F.normalize(right(x @ mix), dim=1)
        logits = scale.exp().half() * (a.half() @ b.half().T)
        update(optimizer, F.cross_entropy(logits.float(), torch.arange(32)))
        with torch.no_grad():
            scale.clamp_(0, math.log(100))

    return Training({"": both}, [optimizer], step)


@program("classes far apart, cross entropy of large logits", 2000)
def _() -> Training:
    centers = torch.randn(5, 8) * 20
    model = mlp(8, 64, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        y = torch.randint(0, 5, (64,))
        return F.cross_entropy(model(centers[y] + 3 * torch.randn(64, 8)), y)

    return simple(model, optimizer, loss)


@program("logistic regression by hand with a small epsilon, separable", 2000)
def _() -> Training:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss() -> Tensor:
        x = torch.randn(64, 4)
        y = (x[:, :1] > 0).float()
        p = torch.sigmoid(model(x))
        return -(y * torch.log(p + 1e-7) + (1 - y) * torch.log(1 - p + 1e-7)).mean()

    return simple(model, optimizer, loss)


@program("values of a chain of fifty states, discount 0.99", 3000)
def _() -> Training:
    model = nn.Embedding(50, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

    def loss() -> Tensor:
        state = torch.randint(0, 50, (64,))
        after = (state + 1) % 50
        return F.mse_loss(model(state), 1 + 0.99 * model(after).detach())

    return simple(model, optimizer, loss)


@program("Q-learning, target copied every 100 steps, rewards of ten", 2500)
def _() -> Training:
    model = mlp(4, 64, 3)
    target = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(t: int) -> None:
        if t % 100 == 0:
            target.load_state_dict(model.state_dict())
        state = torch.randn(64, 4)
        action = torch.randint(0, 3, (64,))
        after = (0.8 * state + 0.5 * F.one_hot(action, 4).float()).detach()
        best = 10 * state[:, 0].tanh() + 0.95 * target(after).amax(1).detach()
        update(optimizer, F.smooth_l1_loss(model(state)[torch.arange(64), action], best))

    return Training({"model": model}, [optimizer], step)


@program("memory that is carried over and decays", 800)
def _() -> Training:
    cell, head = nn.Linear(24, 16), nn.Linear(16, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = torch.zeros(32, 16)

    def loss() -> Tensor:
        nonlocal memory
        x = torch.randn(32, 8)
        state = torch.tanh(cell(torch.cat([x, memory], 1)))
        memory = state.detach()
        return F.smooth_l1_loss(head(state), x.sum(1, keepdim=True))

    return simple(model, optimizer, loss)


@program("scaler that starts far too high and settles", 500)
def _() -> Training:
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=20)
    x = torch.randn(512, 10)

    def loss() -> Tensor:
        rows = torch.randint(0, 512, (32,))
        with torch.autocast("cpu", torch.float16):
            out = model(x[rows])
        return F.mse_loss(out.float(), 10 * x[rows, :1])

    return simple(model, optimizer, loss, scaler=scaler)


@program("residual blocks with norms, depth 16", 150)
def _() -> Training:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.LayerNorm(16), mlp(16, 32, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.body(x)

    model = nn.Sequential(*[Residual() for _ in range(16)], nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        x = torch.randn(64, 16)
        return F.mse_loss(model(x), x[:, :1] * x[:, 1:2])

    return simple(model, optimizer, loss)


@program("LBFGS with strong Wolfe", 60)
def _() -> Training:
    model = mlp(3, 16, 1, act=nn.Softplus)
    x = torch.randn(100, 3) * 3
    y = (x.square().sum(1, keepdim=True)).sqrt() * 10
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def step(t: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return Training({"": model}, [optimizer], step)


@program("policy with a learned deviation, held by an entropy bonus", 1500)
def _() -> Training:
    model = mlp(3, 32, 1)
    deviation = nn.Parameter(torch.zeros(1))
    both = nn.ModuleList([model, nn.ParameterList([deviation])])
    optimizer = torch.optim.Adam(both.parameters(), lr=5e-3)

    def loss() -> Tensor:
        x = torch.randn(64, 3)
        mean, scale = model(x), deviation.clamp(-3, 2).exp()
        action = (mean + torch.randn_like(mean) * scale).detach()
        reward = -(action - x.sum(1, keepdim=True)).square()
        density = -0.5 * ((action - mean) / scale).square() - deviation.clamp(-3, 2)
        return -((reward - reward.mean()) * density).mean() - 0.1 * deviation.sum()

    return simple(both, optimizer, loss)


@program("GAN that oscillates, logits", 900)
def _() -> Training:
    judge, maker = mlp(2, 64, 1), mlp(4, 64, 2)
    first = torch.optim.Adam(judge.parameters(), lr=5e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(maker.parameters(), lr=5e-3, betas=(0.5, 0.9))
    soft = F.binary_cross_entropy_with_logits

    def step(t: int) -> None:
        real, fake = 0.3 * torch.randn(64, 2) + 4, maker(torch.randn(64, 4))
        ones = torch.ones(64, 1)
        update(first, soft(judge(real), ones) + soft(judge(fake.detach()), 0 * ones))
        update(second, soft(judge(fake), ones))

    return Training({"judge": judge, "maker": maker}, [first, second], step)


@program("Euler steps through a bounded field", 500)
def _() -> Training:
    field = nn.Sequential(mlp(4, 32, 4, act=nn.Tanh), nn.Tanh())
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)

    def loss() -> Tensor:
        x = torch.randn(32, 4)
        goal = x.flip(1) * 2
        for _ in range(20):
            x = x + 0.1 * field(x)
        return F.mse_loss(x, goal)

    return simple(field, optimizer, loss)


@program("steps of an inner loop, their size learned slowly", 800)
def _() -> Training:
    start, size = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.tensor(0.02))
    model = nn.ParameterList([start, size])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x, truth = torch.randn(30, 5), torch.randn(5)
        y, weight = x @ truth, start
        for _ in range(5):
            weight = weight - size * (x.T @ (x @ weight - y)) / 30
        return F.mse_loss(x @ weight, y)

    return simple(model, optimizer, loss)


@program("features that drift to ten times their size, Adam", 2000)
def _() -> Training:
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    day = 0

    def loss() -> Tensor:
        nonlocal day
        day += 1
        x = torch.randn(64, 6) * (1 + 9 * day / 2000)
        return F.mse_loss(model(x), x.sum(1, keepdim=True))

    return simple(model, optimizer, loss)


@program("matrix completion from small factors", 1500)
def _() -> Training:
    users, items = nn.Embedding(50, 8), nn.Embedding(40, 8)
    model = nn.ModuleList([users, items])
    with torch.no_grad():
        users.weight.mul_(0.01)
        items.weight.mul_(0.01)
    truth = torch.randn(50, 8) @ torch.randn(8, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        u, i = torch.randint(0, 50, (256,)), torch.randint(0, 40, (256,))
        return (users(u).mul(items(i)).sum(1) - truth[u, i]).square().sum() / 2

    return simple(model, optimizer, loss)


@program("bilinear logits in bfloat16 with weight decay", 600)
def _() -> Training:
    model = nn.Bilinear(8, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=1e-3)
    x = torch.randn(128, 8)
    y = x[:, :4].argmax(1)

    def loss() -> Tensor:
        rows = torch.randint(0, 128, (32,))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x[rows], x[rows].flip(1))
        return F.cross_entropy(logits.float(), y[rows])

    return simple(model, optimizer, loss)


@program("two players with a penalty: the game spirals in", 1500)
def _() -> Training:
    a, b = nn.Linear(1, 8, bias=False), nn.Linear(1, 8, bias=False)
    game = torch.randn(8, 8)
    first = torch.optim.SGD(a.parameters(), lr=0.02)
    second = torch.optim.SGD(b.parameters(), lr=0.02)

    def step(t: int) -> None:
        u, v = a.weight.squeeze(1), b.weight.squeeze(1)
        low, high = u @ game @ v.detach(), -(u.detach() @ game @ v)
        update(first, low + 0.5 * u.square().sum())
        update(second, high + 0.5 * v.square().sum())

    return Training({"a": a, "b": b}, [first, second], step)


@program("heavy tails: targets with Cauchy noise", 1500)
def _() -> Training:
    model = mlp(5, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss() -> Tensor:
        x = torch.randn(64, 5)
        noise = torch.distributions.Cauchy(0.0, 0.1).sample((64, 1))
        return F.mse_loss(model(x), x[:, :1] + noise)

    return simple(model, optimizer, loss, clip=5.0)


@program("curriculum: inputs get longer and louder every hundred steps", 1000)
def _() -> Training:
    rnn, head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleList([rnn, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        level, count = 1 + count // 100, count + 1
        x = torch.randn(8, 3 * level, 1) * level
        return (head(rnn(x)[0]) - x.cumsum(1)).square().sum()

    return simple(model, optimizer, loss, clip=10.0)


@program("loss weighted by a ramp to ten thousand", 1200)
def _() -> Training:
    model = mlp(6, 32, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        x = torch.randn(64, 6)
        out = model(x)
        weight = 1e4 * min(1.0, count / 600) ** 2
        return F.mse_loss(out[:, 0], x[:, 0]) + weight * F.mse_loss(out[:, 1], x[:, 1] * x[:, 2])

    return simple(model, optimizer, loss)


@program("physics-informed net with second derivatives", 500)
def _() -> Training:
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss() -> Tensor:
        x = torch.rand(64, 1, requires_grad=True)
        u = model(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        d2u = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
        edge = model(torch.tensor([[0.0], [1.0]])).square().sum()
        return (d2u + 40 * torch.sin(2 * math.pi * x)).square().mean() + 100 * edge

    return simple(model, optimizer, loss)


@program("student and teacher by a moving average", 800)
def _() -> Training:
    student = mlp(10, 64, 16)
    teacher = copy.deepcopy(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.3, momentum=0.9)

    def step(t: int) -> None:
        x = torch.randn(64, 10)
        wanted = F.softmax(teacher(x + 0.1 * torch.randn_like(x)).detach() / 0.1, 1)
        update(optimizer, -(wanted * F.log_softmax(student(x) / 0.2, 1)).sum(1).mean())
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    return Training({"student": student, "teacher": teacher}, [optimizer], step)


@program("mixture of Gaussians, precise data", 1500)
def _() -> Training:
    net = mlp(2, 64, 9)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def loss() -> Tensor:
        x = torch.rand(64, 2)
        y = torch.where(torch.rand(64) < 0.5, x[:, 0], -x[:, 1]) + 0.02 * torch.randn(64)
        weight, mean, raw = net(x).chunk(3, 1)
        scale = F.softplus(raw) + 1e-2
        density = -0.5 * ((y[:, None] - mean) / scale).square() - scale.log()
        return -torch.logsumexp(weight.log_softmax(1) + density, 1).mean()

    return simple(net, optimizer, loss)


@program("mixed batches: one in fifty is a hundred times as large", 1500)
def _() -> Training:
    model = mlp(8, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    count = 0

    def loss() -> Tensor:
        nonlocal count
        count += 1
        x = torch.randn(32, 8) * (100 if count % 50 == 49 else 1)
        return F.smooth_l1_loss(model(x), x.sum(1, keepdim=True))

    return simple(model, optimizer, loss, clip=1.0)


@program("weights thawed one block after the other", 900)
def _() -> Training:
    blocks = nn.ModuleList(mlp(16, 32, 16) for _ in range(3))
    head = nn.Linear(16, 3)
    model = nn.ModuleList([blocks, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    centers = torch.randn(3, 16)

    def step(t: int) -> None:
        for i, block in enumerate(blocks):
            block.requires_grad_(t >= 200 * (i + 1))
        y = torch.randint(0, 3, (32,))
        x = centers[y] + torch.randn(32, 16)
        for block in blocks:
            x = x + block(x)
        update(optimizer, F.cross_entropy(head(x), y))

    return Training({"": model}, [optimizer], step)


@program("rate found by a search, then trained with it", 700)
def _() -> Training:
    x, y = images()
    model = nn.Sequential(nn.Flatten(), mlp(64, 64, 4))
    first = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    grow = rate(optimizer, lambda t: 1e-4 * 1.1**t if t < 90 else 0.1)

    def step(t: int) -> None:
        grow(t)
        if t == 90:
            model.load_state_dict(first)
        rows = torch.randint(0, 256, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


@program("reward that rises a hundredfold, REINFORCE with a baseline", 600)
def _() -> Training:
    policy, value = mlp(4, 32, 4), mlp(4, 32, 1)
    model = nn.ModuleList([policy, value])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def loss() -> Tensor:
        state = torch.randn(64, 4)
        spread = torch.distributions.Categorical(logits=policy(state))
        action = spread.sample()
        reward = torch.where(action == state.argmax(1), 100.0, 1.0)
        base = value(state).squeeze(1)
        gain = (reward - base).detach()
        return -(spread.log_prob(action) * gain).mean() + F.mse_loss(base, reward)

    return simple(model, optimizer, loss)


@program("float64 curve fitting with SGD, loss falls by twelve orders", 3000)
def _() -> Training:
    x = torch.linspace(-1, 1, 50, dtype=torch.float64)[:, None]
    features = torch.cat([x**i for i in range(5)], 1)
    y = features @ torch.tensor([[1e3], [-2e3], [5e2], [1e2], [3e3]], dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return simple(model, optimizer, lambda: F.mse_loss(model(features), y))
