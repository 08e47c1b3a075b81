"""Soil mixtures: compositional data with small lambda layers in one Sequential."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Lambda(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


def build():
    return nn.Sequential(
        Lambda(lambda x: x.clamp_min(0)),
        Lambda(lambda x: x + 0.1 * x.roll(1, -1)),
        Lambda(lambda x: (x / x.sum(-1, keepdim=True)).sqrt().mul(2).sub(1)),
        nn.Linear(6, 20),
        Lambda(lambda x: x * torch.sigmoid(1.7 * x)),
        nn.Linear(20, 2),
    )


class Samples:
    def __init__(self, n=240, seed=82):
        g = torch.Generator().manual_seed(seed)
        self.grains = torch.rand(n, 6, generator=g) - 0.15
        self.grains[173] = -0.02  # an empty sieve, weighed with an offset
        self.quality = torch.stack([self.grains[:, 0], self.grains[:, 5]], 1)

    def epoch(self, size):
        for k in range(0, len(self.grains), size):
            yield self.grains[k : k + size], self.quality[k : k + size]


torch.manual_seed(433)
torch.set_num_threads(1)
net, samples = build(), Samples()
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=30)
for epoch in range(2):
    for grains, quality in samples.epoch(16):
        opt.zero_grad(); loss = F.mse_loss(net(grains), quality); loss.backward(); opt.step(); schedule.step()
    print(f"epoch {epoch}: {loss.item():.4f}, rate {schedule.get_last_lr()[0]:.4f}")
