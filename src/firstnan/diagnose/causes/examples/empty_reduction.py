"""Tagging with ignored positions: in one batch every target is ignored, so the mean has no elements."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
tokens = torch.randn(512, 6)
tags = torch.randint(0, 4, (512,))
tags[torch.rand(512) < 0.3] = -100
tags[32:40] = -100  # a page without annotation

model = nn.Linear(6, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(tokens, tags), batch_size=8)):
    loss = nn.functional.cross_entropy(model(x), y, ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
