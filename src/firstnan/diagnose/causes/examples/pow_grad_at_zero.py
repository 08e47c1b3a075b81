"""A gamma curve x^0.45 after a learned gain: its slope at black is infinite."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
light = torch.rand(512, 3) + 0.05
screen = light**0.45
light[43, 0] = 0.0  # a black pixel

gain = nn.Parameter(torch.full((3,), 0.8))
optimizer = torch.optim.Adam([gain], lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(light, screen), batch_size=8)):
    loss = (((gain * x) ** 0.45 - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
