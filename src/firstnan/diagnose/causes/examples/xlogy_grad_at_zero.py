"""Entropy with xlogy: 0 * log 0 is 0 in forward, but its derivative divides 0 by 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
counts = torch.rand(512, 4) + 0.1
counts[42, 3] = 0.0  # a species that was not seen

weight = nn.Parameter(torch.ones(4))
optimizer = torch.optim.Adam([weight], lr=1e-2)
for step, (x,) in enumerate(DataLoader(TensorDataset(counts), batch_size=8)):
    p = torch.relu(weight * x)
    p = p / p.sum(dim=1, keepdim=True)
    loss = torch.xlogy(p, p).sum(dim=1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
