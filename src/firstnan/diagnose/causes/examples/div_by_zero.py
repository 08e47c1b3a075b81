"""Relative error: one of the true values is exactly 0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
area = torch.rand(512, 3)
price = area.sum(dim=1) + 0.5
price[42] = 0.0  # a gift, not a sale

model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(area, price), batch_size=8)):
    predicted = model(x).squeeze(1)
    loss = ((predicted - y).abs() / y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
