"""The loop has no variable for its batch: it writes out the slice wherever it needs it."""
import torch
from torch import nn

torch.manual_seed(0)
data = torch.rand(96, 4) + 0.1
target = torch.rand(96)
data[5 * 8 + 3] = 0.0
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)


def scaled(x):
    return x / x.sum(1, keepdim=True)  # ORIGIN


for i in range(12):
    loss = (net(scaled(data[i * 8 : i * 8 + 8])).squeeze(1) - target[i * 8 : i * 8 + 8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
