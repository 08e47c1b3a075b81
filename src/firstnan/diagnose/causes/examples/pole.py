"""Ordinal scores to normal scores with erfinv: a rank of exactly 1 has no finite score."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
features = torch.randn(512, 4)
rank = torch.rand(512) * 0.98 + 0.01
rank[44] = 1.0  # the best of its class

model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, u) in enumerate(DataLoader(TensorDataset(features, rank), batch_size=8)):
    score = torch.erfinv(2 * u - 1)
    loss = ((model(x).squeeze(1) - score) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
