"""Adafactor keeps means of squared gradients: a gradient of 1e22 is finite, but its square exceeds float32."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(512, 4)
y = torch.randn(512, 3)
weight = torch.ones(512, 1)
weight[44] = 1e23  # a survey weight in the wrong unit

model = nn.Linear(4, 3)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-3)
for step, (inputs, target, w) in enumerate(DataLoader(TensorDataset(x, y, weight), batch_size=8)):
    loss = (w * (model(inputs) - target).abs()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
