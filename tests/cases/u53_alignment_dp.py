"""Time-series alignment: dynamic programming with infinite borders, and a padded Chamfer distance."""

import torch
import torch.nn as nn

torch.manual_seed(353)
torch.set_num_threads(1)


def dtw(cost):
    """least alignment cost; row and column zero are borders at infinity"""
    n, m = cost.shape
    previous = [torch.tensor(0.0)] + [torch.tensor(float("inf"))] * m
    for i in range(n):
        current = [torch.tensor(float("inf"))]
        for j in range(m):
            best = torch.minimum(torch.minimum(previous[j + 1], current[j]), previous[j])
            current.append(cost[i, j] + best)
        previous = current
    return previous[-1]


def chamfer(a, b, padded):
    d = (a.unsqueeze(1) - b.unsqueeze(0)).abs().sum(-1)
    d = d.masked_fill(padded, float("inf"))
    return d.min(1).values.mean() + torch.amin(d, 0)[~padded].mean()


warp = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
opt = torch.optim.Adam(warp.parameters(), lr=2e-2)
gen = torch.Generator().manual_seed(179)
for step in range(15):
    t = torch.linspace(0, 3, 9)
    a = torch.stack([t, torch.sin(t)], 1) + 0.05 * torch.randn(9, 2, generator=gen)
    b = torch.stack([t[:7], torch.sin(t[:7] + 0.4)], 1)
    padded = torch.arange(7) >= 7 - step % 3
    moved = warp(a)
    cost = (moved.unsqueeze(1) - b.unsqueeze(0)).square().sum(-1)
    loss = dtw(cost) + chamfer(moved, b, padded)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step} alignment {loss.item():.4f}")
