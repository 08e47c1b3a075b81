"""As many steps as samples: a row of `data` is a whole batch, and not the sample with that number."""
import torch
from torch import nn

torch.manual_seed(0)
data, target = torch.rand(8, 8, 4) + 0.1, torch.rand(8, 8)
data[5, 2] = 0.0
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)


def scaled(x):
    return x / x.sum(1, keepdim=True)  # ORIGIN


for step in range(8):
    loss = (net(scaled(data[step])).squeeze(1) - target[step]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
