"""A whole row of the data is infinite, and the loop takes its batches by slices."""
import torch
from torch import nn

torch.manual_seed(0)
data = torch.randn(64, 5)
target = torch.randn(64, 1)
data[37] = float("inf")  # ORIGIN
net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for i in range(0, 64, 8):
    x = data[i : i + 8]
    y = target[i : i + 8]
    loss = (net(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
