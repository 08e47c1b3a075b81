"""A score in float16: the sum of 64 products exceeds 65504, the largest float16."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
queries = torch.rand(512, 64)
clicked = torch.rand(512)
queries[38] *= 4000.0  # an unscaled query

tower = nn.Linear(64, 64)
nn.init.eye_(tower.weight)
optimizer = torch.optim.SGD(tower.parameters(), lr=1e-4)
for step, (q, y) in enumerate(DataLoader(TensorDataset(queries, clicked), batch_size=8)):
    score = tower(q).half().sum(dim=1)
    loss = (score.float() / 64 - y).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
