"""Waiting times with a gamma distribution: for a shape below 1, the slope of its cdf at 0 is infinite."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
waited = torch.rand(512) + 0.1
share = torch.rand(512)
waited[39] = 0.0  # served at once

shape = torch.tensor(0.5)
rate = nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.Adam([rate], lr=1e-2)
for step, (t, y) in enumerate(DataLoader(TensorDataset(waited, share), batch_size=8)):
    served = torch.special.gammainc(shape, rate * t)
    loss = ((served - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
