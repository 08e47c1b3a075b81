"""The first set: the rule for losses, gradients and layers was made with these programs."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, classification, mlp, program, rate, regression, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


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


# --- healthy training -------------------------------------------------------------------------------------------------


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
