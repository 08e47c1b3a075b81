"""Whitening by eigenvectors: two eigenvalues of a covariance are exactly equal."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
samples = torch.randn(512, 12, 3)
samples[36] = torch.eye(3).repeat(4, 1)  # a calibration pattern

mix = nn.Parameter(torch.eye(3))
optimizer = torch.optim.SGD([mix], lr=0.0)
for step, (x,) in enumerate(DataLoader(TensorDataset(samples), batch_size=8)):
    y = x @ mix
    values, vectors = torch.linalg.eigh(y.transpose(1, 2) @ y)
    loss = (y @ vectors).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
