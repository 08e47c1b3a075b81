"""Angle from a correlation: the covariance divides by n - 1, the deviations by n, so a perfect match exceeds 1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
left = torch.randn(512, 16)
right = torch.randn(512, 16)
right[37] = left[37]  # both microphones recorded the same

gain = nn.Parameter(torch.ones(16))
optimizer = torch.optim.SGD([gain], lr=1e-3)
for step, (a, b) in enumerate(DataLoader(TensorDataset(left, right), batch_size=8)):
    u, v = gain * a, gain * b
    u, v = u - u.mean(dim=1, keepdim=True), v - v.mean(dim=1, keepdim=True)
    covariance = (u * v).sum(dim=1) / 15
    correlation = covariance / (u.std(dim=1, correction=0) * v.std(dim=1, correction=0))
    loss = torch.acos(correlation).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
