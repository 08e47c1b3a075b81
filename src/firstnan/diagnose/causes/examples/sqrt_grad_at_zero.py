"""Contrastive distance of two embeddings: one pair is the same picture twice."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
left = torch.randn(512, 6)
right = left + 0.5 * torch.randn(512, 6)
right[38] = left[38]  # a duplicate in the collection

model = nn.Linear(6, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (a, b) in enumerate(DataLoader(TensorDataset(left, right), batch_size=8)):
    distance = torch.sqrt(((model(a) - model(b)) ** 2).sum(dim=1))
    loss = (distance - 1.0).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
