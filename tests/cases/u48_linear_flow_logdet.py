"""Normalising flow of invertible linear layers, trained with log-determinants."""

import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(348)
torch.set_num_threads(1)
D = 4


class Invertible(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linalg.qr(torch.randn(D, D))[0])
        self.slope = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        gram = self.w @ self.w.t()
        y = x @ self.w
        bend = torch.exp(self.slope.clamp(-2, 2))
        z = torch.where(y > 0, y * bend, y)
        logdet = 0.5 * torch.logdet(gram) + ((y > 0) * self.slope).sum(-1)
        return z, logdet


class Flow(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList([Invertible() for _ in range(depth)])

    def nll(self, x):
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, logdet = layer(x)
            total = total + logdet
        return (0.5 * x.square().sum(1) + 0.5 * D * math.log(2 * math.pi) - total).mean()


gen = torch.Generator().manual_seed(157)
data = torch.randn(400, D, generator=gen) @ torch.randn(D, D, generator=gen)
flow = Flow()
opt = torch.optim.Adam(flow.parameters(), lr=1e-2)
for epoch in range(3):
    for (x,) in DataLoader(TensorDataset(data), batch_size=40, shuffle=True):
        loss = flow.nll(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} nll {loss.item():.3f}")
