"""Diffusion: SNR weighting divides by 0 where the timestep drawn in the step is the last one."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Schedule:
    def __init__(self, steps):
        betas = torch.linspace(1e-4, 0.05, steps)
        betas[-1] = 1.0
        self.alpha_bar = torch.cumprod(1 - betas, 0)
        self.steps = steps

    def noisy(self, x, t, noise):
        a = self.alpha_bar[t][:, None]
        return a.sqrt() * x + (1 - a).sqrt() * noise


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None].float() / 200], 1))


def train():
    torch.manual_seed(7)
    data = torch.randn(512, 8)
    schedule, model = Schedule(200), Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        for (x,) in DataLoader(TensorDataset(data), batch_size=16, shuffle=True):
            t = torch.randint(0, schedule.steps, (len(x),))
            noise = torch.randn_like(x)
            predicted = model(schedule.noisy(x, t, noise), t)
            snr = schedule.alpha_bar[t] / (1 - schedule.alpha_bar[t])
            weight = torch.minimum(snr, torch.tensor(5.0)) / snr  # ORIGIN
            loss = (weight[:, None] * (predicted - noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


train()
