"""The third set: written before the forecasts of weights, operators and attention, which were made with it in view."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, classification, mlp, program, rate, regression, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


@program("Adam, rate that doubles every hundred steps", 4000, diverges=True)
def _() -> Training:
    model = mlp(10, 32, 32, 1, act=nn.Identity)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    training = regression(model, optimizer)
    before, step = rate(optimizer, lambda t: 1e-3 * 2 ** (t / 100)), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("momentum with clipped gradients that point outwards, float16", 4000, diverges=True)
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x[torch.randint(0, 512, (32,))])
        update(optimizer, -out.float().square().mean(), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("log of a probability that falls to 0", 6000, diverges=True)
def _() -> Training:
    logit = nn.ParameterList([nn.Parameter(torch.zeros(4))])
    optimizer = torch.optim.SGD(logit.parameters(), lr=0.2)

    def step(t: int) -> None:
        chance = torch.exp(-logit[0].square())
        update(optimizer, 0.1 * torch.log(chance).mean() - 0.1 * logit[0].mean())

    return Training({"": logit}, [optimizer], step)


@program("division by a standard deviation that collapses", 6000, diverges=True)
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


@program("normalising flow whose scale runs away", 6000, diverges=True)
def _() -> Training:
    log_scale = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(log_scale.parameters(), lr=0.02)

    def step(t: int) -> None:
        x = torch.randn(64, 4)
        s = log_scale(x)
        z = x * torch.exp(s)
        update(optimizer, -(s.mean() * 2) + 1e-30 * z.abs().clamp(max=1e3).mean())

    return Training({"": log_scale}, [optimizer], step)


@program("actor and critic without a target, returns that feed back", 5000, diverges=True)
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


@program("transformer with attention logits that grow, float16", 4000, diverges=True)
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


@program("recurrent state with a gain that is learned", 4000, diverges=True)
def _() -> Training:
    gain = nn.ParameterList([nn.Parameter(torch.ones(8) * 0.9)])
    optimizer = torch.optim.SGD(gain.parameters(), lr=1e-3)

    def step(t: int) -> None:
        h = torch.rand(8)
        for _ in range(30):
            h = h * gain[0]
        update(optimizer, -h.clamp(max=1e20).log1p().mean() - h.mean() * 1e-3)

    return Training({"": gain}, [optimizer], step)


@program("GAN, discriminator far ahead, gradients not bounded", 5000, diverges=True)
def _() -> Training:
    g, d = mlp(4, 16, 2), mlp(2, 16, 1)
    og = torch.optim.SGD(g.parameters(), lr=0.3, momentum=0.5)
    od = torch.optim.SGD(d.parameters(), lr=0.3, momentum=0.5)

    def step(t: int) -> None:
        z = torch.randn(32, 4)
        update(od, d(g(z).detach()).mean() - d(torch.randn(32, 2) + 2).mean())
        update(og, -d(g(z)).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("weight decay with the wrong sign", 5000, diverges=True)
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


# --- healthy training -------------------------------------------------------------------------------------------------


@program("long warm-up to a high rate, momentum", 1500)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    return classification(model, optimizer, before=rate(optimizer, lambda t: 0.2 * min(t / 1000, 1)))


@program("warm restarts with a regression that spikes", 1500)
def _() -> Training:
    model = mlp(10, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    training = regression(model, optimizer, clip=5.0)
    before, step = rate(optimizer, lambda t: 0.02 * (1 + math.cos(math.pi * (t % 300) / 300)) + 1e-4), training.step
    training.step = lambda t: (before(t), step(t))[1]
    return training


@program("scale-invariant weights that grow without decay", 2000)
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))
    return classification(model, torch.optim.SGD(model.parameters(), lr=1.0))


@program("DCGAN in small", 200)
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


@program("WGAN with a gradient penalty", 400)
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


@program("PPO with clipped ratios", 800)
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


@program("actor and critic with rewards that rise a hundredfold", 1500)
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


@program("one bad batch in a hundred, SGD without clipping", 1200)
def _() -> Training:
    model = mlp(10, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        y = x.sum(1, keepdim=True) * (40 if t % 100 == 60 else 1)
        update(optimizer, F.mse_loss(model(x), y))

    return Training({"": model}, [optimizer], step)


@program("loss spikes that come back, Adam with a small beta2", 1500)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2, betas=(0.9, 0.8))
    return classification(model, optimizer)


@program("sharp attention: copy the marked token", 700)
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


@program("variances learned of clean data, with a floor", 1500)
def _() -> Training:
    model = mlp(4, 16, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 4)
        mean, log_var = model(x).chunk(2, 1)
        log_var = log_var.clamp(min=-8)
        update(optimizer, (0.5 * (x[:, :1] - mean) ** 2 * torch.exp(-log_var) + 0.5 * log_var).mean())

    return Training({"": model}, [optimizer], step)


@program("contrastive learning with batch norm, embeddings that shrink", 600)
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8), nn.LayerNorm(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-2)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        a, b = (F.normalize(model(x + 0.1 * torch.randn(32, 10)), dim=1) for _ in range(2))
        update(optimizer, F.cross_entropy(a @ b.T * 10, torch.arange(32)))

    return Training({"": model}, [optimizer], step)


@program("strong weight decay: everything shrinks", 2000)
def _() -> Training:
    model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)
    return classification(model, optimizer)


@program("learned weights of tasks, exp of minus s", 2000)
def _() -> Training:
    model, s = mlp(10, 32, 2), nn.Parameter(torch.zeros(2))
    both = nn.ModuleDict({"model": model, "s": nn.ParameterList([s])})
    optimizer = torch.optim.Adam(both.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        errors = (model(x) - x[:, :2] * torch.tensor([1.0, 10.0])).square().mean(0)
        update(optimizer, (torch.exp(-s) * errors + s).sum())

    return Training({"": both}, [optimizer], step)


@program("embedding and head trained from zero, float16", 1200)
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
