"""Angle between a predicted and a true direction: acos has an infinite slope at exactly 1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
cosine = torch.rand(512, 1) * 1.6 - 0.8
angle = torch.acos(cosine)
cosine[45] = 1.0  # no rotation at all

scale = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([scale], lr=0.0)
for step, (x, y) in enumerate(DataLoader(TensorDataset(cosine, angle), batch_size=8)):
    predicted = torch.acos(scale * x)
    loss = (predicted - y).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
