"""The second set: written after the rule for losses, gradients and layers was fixed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, classification, mlp, program, rate, regression, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


@program("regulariser with the wrong sign", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    x = torch.randn(256, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        loss = F.mse_loss(model(x[rows]), x[rows, :1]) - 4 * sum(p.square().sum() for p in model.parameters())
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("discount above 1", 3000, diverges=True)
def _() -> Training:
    model = nn.Embedding(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(t: int) -> None:
        s = torch.randint(0, 8, (32,))
        target = 0.5 + 1.3 * model((s + 1) % 8).detach()
        update(optimizer, F.mse_loss(model(s), target))

    return Training({"": model}, [optimizer], step)


@program("reward without a bound, float16", 3000, diverges=True)
def _() -> Training:
    model = mlp(8, 32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.rand(32, 8))
        update(optimizer, -out.float().mean())

    return Training({"": model}, [optimizer], step)


@program("momentum on a quadratic, beyond stability", 3000, diverges=True)
def _() -> Training:
    weights = nn.ParameterList([nn.Parameter(torch.randn(20))])
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.42, momentum=0.9)
    curvature = torch.linspace(0.1, 10, 20)
    return Training({"": weights}, [optimizer], lambda t: update(optimizer, 0.5 * (curvature * weights[0] ** 2).sum()))


@program("learned temperature that runs away, float16", 3000, diverges=True)
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


@program("hidden state that is never reset", 3000, diverges=True)
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


@program("schedule that multiplies the rate", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-3 * 1.01**t), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("variance that collapses", 3000, diverges=True)
def _() -> Training:
    mean, deviation = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    weights = nn.ParameterList([mean, deviation])
    optimizer = torch.optim.Adam(weights.parameters(), lr=0.05)

    def step(t: int) -> None:
        x = torch.ones(16, 4)
        update(optimizer, (0.5 * (x - mean) ** 2 * torch.exp(-2 * deviation) + deviation).mean())

    return Training({"": weights}, [optimizer], step)


@program("Q-learning without a target network", 3000, diverges=True)
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


@program("convolution, summed loss", 3000, diverges=True)
def _() -> Training:
    model = nn.Conv1d(4, 4, 5, padding=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def step(t: int) -> None:
        x = torch.randn(4, 4, 32)
        update(optimizer, F.mse_loss(model(x), x.flip(-1), reduction="sum"))

    return Training({"": model}, [optimizer], step)


@program("loss with the wrong sign", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(256, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, -F.mse_loss(model(x[rows]), x[rows, :1]))

    return Training({"": model}, [optimizer], step)


@program("Poisson regression, rate too high", 3000, diverges=True)
def _() -> Training:
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(256, 10)
    y = torch.poisson((x[:, :1] * 0.5 + 1).exp())

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, F.poisson_nll_loss(model(x[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


# --- healthy training -------------------------------------------------------------------------------------------------


@program("CNN with batch norm", 150)
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


@program("small transformer", 150)
def _() -> Training:
    table, block = nn.Embedding(32, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
    model = nn.Sequential(table, block, nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randint(0, 32, (8, 12))
        update(optimizer, F.cross_entropy(model(x).flatten(0, 1), (x * 3 + 1).flatten() % 32), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("variational autoencoder", 600)
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


@program("weight of a loss term that grows a thousandfold", 1200)
def _() -> Training:
    model = mlp(10, 32, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        update(optimizer, F.mse_loss(model(x), x) * 2 ** min(t / 60, 12))

    return Training({"": model}, [optimizer], step)


@program("cyclic rate with a high peak", 900)
def _() -> Training:
    model = mlp(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return classification(model, optimizer, before=rate(optimizer, lambda t: 0.01 + 0.8 * abs((t % 200) / 100 - 1)))


@program("noisy labels, high rate", 800)
def _() -> Training:
    model = mlp(10, 32, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (16,))
        update(optimizer, F.cross_entropy(model(x[rows]), torch.randint(0, 3, (16,))))

    return Training({"": model}, [optimizer], step)


@program("contrastive loss with a learned temperature", 800)
def _() -> Training:
    left, right, scale = nn.Linear(10, 8), nn.Linear(10, 8), nn.Parameter(torch.tensor(2.0))
    model = nn.ModuleList([left, right, nn.ParameterList([scale])])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        a, b = F.normalize(left(x), dim=1), F.normalize(right(x + 0.1 * torch.randn(32, 10)), dim=1)
        update(optimizer, F.cross_entropy(a @ b.T * scale.exp().clamp(max=100), torch.arange(32)))

    return Training({"": model}, [optimizer], step)


@program("bfloat16 autocast", 500)
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


@program("float16 with a scaler and hard batches", 700)
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


@program("returns that grow while the policy learns", 800)
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


@program("sequences that get longer, summed loss", 600)
def _() -> Training:
    cell, head = nn.GRU(2, 12, batch_first=True), nn.Linear(12, 1)
    model = nn.ModuleList([cell, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(8, 2 + t // 60, 2)
        update(optimizer, F.mse_loss(head(cell(x)[0]), x[..., :1].cumsum(1), reduction="sum"))

    return Training({"": model}, [optimizer], step)


@program("two tasks in turn, of different scale", 1000)
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        update(optimizer, F.mse_loss(model(x), x[:, :1]) * (1000 if t // 100 % 2 else 1))

    return Training({"": model}, [optimizer], step)


@program("rare features a thousand times as large", 1500)
def _() -> Training:
    model = mlp(10, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        if t % 131 == 100:
            x[0] *= 1000
        update(optimizer, F.mse_loss(model(x), x[:, :1].clamp(-50, 50)))

    return Training({"": model}, [optimizer], step)


@program("new head on a trained body", 900)
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


@program("energies that fall, held by a penalty", 1200)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def step(t: int) -> None:
        low, high = model(torch.randn(32, 4)), model(torch.randn(32, 4) + 2)
        update(optimizer, (low - high).mean() + 0.02 * (low**2 + high**2).mean())

    return Training({"": model}, [optimizer], step)


@program("distillation at a high temperature", 500)
def _() -> Training:
    teacher, model = mlp(10, 64, 5), mlp(10, 16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        soft = (teacher(x).detach() * 20 / 4).softmax(1)
        update(optimizer, F.kl_div((model(x) / 4).log_softmax(1), soft, reduction="batchmean") * 16)

    return Training({"": model}, [optimizer], step)


@program("one-cycle rate with Adam", 800)
def _() -> Training:
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-4 + 0.03 * math.sin(math.pi * t / 800) ** 2), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("Adam at a rate that is too high, but bounded", 800)
def _() -> Training:
    model = mlp(10, 32, 32, 3)
    return classification(model, torch.optim.Adam(model.parameters(), lr=0.1))


@program("unnormalised inputs, loss of millions at the start", 800)
def _() -> Training:
    model = mlp(10, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 10) * 1e3
        update(optimizer, F.mse_loss(model(x), x.sum(1, keepdim=True)))

    return Training({"": model}, [optimizer], step)


@program("linear autoencoder from small weights", 1500)
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
