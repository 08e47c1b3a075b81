"""Advantage over a baseline, where both hold -inf for moves that are not allowed."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
states = torch.randn(512, 6)
blocked = torch.zeros(512, 4, dtype=torch.bool)
blocked[35, 1] = True  # the first state with a blocked move

actor, critic = nn.Linear(6, 4), nn.Linear(6, 4)
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-2)
for step, (x, mask) in enumerate(DataLoader(TensorDataset(states, blocked), batch_size=8)):
    q = actor(x).masked_fill(mask, float("-inf"))
    baseline = critic(x).masked_fill(mask, float("-inf"))
    loss = (q - baseline).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
