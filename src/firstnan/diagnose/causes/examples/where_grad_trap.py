"""sinc(x) with its hole filled by where: the branch not taken still gets a gradient, 0/0."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
time = torch.rand(512, 4) * 6 - 3
wave = torch.sinc(time)
time[46, 1] = 0.0  # the centre of the pulse

width = nn.Parameter(torch.full((4,), 2.5))
optimizer = torch.optim.Adam([width], lr=1e-2)
for step, (t, y) in enumerate(DataLoader(TensorDataset(time, wave), batch_size=8)):
    x = width * t
    pulse = torch.where(x == 0, 1.0, torch.sin(x) / x)
    loss = ((pulse - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
