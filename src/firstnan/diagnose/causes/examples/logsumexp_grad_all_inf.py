"""Smooth maximum over the members of a bag: an empty bag is all -inf."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
members = torch.randn(512, 6, 3)
active = torch.rand(512)
missing = torch.arange(6) >= torch.randint(1, 7, (512, 1))
missing[33] = True  # a bag without a member

model = nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, mask, y) in enumerate(DataLoader(TensorDataset(members, missing, active), batch_size=8)):
    hide = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
    best = torch.logsumexp(model(x).squeeze(2) + hide, dim=1).clamp(min=-10.0)
    loss = ((best - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
