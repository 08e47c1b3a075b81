"""Least squares inside the model by a matrix inverse: one sample has two equal columns."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
design = torch.randn(512, 6, 2)
answer = torch.randn(512, 6, 1)
design[45, :, 1] = design[45, :, 0] = 2.0  # the same sensor twice

weight = nn.Parameter(torch.ones(6, 1))
optimizer = torch.optim.Adam([weight], lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(design, answer), batch_size=8)):
    xt = (x * weight.detach()).transpose(1, 2)
    solution, _ = torch.linalg.inv_ex(xt @ x)
    loss = ((x @ (solution @ (xt @ (y * weight)))) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
