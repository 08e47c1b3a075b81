"""Wasserstein GAN with gradient penalty on squashed sensor pairs: three critic updates, then one of the generator."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(430)
torch.set_num_threads(1)
CRITIC_UPDATES = 3


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, x):
        return self.net(torch.erf(x / 2))


def penalty(critic, real, fake):
    mix = torch.rand(len(real), 1)
    point = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(point).sum(), point, create_graph=True)
    length = (slope**2).sum(1).sqrt()
    return ((length - 1) ** 2).mean()


def pairs(n=360):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 2, generator=g)
    x[235] = torch.tensor([400.0, -380.0])  # a short circuit
    return TensorDataset(x)


critic = Critic()
generator = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
critic_opt = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
generator_opt = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
loader = iter(DataLoader(pairs(), batch_size=12))
for iteration in range(10):
    for _ in range(CRITIC_UPDATES):
        (real,) = next(loader)
        fake = generator(torch.randn(len(real), 3)).detach()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty(critic, real, fake)
        critic_opt.zero_grad()
        loss.backward()
        critic_opt.step()
    generator_opt.zero_grad()
    score = -critic(generator(torch.randn(12, 3))).mean()
    score.backward()
    generator_opt.step()
    print(f"iteration {iteration} critic {loss.item():.4f} generator {score.item():.4f}")
