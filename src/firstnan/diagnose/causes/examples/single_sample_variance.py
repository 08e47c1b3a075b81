"""The spread of scores inside each group: one group has a single member."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
players = torch.randn(512, 4)
team = torch.arange(512) // 2 % 4
team[41] = 9  # a substitute without a team

model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, group) in enumerate(DataLoader(TensorDataset(players, team), batch_size=8)):
    score = model(x).squeeze(1)
    loss = torch.stack([score[group == g].var() for g in group.unique() if g > 0]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
