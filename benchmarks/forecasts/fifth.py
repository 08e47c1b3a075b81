"""The fifth set: declines of at least fifteen steps, and healthy trainings in which something grows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, rate, update
from torch import Tensor, nn


@program("control through a known model, reward without a bound", 6000, diverges=True)
def _() -> Training:
    gain, push = nn.Parameter(torch.eye(4) * 0.9), nn.Parameter(torch.randn(4, 4) * 0.1)
    optimizer = torch.optim.Adam([gain, push], lr=5e-3)

    def step(t: int) -> None:
        state = torch.randn(16, 4) * 0.1
        for _ in range(40):
            state = state @ gain + torch.tanh(state @ push) * 0.1
        update(optimizer, -state.abs().sum(1).mean())

    return Training({"": nn.ParameterList([gain, push])}, [optimizer], step)


@program("image and text encoders, learned logit scale, float16", 6000, diverges=True)
def _() -> Training:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = mlp(12, 32, 16), mlp(8, 32, 16)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            a, b = F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)
            return self.logit_scale.half().exp() * (a.half() @ b.half().T)

    model = Clip()
    optimizer = torch.optim.Adam(
        [
            {"params": [*model.image.parameters(), *model.text.parameters()], "lr": 1e-3},
            {"params": [model.logit_scale], "lr": 2e-2},
        ]
    )
    make = torch.randn(8, 12)

    def step(t: int) -> None:
        text = F.one_hot(torch.randperm(8), 8).float() * 3
        logits = model(text @ make + 0.1 * torch.randn(8, 12), text)
        update(optimizer, F.cross_entropy(logits.float(), torch.arange(8)) - 0.05 * model.logit_scale)

    return Training({"": model}, [optimizer], step)


@program("policy gradient, log of a softmax, actions that are punished", 6000, diverges=True)
def _() -> Training:
    policy = mlp(4, 32, 3)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def step(t: int) -> None:
        seen = torch.randn(64, 4)
        probs = torch.softmax(policy(seen), 1)
        action = torch.randint(0, 3, (64,))  # of an old policy
        reward = torch.where(action == 0, 1.0, -1.0)
        update(optimizer, -(reward * torch.log(probs[torch.arange(64), action])).mean())

    return Training({"policy": policy}, [optimizer], step)


@program("penalty method, its weight multiplied in each step", 6000, diverges=True)
def _() -> Training:
    model = mlp(5, 32, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    weight = torch.tensor(1.0)

    def step(t: int) -> None:
        nonlocal weight
        x = torch.randn(32, 5)
        out = model(x)
        weight = weight * 1.06
        update(optimizer, F.mse_loss(out, x) + weight * F.relu(out.sum(1) - 0.5).square().mean())

    return Training({"": model}, [optimizer], step)


@program("GAN, critic without a bound, log of a sigmoid by hand", 6000, diverges=True)
def _() -> Training:
    maker, critic = mlp(4, 32, 2), mlp(2, 64, 64, 1)
    opt_g = torch.optim.Adam(maker.parameters(), lr=1e-4)
    opt_d = torch.optim.Adam(critic.parameters(), lr=2e-3)

    def step(t: int) -> None:
        real = torch.randn(64, 2) * 0.2 + torch.tensor([4.0, 4.0])
        fake = maker(torch.randn(64, 4))
        update(opt_d, critic(fake.detach()).mean() - critic(real).mean())
        update(opt_g, -torch.log(torch.sigmoid(critic(fake))).mean())

    return Training({"maker": maker, "critic": critic}, [opt_g, opt_d], step)


@program("off-policy returns with a product of ratios", 6000, diverges=True)
def _() -> Training:
    policy = mlp(4, 32, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)

    def step(t: int) -> None:
        seen, action = torch.randn(16, 100, 4), torch.randint(0, 4, (16, 100))
        action = torch.where(torch.rand(16, 100) < 0.8, seen.argmax(-1), action)  # of a good teacher
        logp = F.log_softmax(policy(seen), -1).gather(-1, action[..., None])[..., 0]
        ratio = torch.cumprod(logp.exp() / 0.25, 1)
        reward = (action == seen.argmax(-1)).float()
        update(optimizer, -(ratio * reward).mean())

    return Training({"policy": policy}, [optimizer], step)


@program("prototypes by a moving average, one class without samples", 6000, diverges=True)
def _() -> Training:
    encoder = mlp(6, 32, 8)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=1e-2)
    prototypes = torch.randn(4, 8)

    def step(t: int) -> None:
        nonlocal prototypes
        y = torch.randint(0, 3, (32,))
        z = encoder(torch.randn(32, 6) + y[:, None])
        sums = torch.zeros(4, 8).index_add(0, y, z.detach())
        prototypes = 0.9 * prototypes + 0.1 * sums / 10
        unit = prototypes / prototypes.norm(dim=1, keepdim=True)
        update(optimizer, F.cross_entropy(z @ unit.T, y))

    return Training({"encoder": encoder}, [optimizer], step)


# --- healthy, although something grows ----------------------------------------------------------------------------


@program("cyclic rate with restarts", 2000)
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 100, 2, eta_min=1e-5)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        update(optimizer, F.mse_loss(model(x), x[:, :2].prod(1, keepdim=True)))
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("returns that grow as episodes get longer", 3000)
def _() -> Training:
    value = mlp(4, 64, 1)
    optimizer = torch.optim.Adam(value.parameters(), lr=1e-3)

    def step(t: int) -> None:
        length = min(10 + t // 5, 300)
        seen = torch.rand(64, 4)
        returns = seen.sum(1, keepdim=True) * length * (1 + 0.1 * torch.randn(64, 1))
        update(optimizer, F.mse_loss(value(seen), returns))

    return Training({"value": value}, [optimizer], step)


@program("curriculum of sequence lengths, loss summed over time", 1500)
def _() -> Training:
    net, head = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 4)
    model = nn.ModuleList([net, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(8, 2 + min(t // 10, 62), 4).cumsum(1)
        out, _ = net(x[:, :-1])
        update(optimizer, F.mse_loss(head(out), x[:, 1:], reduction="sum"), clip=5.0)

    return Training({"": model}, [optimizer], step)


@program("WGAN with weight clipping", 1500)
def _() -> Training:
    maker, critic = mlp(4, 32, 2), mlp(2, 64, 64, 1)
    opt_g = torch.optim.RMSprop(maker.parameters(), lr=5e-4)
    opt_d = torch.optim.RMSprop(critic.parameters(), lr=5e-4)

    def step(t: int) -> None:
        real = torch.randn(64, 2) * 0.2 + torch.tensor([4.0, 4.0])
        fake = maker(torch.randn(64, 4))
        update(opt_d, critic(fake.detach()).mean() - critic(real).mean())
        with torch.no_grad():
            for p in critic.parameters():
                p.clamp_(-0.2, 0.2)
        update(opt_g, -critic(fake).mean())

    return Training({"maker": maker, "critic": critic}, [opt_g, opt_d], step)


@program("large but bounded logits, float16", 2000)
def _() -> Training:
    a, b = mlp(12, 32, 16), mlp(8, 32, 16)
    model = nn.ModuleList([a, b])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    make = torch.randn(8, 12)

    def step(t: int) -> None:
        text = torch.randn(32, 8)
        u, v = F.normalize(a(text @ make), dim=1).half(), F.normalize(b(text), dim=1).half()
        update(optimizer, F.cross_entropy((u @ v.T / 0.002).float(), torch.arange(32), label_smoothing=0.1))

    return Training({"": model}, [optimizer], step)


@program("running mean and count of all that was seen", 3000)
def _() -> Training:
    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(10))
            self.register_buffer("square", torch.zeros(10))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.total += x.sum(0)
                self.square += x.square().sum(0)
                self.count += len(x)
            mean = self.total / self.count
            return (x - mean) / (self.square / self.count - mean.square()).sqrt().clamp(min=1e-3)

    model = nn.Sequential(Centre(), mlp(10, 32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(64, 10) * 3 + 5
        update(optimizer, F.mse_loss(model(x), x[:, :1]))

    return Training({"": model}, [optimizer], step)


@program("learned noise that shrinks to what the data has", 4000)
def _() -> Training:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log_sigma = mlp(4, 64, 1), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            sigma = self.log_sigma.exp()
            return (0.5 * ((y - self.net(x)) / sigma).square() + torch.log(sigma)).mean()

    model = Head()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(64, 4)
        update(optimizer, model(x, x[:, :1] + x[:, 1:2] + 1e-3 * torch.randn(64, 1)))

    return Training({"": model}, [optimizer], step)


@program("Gumbel softmax, temperature annealed to a floor", 3000)
def _() -> Training:
    encoder, decoder = mlp(8, 32, 6), mlp(6, 32, 8)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        tau = max(5.0 * 0.995**t, 0.1)
        x = F.one_hot(torch.randint(0, 8, (64,)), 8).float()
        logits = encoder(x)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        update(optimizer, F.mse_loss(decoder(torch.softmax((logits + noise) / tau, 1)), x))

    return Training({"": model}, [optimizer], step)


@program("weight of a term that rises by a schedule and stays", 2000)
def _() -> Training:
    encoder, decoder = mlp(10, 32, 8), mlp(4, 32, 10)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        beta = min(1e-4 * 1.03**t, 4.0)
        x = torch.randn(64, 10)
        mean, logvar = encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        kl = 0.5 * (mean.square() + logvar.exp() - logvar - 1).sum(1).mean()
        update(optimizer, F.mse_loss(decoder(z), x) + beta * kl)

    return Training({"": model}, [optimizer], step)


@program("transmittance along rays, a product that sinks to 0", 2500)
def _() -> Training:
    field = mlp(3, 64, 64, 4)
    optimizer = torch.optim.Adam(field.parameters(), lr=2e-3)

    def step(t: int) -> None:
        start, way = torch.rand(16, 1, 3) - 0.5, torch.linspace(0, 2, 32)[None, :, None]
        points = start + way * torch.tensor([0.0, 0.0, 1.0])
        out = field(points)
        density = torch.exp(out[..., 0].clamp(max=12.0))
        alpha = 1 - torch.exp(-density * 2 / 32)
        passed = torch.cumprod(1 - alpha + 1e-10, 1)
        colour = ((alpha * passed)[..., None] * torch.sigmoid(out[..., 1:])).sum(1)
        update(optimizer, F.mse_loss(colour, start[:, 0].abs()))

    return Training({"field": field}, [optimizer], step)


@program("branches that start at zero and open, float16", 2000)
def _() -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.gate = mlp(32, 64, 32), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate * self.net(x)

    model = nn.Sequential(nn.Linear(10, 32), *[Block() for _ in range(8)], nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    warm = rate(optimizer, lambda t: 5e-4 * min(1.0, t / 200))

    def step(t: int) -> None:
        warm(t)
        x = torch.randn(64, 10)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        update(optimizer, F.mse_loss(out.float(), 30 * x[:, :1] * x[:, 1:2]), clip=10.0)

    return Training({"": model}, [optimizer], step)


@program("sums over an epoch in float16, reset at its end", 2000)
def _() -> Training:
    model = mlp(10, 32, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    counts = torch.zeros(4, dtype=torch.float16)

    def step(t: int) -> None:
        nonlocal counts
        if t % 200 == 0:
            counts = torch.ones(4, dtype=torch.float16)
        x = torch.randn(256, 10)
        y = x[:, :4].argmax(1)
        counts = counts + torch.bincount(y, minlength=4).half()
        weight = counts.sum() / (4 * counts)
        update(optimizer, F.cross_entropy(model(x), y, weight.float()))

    return Training({"": model}, [optimizer], step)


@program("polynomial features of large numbers", 1500)
def _() -> Training:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.rand(64, 1) * (50 + 0.1 * t)
        powers = torch.cat([x**k for k in range(1, 9)], 1)
        update(optimizer, F.mse_loss(model(powers / powers.abs().amax(0)), torch.sin(x)))

    return Training({"": model}, [optimizer], step)
