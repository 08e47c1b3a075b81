"""Progressively deeper net: new residual branches start at zero, all layers are weight-normalised."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.parametrizations import weight_norm

torch.manual_seed(438)
torch.set_num_threads(1)


def branch(d, from_zero=False):
    layer = weight_norm(nn.Linear(d, d))
    if from_zero:
        layer.weight = torch.zeros(d, d)
    return layer


class Growing(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.inp = nn.Linear(4, d)
        self.branches = nn.ModuleList([branch(d)])
        self.out = nn.Linear(d, 1)

    def grow(self):
        self.branches.append(branch(12, from_zero=True))

    def forward(self, x):
        h = self.inp(x)
        for layer in self.branches:
            h = h + F.silu(layer(h))
        return self.out(h)


def loop(model, steps, grow_at):
    g = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        if step == grow_at:
            model.grow()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(32, 4, generator=g)
        loss = F.mse_loss(model(x), x.prod(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step}: {loss.item():.4f}")


loop(Growing(), steps=26, grow_at=11)
