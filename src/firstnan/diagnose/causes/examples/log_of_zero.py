"""Churn prediction with a hand-written cross entropy: a sigmoid reaches exactly 1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
customers = torch.randn(512, 6)
leaves = (customers[:, 0] > 0.5).float()
customers[45] *= 200.0  # one invoice in cents among invoices in euros

model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(customers, leaves), batch_size=8)):
    p = torch.sigmoid(model(x)).squeeze(1)
    loss = -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
