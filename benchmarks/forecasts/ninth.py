"""The ninth set, held out: written after the rules were changed for the eighth, and scored once."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, rate, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


def waves(model: nn.Module) -> Tensor:
    time = torch.arange(25)[None, :, None] * 0.3 + torch.rand(16, 1, 1) * 6
    x = torch.sin(time) + 0.3 * torch.sin(2.7 * time)
    return F.mse_loss(model(x[:, :-1]), x[:, 1:])


@program("LSTM, a rate that is raised every five steps", 6000, diverges=True)
def _() -> Training:
    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    grow = rate(optimizer, lambda t: 0.05 * 1.1 ** (t // 5))

    def step(t: int) -> None:
        grow(t)
        update(optimizer, waves(model))

    return Training({"": model}, [optimizer], step)


@program("Poisson regression of counts that grow every day, rates in float16", 6000, diverges=True)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 4)
        day = torch.full((32, 1), t / 100)
        counts = torch.poisson(torch.exp(0.3 * x[:, :1] + 0.8 * day))
        rates = torch.exp(model(torch.cat([x[:, :3], day], 1)).half())
        update(optimizer, (rates.float() - counts * torch.log(rates.float() + 1e-6)).mean(), clip=10.0)

    return Training({"": model}, [optimizer], step)


@program("linear autoencoder, Nesterov momentum at a rate just too high", 6000, diverges=True)
def _() -> Training:
    model = nn.Sequential(nn.Linear(20, 5, bias=False), nn.Linear(5, 20, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    mix = torch.randn(5, 20) * 1.5
    grow = rate(optimizer, lambda t: 1e-2 + 2e-4 * t)

    def step(t: int) -> None:
        grow(t)
        x = torch.randn(64, 5) @ mix
        update(optimizer, F.mse_loss(model(x), x))

    return Training({"": model}, [optimizer], step)


@program("portfolio whose shares are divided by their sum", 6000, diverges=True)
def _() -> Training:
    model = mlp(6, 32, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    drift = torch.tensor([0.02, 0.01, 0.0, -0.01, -0.02])

    def step(t: int) -> None:
        raw = 1.0 + model(torch.randn(64, 6))
        shares = raw / raw.sum(1, keepdim=True)
        returns = (shares * (drift + 0.05 * torch.randn(64, 5))).sum(1)
        update(optimizer, -torch.log(1.0 + returns).mean())

    return Training({"": model}, [optimizer], step)


@program("actor without a bound before a critic in float16", 6000, diverges=True)
def _() -> Training:
    actor, critic = mlp(4, 32, 2), mlp(6, 64, 1)
    first = torch.optim.Adam(actor.parameters(), lr=2e-3)
    second = torch.optim.Adam(critic.parameters(), lr=2e-3)

    def value(seen: Tensor, action: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return critic(torch.cat([seen, action], 1))

    def step(t: int) -> None:
        seen, after = torch.randn(32, 4), torch.randn(32, 4)
        action = actor(seen).detach() + 0.1 * torch.randn(32, 2)
        target = action.sum(1, keepdim=True) + 0.95 * value(after, actor(after)).float().detach()
        update(second, F.smooth_l1_loss(value(seen, action).float(), target))
        update(first, -value(seen, actor(seen)).float().mean())

    return Training({"actor": actor, "critic": critic}, [first, second], step)


@program("summed loss of a batch that grows", 6000, diverges=True)
def _() -> Training:
    model = mlp(8, 16, 1, act=nn.Tanh)
    last = nn.Linear(8, 1)
    both = nn.ModuleList([model, last])
    optimizer = torch.optim.SGD(both.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(8 + t // 4, 8)
        update(optimizer, (last(x) + model(x) - x.sum(1, keepdim=True)).square().sum())

    return Training({"": both}, [optimizer], step)


@program("router of experts, penalty of its logits with the wrong sign, bfloat16", 6000, diverges=True)
def _() -> Training:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(mlp(8, 16, 8) for _ in range(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.router(x)
            outs = torch.stack([expert(x) for expert in self.experts], 1)
            return (logits.softmax(1)[:, :, None] * outs).sum(1), logits

    model = Experts().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(t: int) -> None:
        x = torch.randn(32, 8).bfloat16()
        out, logits = model(x)
        penalty = torch.logsumexp(logits, 1).square().mean()
        update(optimizer, F.mse_loss(out, x.roll(1, 1)) - 0.01 * penalty)

    return Training({"": model}, [optimizer], step)


@program("power iteration that is carried over without being normalized", 6000, diverges=True)
def _() -> Training:
    class Bounded(nn.Module):
        u: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16) / 12)
            self.register_buffer("u", torch.randn(16))

        def forward(self, x: Tensor) -> Tensor:
            v = self.weight @ self.u
            sigma = (self.u @ v) / (self.u @ self.u)
            self.u = v.detach()
            return x @ self.weight.T / (1 + sigma.abs())

    model = nn.Sequential(Bounded(), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 16)
        update(optimizer, F.mse_loss(model(x), 0.1 * x[:, :1]))

    return Training({"": model}, [optimizer], step)


# --- healthy training -------------------------------------------------------------------------------------------------


@program("LSTM with one cycle of the rate", 300)
def _() -> Training:
    model = Waves()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=300)

    def step(t: int) -> None:
        update(optimizer, waves(model), clip=1.0)
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("Poisson regression of counts up to thousands", 1000)
def _() -> Training:
    model = mlp(4, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x = torch.randn(64, 4)
        counts = torch.poisson(torch.exp(6 + x[:, :1] * 0.6))
        update(optimizer, F.poisson_nll_loss(model(x), counts), clip=100.0)

    return Training({"": model}, [optimizer], step)


@program("noise of a regression, learned down to a hundredth", 1500)
def _() -> Training:
    net = mlp(5, 64, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    slow = rate(optimizer, lambda t: 3e-3 * 0.998**t)

    def step(t: int) -> None:
        slow(t)
        x = torch.randn(64, 5)
        y = x.sum(1, keepdim=True) + 0.01 * torch.randn(64, 1)
        mean, raw = net(x).chunk(2, 1)
        sigma = F.softplus(raw) + 1e-4
        update(optimizer, (torch.log(sigma) + 0.5 * ((y - mean) / sigma) ** 2).mean(), clip=5.0)

    return Training({"net": net}, [optimizer], step)


@program("experts with a penalty of the router's logits", 500)
def _() -> Training:
    router, experts = nn.Linear(8, 4), nn.ModuleList(mlp(8, 16, 8) for _ in range(4))
    model = nn.ModuleDict({"router": router, "experts": experts})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        logits = router(x)
        outs = torch.stack([expert(x) for expert in experts], 1)
        out = (logits.softmax(1)[:, :, None] * outs).sum(1)
        update(optimizer, F.mse_loss(out, x.roll(1, 1) * x) + 1e-3 * torch.logsumexp(logits, 1).square().mean())

    return Training({"": model}, [optimizer], step)


@program("actor with a bound, values that grow to a hundred", 1200)
def _() -> Training:
    actor, critic = nn.Sequential(mlp(4, 32, 2), nn.Tanh()), mlp(6, 64, 1)
    old = copy.deepcopy(critic)
    first = torch.optim.Adam(actor.parameters(), lr=1e-3)
    second = torch.optim.Adam(critic.parameters(), lr=3e-3)

    def step(t: int) -> None:
        seen, after = torch.randn(32, 4), torch.randn(32, 4)
        action = actor(seen).detach() + 0.1 * torch.randn(32, 2)
        target = action.sum(1, keepdim=True) + 0.98 * old(torch.cat([after, actor(after)], 1)).detach()
        update(second, F.mse_loss(critic(torch.cat([seen, action], 1)), target))
        update(first, -critic(torch.cat([seen, actor(seen)], 1)).mean())
        with torch.no_grad():
            for a, b in zip(old.parameters(), critic.parameters(), strict=True):
                a.lerp_(b, 0.02)

    return Training({"actor": actor, "critic": critic}, [first, second], step)


@program("critic with spectral norms and a hinge, in float16", 500)
def _() -> Training:
    norm = nn.utils.parametrizations.spectral_norm
    critic = nn.Sequential(
        norm(nn.Linear(2, 64)), nn.LeakyReLU(0.1), norm(nn.Linear(64, 64)), nn.ReLU(), nn.Linear(64, 1)
    )
    maker = mlp(4, 64, 2)
    first = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def judged(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return critic(x)

    def step(t: int) -> None:
        real, fake = torch.randn(64, 2) + 3, maker(torch.randn(64, 4))
        update(first, (F.relu(1 - judged(real)).mean() + F.relu(1 + judged(fake.detach())).mean()).float())
        update(second, -judged(fake).float().mean())

    return Training({"critic": critic, "maker": maker}, [first, second], step)


@program("new head first, then all layers", 600)
def _() -> Training:
    body, head = mlp(10, 64, 64), nn.Linear(64, 3)
    model = nn.Sequential(body, nn.ReLU(), head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.3, momentum=0.9)
    x = torch.randn(512, 10)
    y = (x[:, :3] * x[:, 3:6]).argmax(1)

    def step(t: int) -> None:
        if t == 0:
            body.requires_grad_(False)
        if t == 200:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.1})
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))

    return Training({"": model}, [optimizer], step)


@program("batch and rate that grow together", 500)
def _() -> Training:
    model = mlp(10, 64, 64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    grow = rate(optimizer, lambda t: 1e-3 * 2 ** min(5, t // 80))

    def step(t: int) -> None:
        grow(t)
        x = torch.randn(8 * 2 ** min(5, t // 80), 10)
        update(optimizer, F.mse_loss(model(x), math.sqrt(10) * torch.sin(x.sum(1, keepdim=True))))

    return Training({"": model}, [optimizer], step)
