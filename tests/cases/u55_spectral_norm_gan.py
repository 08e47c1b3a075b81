"""Ring of Gaussians with a spectrally normalised critic and two optimizers."""

import math

import torch
import torch.nn as nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(355)
torch.set_num_threads(1)


def real(n, gen):
    angle = torch.randint(0, 8, (n,), generator=gen) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=gen)


class Critic(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.ModuleList([spectral_norm(nn.Linear(2, width)), spectral_norm(nn.Linear(width, width))])
        self.out = spectral_norm(nn.Linear(width, 1))

    def forward(self, x):
        for layer in self.layers:
            x = nn.functional.leaky_relu(layer(x), 0.2)
        return self.out(x)


gen = torch.Generator().manual_seed(191)
maker = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
critic = Critic()
opt_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
for round_no in range(40):
    fake = maker(torch.randn(32, 4, generator=gen))
    hinge = torch.relu(1 - critic(real(32, gen))).mean() + torch.relu(1 + critic(fake.detach())).mean()
    opt_critic.zero_grad()
    hinge.backward()
    opt_critic.step()
    if round_no % 2:
        score = -critic(fake).mean()
        opt_maker.zero_grad()
        score.backward()
        opt_maker.step()
    if round_no % 10 == 9:
        print(f"round {round_no} critic {hinge.item():.4f} maker {score.item():.4f}")
