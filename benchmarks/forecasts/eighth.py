"""The eighth set: written and scored before anything was changed for it; healthy trainings have steep phases too."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from forecasts.common import Training, mlp, program, rate, update
from torch import Tensor, nn

# --- training that diverges -------------------------------------------------------------------------------------------


@program("Q-learning without a target network, states of different size", 6000, diverges=True)
def _() -> Training:
    q = mlp(6, 64, 64, 2)
    optimizer = torch.optim.SGD(q.parameters(), lr=1e-3)

    def step(t: int) -> None:
        seen = torch.randn(32, 6)
        after = 2 * seen.abs()
        reward = seen[:, 0].clamp(-1, 1)
        target = reward + 0.99 * q(after).max(1).values.detach()
        update(optimizer, F.mse_loss(q(seen)[:, 0], target))

    return Training({"q": q}, [optimizer], step)


@program("Wasserstein critic without clipping, in float16", 6000, diverges=True)
def _() -> Training:
    critic, maker = mlp(2, 64, 64, 1), mlp(4, 32, 2)
    first = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(maker.parameters(), lr=1e-4, betas=(0.5, 0.9))

    def step(t: int) -> None:
        real = torch.randn(64, 2) * 0.3 + torch.tensor([2.0, -1.0])
        fake = maker(torch.randn(64, 4))
        with torch.autocast("cpu", torch.float16):
            loss = critic(fake.detach()).mean() - critic(real).mean()
        update(first, loss.float())
        if t % 5 == 4:
            with torch.autocast("cpu", torch.float16):
                loss = -critic(maker(torch.randn(64, 4))).mean()
            update(second, loss.float())

    return Training({"critic": critic, "maker": maker}, [first, second], step)


class Coupling(nn.Module):
    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.net, self.bounded = mlp(2, 64, 4), bounded

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        s, t = self.net(kept).chunk(2, 1)
        if self.bounded:
            s = torch.tanh(s)
        return torch.cat([moved * torch.exp(s) + t, kept], 1), s.sum(1)


class Flow(nn.Module):
    def __init__(self, bounded: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Coupling(bounded) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for part in self.parts:
            x, s = part(x)
            total = total + s
        return (0.5 * x.square().sum(1) - total).mean()


@program("coupling flow with unbounded scales on data of one dimension", 6000, diverges=True)
def _() -> Training:
    flow = Flow(bounded=False)
    optimizer = torch.optim.Adam(flow.parameters(), lr=1e-2)

    def step(t: int) -> None:
        x = torch.randn(128, 1) @ torch.ones(1, 4)  # its density is infinite
        update(optimizer, flow(x))

    return Training({"flow": flow}, [optimizer], step)


@program("convolutional autoencoder, exponential schedule with a factor above 1", 6000, diverges=True)
def _() -> Training:
    down = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ELU(), nn.Conv2d(8, 8, 3, 2, 1))
    up = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))
    model = nn.ModuleDict({"down": down, "up": up})
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.06)

    def step(t: int) -> None:
        x = torch.rand(16, 1, 12, 12)
        update(optimizer, F.mse_loss(up(down(x)), x))
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("codes by Gumbel softmax, temperature annealed without a floor, logits in float16", 6000, diverges=True)
def _() -> Training:
    encoder, codes = mlp(8, 32, 16), nn.Linear(16, 8, bias=False)
    model = nn.ModuleDict({"encoder": encoder, "codes": codes})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        logits = encoder(x)
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)))
        chosen = torch.softmax((logits + noise).half() / 0.98**t, 1).float()
        update(optimizer, F.mse_loss(codes(chosen), x))

    return Training({"": model}, [optimizer], step)


class Graph(nn.Module):
    def __init__(self, layers: int, mean: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.out, self.mean = nn.Linear(16, 1), mean

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            gathered = edges @ F.relu(layer(x))
            x = x + (gathered / edges.sum(1, keepdim=True) if self.mean else gathered)
        return self.out(x)


@program("graph network that sums its neighbours, warm-up counted in the wrong unit", 6000, diverges=True)
def _() -> Training:
    net = Graph(3, mean=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    edges = (torch.rand(24, 24) < 0.2).float() + torch.eye(24)
    x = torch.randn(24, 16)
    y = x.sum(1, keepdim=True)
    warm = rate(optimizer, lambda t: 1e-5 * (t + 1))

    def step(t: int) -> None:
        warm(t)
        update(optimizer, F.mse_loss(net(x + 0.1 * torch.randn(24, 16), edges), y))

    return Training({"net": net}, [optimizer], step)


@program("policy whose entropy bonus outweighs a reward that flattens", 6000, diverges=True)
def _() -> Training:
    policy = mlp(3, 32, 2)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)

    def step(t: int) -> None:
        seen = torch.randn(64, 3)
        mean, log_std = policy(seen).chunk(2, 1)
        action = mean + torch.exp(log_std) * torch.randn_like(mean)
        reward = -torch.log1p((action - seen[:, :1]).abs())
        update(optimizer, -(reward + 1.5 * log_std).mean())

    return Training({"policy": policy}, [optimizer], step)


@program("autoregression on unscaled prices in float64, a rate just too high", 6000, diverges=True)
def _() -> Training:
    model = nn.Linear(12, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=9e-6)
    prices = 100 + 30 * torch.sin(torch.arange(400) / 9).double() + 5 * torch.randn(400).double()
    windows = prices.unfold(0, 13, 1)

    def step(t: int) -> None:
        rows = windows[torch.randint(0, len(windows), (32,))]
        update(optimizer, F.mse_loss(model(rows[:, :12]), rows[:, 12:]))

    return Training({"": model}, [optimizer], step)


@program("weight decay with the wrong sign, small transformer", 6000, diverges=True)
def _() -> Training:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 20)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.embed(x)))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(t: int) -> None:
        x = torch.randint(0, 20, (16, 12))
        loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
        update(optimizer, loss - 5e-2 * sum(p.square().sum() for p in model.parameters()))

    return Training({"": model}, [optimizer], step)


@program("residual blocks without norms under autocast and a scaler", 6000, diverges=True)
def _() -> Training:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b(F.gelu(self.a(x)))

    model = nn.Sequential(nn.Linear(10, 32), *(Block() for _ in range(8)), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=50)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        # The returns of an agent that is paid for more of everything.
        update(optimizer, -out.float().mean(), scaler=scaler)

    return Training({"": model}, [optimizer], step)


@program("recurrent net that reads its own output, horizon grows", 6000, diverges=True)
def _() -> Training:
    class Roll(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move = nn.Linear(8, 8)

        def forward(self, x: Tensor, horizon: int) -> Tensor:
            seen = []
            for _ in range(horizon):
                x = x + F.leaky_relu(self.move(x), 0.2)
                seen.append(x)
            return torch.stack(seen, 1)

    model = Roll()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        horizon = 4 + t // 2
        x = torch.randn(16, 8)
        times = torch.arange(1, horizon + 1)[None, :, None]
        update(optimizer, F.l1_loss(model(x, horizon), x[:, None] * 1.2**times))

    return Training({"": model}, [optimizer], step)


@program("optimal transport whose regularization is annealed", 6000, diverges=True)
def _() -> Training:
    net = mlp(2, 32, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x, y = net(torch.randn(32, 2)), torch.randn(32, 2) + 2
        cost = torch.cdist(x, y).square()
        kernel = torch.exp(-cost / (2.0 * 0.99**t))
        u = torch.full((32,), 1 / 32)
        for _ in range(10):
            v = (1 / 32) / (kernel.T @ u)
            u = (1 / 32) / (kernel @ v)
        update(optimizer, (u[:, None] * kernel * v * cost).sum())

    return Training({"net": net}, [optimizer], step)


# --- healthy training -------------------------------------------------------------------------------------------------


class Letters(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(24, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        length = x.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.body(self.embed(x) + self.place(torch.arange(length)), mask=mask, is_causal=True))


def next_letter(model: nn.Module, batch: int, length: int) -> Tensor:
    start = torch.randint(0, 24, (batch, 1))
    stride = torch.randint(1, 4, (batch, 1))
    x = (start + stride * torch.arange(length + 1)) % 24
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


@program("small language model, warm-up and cosine", 350)
def _() -> Training:
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    warm = rate(optimizer, lambda t: 3e-3 * min((t + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * max(0, t - 100) / 250)))

    def step(t: int) -> None:
        warm(t)
        update(optimizer, next_letter(model, 16, 24), clip=1.0)

    return Training({"": model}, [optimizer], step)


@program("convolutions, cosine with warm restarts", 500)
def _() -> Training:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 40, 2)
    x = torch.randn(256, 1, 10, 10)
    y = torch.randint(0, 4, (256,))
    x += y[:, None, None, None] * 0.3

    def step(t: int) -> None:
        rows = torch.randint(0, 256, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]))
        schedule.step()

    return Training({"": model}, [optimizer], step)


@program("adversarial pair that chases around", 800)
def _() -> Training:
    maker, judge = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, act=nn.LeakyReLU)
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.999))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.999))

    def step(t: int) -> None:
        corner = torch.randint(0, 8, (64,)) * math.pi / 4
        real = torch.stack([corner.cos(), corner.sin()], 1) * 2 + 0.05 * torch.randn(64, 2)
        fake = maker(torch.randn(64, 4))
        good, bad = judge(real), judge(fake.detach())
        one, zero = torch.ones_like(good), torch.zeros_like(bad)
        loss = F.binary_cross_entropy_with_logits
        update(second, loss(good, one) + loss(bad, zero))
        update(first, loss(judge(fake), one))

    return Training({"maker": maker, "judge": judge}, [first, second], step)


@program("pole balanced by policy gradient, returns grow", 90)
def _() -> Training:
    policy = mlp(4, 32, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def episode() -> tuple[Tensor, list[float]]:
        x, v, angle, turn = (torch.rand(4) * 0.1 - 0.05).tolist()
        logs, rewards = [], list[float]()
        while abs(angle) < 0.21 and abs(x) < 2.4 and len(rewards) < 200:
            choice = torch.distributions.Categorical(logits=policy(torch.tensor([x, v, angle, turn])))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            force = 10.0 if action.item() else -10.0
            temp = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
            spin = (9.8 * math.sin(angle) - math.cos(angle) * temp) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
            push = temp - 0.05 * spin * math.cos(angle) / 1.1
            x, v, angle, turn = x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * spin
            rewards.append(1.0)
        return torch.stack(logs), rewards

    def step(t: int) -> None:
        logs, rewards = episode()
        total, returns = 0.0, list[float]()
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.append(total)
        update(optimizer, -(logs * torch.tensor(returns[::-1])).sum())

    return Training({"policy": policy}, [optimizer], step)


@program("curriculum that doubles the length of a summed loss", 500)
def _() -> Training:
    model = Letters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        length = 4 * 2 ** min(3, t // 100)
        update(optimizer, next_letter(model, 8, length) * 8 * length, clip=5.0)

    return Training({"": model}, [optimizer], step)


@program("autocast to float16 with activations near 30,000", 500)
def _() -> Training:
    model = mlp(8, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)

    def step(t: int) -> None:
        x = torch.randn(32, 8)
        with torch.autocast("cpu", torch.float16):
            out = model(x * 3000)
        update(optimizer, F.smooth_l1_loss(out.float() / 3000, x.sum(1, keepdim=True)), scaler=scaler)

    return Training({"": model}, [optimizer], step)


@program("bfloat16 weights, batches of outliers from which it recovers", 500)
def _() -> Training:
    model = mlp(10, 64, 64, 3).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(t: int) -> None:
        x = torch.randn(32, 10)
        y = x[:, :3].argmax(1)
        if t % 120 in (100, 101, 102):
            x = x * 30
        update(optimizer, F.cross_entropy(model(x.bfloat16()).float(), y))

    return Training({"": model}, [optimizer], step)


@program("Q-learning with a target network, values grow to 50", 1500)
def _() -> Training:
    q = mlp(4, 64, 64, 2)
    old = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)

    def step(t: int) -> None:
        if t % 20 == 0:
            old.load_state_dict(q.state_dict())
        seen, after = torch.randn(32, 4), torch.randn(32, 4)
        action = torch.randint(0, 2, (32, 1))
        target = 1.0 + 0.98 * old(after).max(1).values.detach()
        update(optimizer, F.smooth_l1_loss(q(seen).gather(1, action)[:, 0], target), clip=10.0)

    return Training({"q": q}, [optimizer], step)


@program("Wasserstein critic with a gradient penalty", 400)
def _() -> Training:
    critic, maker = mlp(2, 64, 64, 1), mlp(4, 64, 2)
    first = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def step(t: int) -> None:
        for _ in range(3):
            real = torch.randn(64, 2) + torch.tensor([6.0, -4.0])
            fake = maker(torch.randn(64, 4)).detach()
            share = torch.rand(64, 1)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            update(first, loss)
        update(second, -critic(maker(torch.randn(64, 4))).mean())

    return Training({"critic": critic, "maker": maker}, [first, second], step)


@program("deep linear net from small weights: plateau, then a steep rise", 1500)
def _() -> Training:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    for layer in model:
        nn.init.normal_(layer.weight, std=0.12)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    truth = torch.diag(torch.tensor([4.0, 3, 2, 1, 0.5, 0, 0, 0]))

    def step(t: int) -> None:
        x = torch.randn(64, 8)
        update(optimizer, F.mse_loss(model(x), x @ truth))

    return Training({"": model}, [optimizer], step)


@program("variational autoencoder, weight of the divergence in cycles", 800)
def _() -> Training:
    encoder, decoder = mlp(12, 64, 8), mlp(4, 64, 12)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    mix = torch.randn(4, 12)

    def step(t: int) -> None:
        x = torch.randn(64, 4) @ mix + 0.1 * torch.randn(64, 12)
        mean, logvar = encoder(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)
        kl = -0.5 * (1 + logvar - mean.square() - logvar.exp()).sum(1).mean()
        update(optimizer, (decoder(z) - x).square().sum(1).mean() + min(1.0, t % 200 / 100) * kl)

    return Training({"": model}, [optimizer], step)


@program("coupling flow with bounded scales, one-cycle rate", 600)
def _() -> Training:
    flow = Flow(bounded=True)
    optimizer: Any = torch.optim.Adam(flow.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=600)

    def step(t: int) -> None:
        x = torch.randn(128, 2) @ torch.randn(2, 4, generator=torch.Generator().manual_seed(0)) + 0.05 * torch.randn(
            128, 4
        )
        update(optimizer, flow(x), clip=1.0)
        schedule.step()

    return Training({"flow": flow}, [optimizer], step)
