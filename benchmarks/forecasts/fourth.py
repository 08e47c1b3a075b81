"""The fourth set: written before the rules were changed last, none of which was made with it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, rate, update
from torch import Tensor, nn


class Lion(torch.optim.Optimizer):
    """Steps of the sign of the momentum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is used here
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.sub_(group["lr"] * (0.9 * kept + 0.1 * p.grad).sign())
                    kept.mul_(0.99).add_(p.grad, alpha=0.01)


def images(count: int = 256) -> tuple[Tensor, Tensor]:
    y = torch.randint(0, 4, (count,))
    x = torch.randn(count, 1, 8, 8) * 0.5
    for i, label in enumerate(y.tolist()):
        x[i, 0, label * 2] += 1.0
    return x, y


# --- training that diverges -------------------------------------------------------------------------------------------


@program("search for a learning rate, left running", 1000, diverges=True)
def _() -> Training:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.05**t)
    x, y = images()

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (16,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("deep Q-learning without a target network, large rewards", 6000, diverges=True)
def _() -> Training:
    model = mlp(6, 48, 48, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, nesterov=True, momentum=0.9)

    def step(t: int) -> None:
        s, a = torch.randn(32, 6), torch.randint(0, 3, (32,))
        following = s.roll(1, 1) * 1.3 + a[:, None] * 0.1
        with torch.no_grad():
            target = s[:, 0] * 2 + 0.99 * model(following).max(1).values
        update(optimizer, F.mse_loss(model(s)[torch.arange(32), a], target))

    return Training({"q": model}, [optimizer], step)


@program("autoencoder with a learned variance, exact reconstruction", 6000, diverges=True)
def _() -> Training:
    enc, dec = nn.Linear(6, 6), nn.Linear(6, 6)
    log_variance = nn.Parameter(torch.zeros(6))
    model = nn.ModuleDict({"enc": enc, "dec": dec, "noise": nn.ParameterList([log_variance])})
    optimizer = torch.optim.Adam(
        [{"params": [*enc.parameters(), *dec.parameters()], "lr": 1e-2}, {"params": [log_variance], "lr": 3e-2}]
    )

    def step(t: int) -> None:
        x = torch.randn(64, 6)
        x[:, 3:] = 0.0  # padding that is always the same
        error = (dec(enc(x)) * (x != 0) - x).square()
        update(optimizer, (0.5 * error / log_variance.exp() + 0.5 * log_variance).mean())

    return Training({"": model}, [optimizer], step)


@program("energy-based model without a penalty, float16", 6000, diverges=True)
def _() -> Training:
    energy = mlp(2, 64, 64, 1, act=nn.SiLU)
    optimizer = torch.optim.AdamW(energy.parameters(), lr=3e-3)

    def step(t: int) -> None:
        angle = torch.rand(64) * 6.28
        real = torch.stack([angle.cos(), angle.sin()], 1) * 2
        fake = (torch.randn(64, 2) * 2).requires_grad_()
        for _ in range(3):
            slope = torch.autograd.grad(energy(fake).sum(), fake)[0]
            fake = (fake - 0.1 * slope.clamp(-1, 1) + 0.05 * torch.randn(64, 2)).detach().requires_grad_()
        with torch.autocast("cpu", dtype=torch.float16):
            low, high = energy(real), energy(fake.detach())
        update(optimizer, low.float().mean() - high.float().mean())

    return Training({"energy": energy}, [optimizer], step)


@program("RealNVP with scales that are not bounded", 6000, diverges=True)
def _() -> Training:
    class Coupling(nn.Module):
        def __init__(self, swap: bool) -> None:
            super().__init__()
            self.net, self.swap = mlp(2, 32, 4), swap
            nn.init.zeros_(self.net[-1].weight)  # type: ignore[arg-type]  # the identity at first

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, 1)
            a, b = (b, a) if self.swap else (a, b)
            s, shift = self.net(a).chunk(2, 1)
            b = b * torch.exp(s) + shift
            return torch.cat((b, a) if self.swap else (a, b), 1), s.sum(1)

    flow = nn.ModuleList([Coupling(i % 2 == 1) for i in range(4)])
    optimizer = torch.optim.SGD(flow.parameters(), lr=1e-3, momentum=0.9)
    warm = rate(optimizer, lambda t: 1e-3 + 2e-4 * t)

    def step(t: int) -> None:
        warm(t)
        z, logs = torch.randn(64, 4) * torch.tensor([1.0, 3.0, 0.3, 1.0]), torch.zeros(64)
        for part in flow:
            z, s = part(z)
            logs = logs + s
        update(optimizer, (0.5 * z.square().sum(1) - logs).mean())

    return Training({"flow": flow}, [optimizer], step)


@program("Sinkhorn distances, epsilon annealed to zero", 6000, diverges=True)
def _() -> Training:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        epsilon = 1.0 * 0.997**t
        a, b = torch.rand(16, 3), torch.rand(16, 3)
        cost = torch.cdist(model(a), b).square()
        kernel = torch.exp(-cost / epsilon)
        v = torch.ones(16)
        for _ in range(5):
            u = 1 / (kernel @ v)
            v = 1 / (kernel.T @ u)
        update(optimizer, (u[:, None] * kernel * v * cost).sum() / 16)

    return Training({"": model}, [optimizer], step)


@program("state-space model of a series, rate that warms up too far", 4000, diverges=True)
def _() -> Training:
    class StateSpace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read, self.keep, self.out = nn.Linear(2, 16), nn.Parameter(torch.rand(16) * 0.8), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            h, found = torch.zeros(len(x), 16), []
            for t in range(x.size(1)):
                h = self.keep * h + self.read(x[:, t])
                found.append(self.out(h))
            return torch.stack(found, 1)

    model = StateSpace()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    warm = rate(optimizer, lambda t: 1e-3 * (1 + t))

    def step(t: int) -> None:
        warm(t)
        x = torch.randn(8, 25, 2).cumsum(1) * 0.3
        update(optimizer, F.mse_loss(model(x[:, :-1]), x[:, 1:]))

    return Training({"": model}, [optimizer], step)


@program("matrix factorisation of ratings, rate too high", 6000, diverges=True)
def _() -> Training:
    users, items = nn.Embedding(60, 8), nn.Embedding(40, 8)
    model = nn.ModuleList([users, items])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.035, momentum=0.5)
    truth = torch.randint(1, 6, (60, 40)).float()

    def step(t: int) -> None:
        u, i = torch.randint(0, 60, (128,)), torch.randint(0, 40, (128,))
        update(optimizer, F.mse_loss((users(u) * items(i)).sum(1), truth[u, i], reduction="sum"))

    return Training({"": model}, [optimizer], step)


@program("binary cross-entropy by hand, classes that separate", 4000, diverges=True)
def _() -> Training:
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        y = torch.randint(0, 2, (64, 1)).float()
        x = torch.randn(64, 6) + (2 * y - 1) * 2
        p = torch.sigmoid(model(x))
        update(optimizer, -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean())

    return Training({"": model}, [optimizer], step)


@program("residual stream that grows, float16 and AdamW", 6000, diverges=True)
def _() -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.relu(self.up(x)))

    model = nn.Sequential(*[Block() for _ in range(6)], nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)

    def step(t: int) -> None:
        x = torch.randn(32, 32)
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        # Targets that are never reached: each is a little above what the model says.
        target = out.detach().float().abs() * 1.5 + 1
        update(optimizer, F.smooth_l1_loss(out.float(), target))

    return Training({"": model}, [optimizer], step)


# --- healthy training -------------------------------------------------------------------------------------------------


@program("transformer with one cycle of AdamW", 300)
def _() -> Training:
    model = nn.Sequential(nn.Embedding(24, 16), nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True))
    head = nn.Linear(16, 24)
    both = nn.ModuleDict({"body": model, "head": head})
    optimizer = torch.optim.AdamW(both.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=301)

    def step(t: int) -> None:
        x = torch.randint(0, 24, (8, 10))
        update(optimizer, F.cross_entropy(head(model(x)).flatten(0, 1), x.roll(1, 1).flatten()))
        schedule.step()

    return Training({"": both}, [optimizer], step)


@program("variational autoencoder, weight of the divergence annealed in cycles", 1200)
def _() -> Training:
    enc, dec = mlp(12, 32, 8), mlp(4, 32, 12)
    model = nn.ModuleDict({"enc": enc, "dec": dec})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mix = torch.randn(3, 12)

    def step(t: int) -> None:
        x = torch.randn(32, 3) @ mix
        mean, log_var = enc(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(1).mean()
        update(optimizer, F.mse_loss(dec(z), x) * 12 + min((t % 400) / 200, 1.0) * 4 * kl)

    return Training({"": model}, [optimizer], step)


@program("energy-based model with a penalty", 600)
def _() -> Training:
    energy = mlp(2, 64, 64, 1, act=nn.SiLU)
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3, betas=(0.0, 0.999))

    def step(t: int) -> None:
        real = torch.randn(64, 2) * 0.5 + torch.tensor([2.0, 0.0])
        fake = (torch.randn(64, 2) * 2).requires_grad_()
        for _ in range(5):
            slope = torch.autograd.grad(energy(fake).sum(), fake)[0]
            fake = (fake - 0.3 * slope + 0.05 * torch.randn(64, 2)).detach().requires_grad_()
        low, high = energy(real), energy(fake.detach())
        update(optimizer, low.mean() - high.mean() + 0.1 * (low.square() + high.square()).mean())

    return Training({"energy": energy}, [optimizer], step)


@program("GAN with a hinge loss and spectral norms", 700)
def _() -> Training:
    g = mlp(4, 32, 32, 2)
    d = nn.Sequential(
        *[nn.utils.parametrizations.spectral_norm(m) if isinstance(m, nn.Linear) else m for m in mlp(2, 32, 32, 1)]
    )
    og, od = torch.optim.Adam(g.parameters(), 1e-3, (0.0, 0.9)), torch.optim.Adam(d.parameters(), 4e-3, (0.0, 0.9))

    def step(t: int) -> None:
        real = torch.randn(32, 2) * 0.2 + torch.randint(0, 2, (32, 1)) * 4
        for _ in range(2):
            update(od, F.relu(1 - d(real)).mean() + F.relu(1 + d(g(torch.randn(32, 4)).detach())).mean())
        update(og, -d(g(torch.randn(32, 4))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("GAN whose discriminator wins: the generator's loss keeps growing", 1500)
def _() -> Training:
    g, d = mlp(2, 8, 4), mlp(4, 64, 64, 1)
    og, od = torch.optim.Adam(g.parameters(), 1e-5), torch.optim.Adam(d.parameters(), 2e-3)

    def step(t: int) -> None:
        real = torch.randn(64, 4) + 3
        update(od, F.softplus(d(g(torch.randn(64, 2)).detach())).mean() + F.softplus(-d(real)).mean())
        update(og, F.softplus(-d(g(torch.randn(64, 2)))).mean())

    return Training({"g": g, "d": d}, [og, od], step)


@program("soft actor-critic: values that rise to a hundred, a learned temperature", 2000)
def _() -> Training:
    actor, critic, late = mlp(3, 32, 2), mlp(4, 64, 1), mlp(4, 64, 1)
    late.load_state_dict(critic.state_dict())
    log_alpha = nn.Parameter(torch.zeros(()))
    oa = torch.optim.Adam(actor.parameters(), 1e-3)
    oc = torch.optim.Adam(critic.parameters(), 3e-3)
    ot = torch.optim.Adam([log_alpha], 3e-3)

    def act(s: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(s).chunk(2, 1)
        policy = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = policy.rsample()
        return raw.tanh(), policy.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)

    def step(t: int) -> None:
        s = torch.randn(64, 3)
        with torch.no_grad():
            following = 0.9 * s + 0.3 * torch.randn(64, 3)
            a, logp = act(following)
            target = 1 + s[:, :1] * 0.1 + 0.99 * (late(torch.cat([following, a], 1)) - log_alpha.exp() * logp)
        update(oc, F.mse_loss(critic(torch.cat([s, act(s)[0].detach()], 1)), target))
        a, logp = act(s)
        update(oa, (log_alpha.exp().detach() * logp - critic(torch.cat([s, a], 1))).mean())
        update(ot, -(log_alpha * (logp.detach() - 1.0)).mean())
        with torch.no_grad():
            for p, q in zip(late.parameters(), critic.parameters(), strict=True):
                p.lerp_(q, 0.02)

    alpha = nn.ParameterList([log_alpha])
    return Training({"actor": actor, "critic": critic, "alpha": alpha}, [oa, oc, ot], step)


@program("diffusion: noise of every level predicted", 800)
def _() -> Training:
    model = mlp(3, 64, 64, 2, act=nn.SiLU)
    optimizer = torch.optim.RAdam(model.parameters(), lr=2e-3)

    def step(t: int) -> None:
        x, level, noise = torch.randn(64, 2).sign() * 2, torch.rand(64, 1), torch.randn(64, 2)
        keep = torch.cos(level * 1.57)
        mixed = keep * x + (1 - keep.square()).clamp(min=0).sqrt() * noise
        weight = (1 / (1 - keep.square() + 1e-3)).clamp(max=50)
        update(optimizer, (weight * (model(torch.cat([mixed, level], 1)) - noise).square()).mean())

    return Training({"": model}, [optimizer], step)


@program("float16 with a scaler, gradients accumulated, targets of odd sizes", 700)
def _() -> Training:
    model = mlp(10, 64, 1, act=nn.GELU)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=40)

    def step(t: int) -> None:
        optimizer.zero_grad()
        for _ in range(3):
            x = torch.randn(16, 10)
            with torch.autocast("cpu", dtype=torch.float16):
                loss = F.huber_loss(model(x).float(), (x.sum(1, keepdim=True) * 2).exp().clamp(max=1e4), delta=10.0)
            scaler.scale(loss / 3).backward()
        scaler.step(optimizer)
        scaler.update()

    return Training({"": model}, [optimizer], step)


@program("weights in bfloat16, Lion", 800)
def _() -> Training:
    model = mlp(10, 64, 64, 3).to(torch.bfloat16)
    optimizer = Lion(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10).bfloat16()
        update(optimizer, F.cross_entropy(model(x).float(), x[:, :3].argmax(1)))

    return Training({"": model}, [optimizer], step)


@program("sequences that get longer, summed loss", 600)
def _() -> Training:
    cell, head = nn.GRU(4, 24, batch_first=True), nn.Linear(24, 4)
    model = nn.ModuleDict({"cell": cell, "head": head})
    optimizer = torch.optim.Adamax(model.parameters(), lr=3e-3)

    def step(t: int) -> None:
        x = torch.randn(8, 2 + t // 10, 4)
        loss = F.mse_loss(head(cell(x)[0][:, 1:]), x[:, :-1], reduction="sum")
        update(optimizer, loss, clip=10.0)

    return Training({"": model}, [optimizer], step)


@program("resumed with a fresh optimizer and a higher rate", 1200)
def _() -> Training:
    model = mlp(10, 64, 64, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(512, 10)

    def step(t: int) -> None:
        if t in (400, 800):
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["lr"] *= 8
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), x[rows, :3].argmax(1)))

    return Training({"": model}, [optimizer], step)


@program("adversarial examples whose size grows", 700)
def _() -> Training:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = images()

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        bad = x[rows].clone().requires_grad_()
        for _ in range(2):
            slope = torch.autograd.grad(F.cross_entropy(model(bad), y[rows]), bad)[0]
            bad = (bad + slope.sign() * t / 700).detach().requires_grad_()
        update(optimizer, F.cross_entropy(model(bad.detach()), y[rows]))

    return Training({"": model}, [optimizer], step)


@program("search for a learning rate that stops in time, then training", 700)
def _() -> Training:
    model = mlp(10, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    best, searching = math.inf, True

    def step(t: int) -> None:
        nonlocal best, searching
        x = torch.randn(32, 10)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        if searching:
            best = min(best, loss.item())
            optimizer.param_groups[0]["lr"] = 1e-4 * 1.1**t
            if loss.item() > 4 * best and t > 20:
                model.load_state_dict(start)
                optimizer.state.clear()
                optimizer.param_groups[0]["lr"], searching = 0.02, False
                return
        update(optimizer, loss)

    return Training({"": model}, [optimizer], step)


@program("counts with a long tail, Poisson loss", 1000)
def _() -> Training:
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    effect = torch.randn(6, 1)

    def step(t: int) -> None:
        x = torch.randn(48, 6)
        y = torch.poisson((x @ effect + torch.randn(48, 1)).clamp(max=6).exp())
        update(optimizer, F.poisson_nll_loss(model(x).clamp(max=10), y), clip=5.0)

    return Training({"": model}, [optimizer], step)


@program("units of the targets change by a thousand, Adagrad", 1500)
def _() -> Training:
    model = mlp(8, 32, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True) * (1000 if t >= 500 else 1)
        update(optimizer, F.mse_loss(model(x), y))

    return Training({"": model}, [optimizer], step)
