"""Inverse-distance weights with a learned falloff: one point sits exactly on a station."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
distance = torch.rand(512, 5) + 0.1
rain = torch.rand(512)
distance[49, 2] = 0.0  # a gauge inside the station's own garden

values = nn.Parameter(torch.rand(5))
optimizer = torch.optim.Adam([values], lr=1e-2)
for step, (d, y) in enumerate(DataLoader(TensorDataset(distance, rain), batch_size=8)):
    weight = d**-1.5
    predicted = (weight * values).sum(dim=1) / weight.sum(dim=1)
    loss = ((predicted - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
