"""A polynomial feature of a raw count: the fourth power of 1e10 exceeds float32."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
traffic = torch.rand(512, 3)
load = traffic.sum(dim=1)
traffic[41, 0] = 2e10  # bytes where all the others are gigabytes

model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(traffic, load), batch_size=8)):
    features = torch.cat([x, x**4], dim=1)
    loss = (model(features).squeeze(1) - y).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
