"""Diffusion model of wind profiles: zero terminal SNR schedule, noise prediction, loss on the clean profile."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Schedule:
    def __init__(self, steps=100):
        beta = torch.linspace(1e-4, 0.06, steps)
        root = torch.cumprod(1 - beta, 0).sqrt()
        root = (root - root[-1]) * root[0] / (root[0] - root[-1])  # shift and rescale so that the end is pure noise
        self.signal, self.noise = root, (1 - root.square()).sqrt()
        self.steps = steps

    def corrupt(self, x0, eps, t):
        return self.signal[t, None] * x0 + self.noise[t, None] * eps

    def clean(self, xt, eps, t):
        return (xt - self.noise[t, None] * eps) / self.signal[t, None]


class Denoiser(nn.Module):
    def __init__(self, d=12, width=48):
        super().__init__()
        self.time = nn.Embedding(100, 16)
        self.mlp = nn.Sequential(nn.Linear(d + 16, width), nn.SiLU(), nn.Linear(width, d))

    def forward(self, xt, t):
        return self.mlp(torch.cat([xt, self.time(t)], 1))


def profiles(n=400, d=12):
    g = torch.Generator().manual_seed(58)
    height = torch.linspace(0.1, 1, d)
    return torch.rand(n, 1, generator=g) * height.log() + 0.1 * torch.randn(n, d, generator=g)


def train(iterations=60, batch=10):
    torch.manual_seed(94)
    torch.set_num_threads(1)
    x, schedule, model = profiles(), Schedule(), Denoiser()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ema = None
    for it in range(iterations):
        x0 = x[torch.randint(0, len(x), (batch,))]
        t = torch.randint(0, schedule.steps, (batch,))
        eps = torch.randn_like(x0)
        xt = schedule.corrupt(x0, eps, t)
        estimate = schedule.clean(xt, model(xt, t), t)
        loss = F.smooth_l1_loss(estimate, x0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
        if it % 4 == 0:
            print(f"it {it} loss {loss.item():.4f} ema {ema:.4f}")


train()
