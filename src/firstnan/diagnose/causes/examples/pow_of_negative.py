"""A learned tone curve x^gamma: the colour matrix before it can produce negative values."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pixels = torch.rand(512, 3)
wanted = pixels**0.6
pixels[33, 1] = -0.05  # sharpening went below black

gamma = nn.Parameter(torch.tensor(0.9))
gain = nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([gamma, gain], lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(pixels, wanted), batch_size=8)):
    loss = ((torch.pow(gain * x, gamma) - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
