"""Magnitude pruning every dozen steps; surviving weights are scaled up to keep each unit's strength."""

import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(322)
torch.set_num_threads(1)


class Pruner:
    def __init__(self, layer, share=0.4):
        self.layer, self.share = layer, share

    @torch.no_grad()
    def apply(self):
        w = self.layer.weight
        before = w.abs().sum(1, keepdim=True)
        w.mul_((w.abs() > w.abs().quantile(self.share)).float())
        w.div_(w.abs().sum(1, keepdim=True) / before)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(14, 20)
        self.second = nn.Linear(20, 8)
        self.last = nn.Linear(8, 4)
        with torch.no_grad():
            self.second.weight[5] *= 0.1

    def forward(self, x):
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


gen = torch.Generator().manual_seed(89)
x = torch.randn(320, 14, generator=gen)
y = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=32)
net = Net()
pruner = Pruner(net.second)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
for step, (xb, yb) in enumerate(itertools.islice(itertools.cycle(loader), 24)):
    loss = F.cross_entropy(net(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 12 == 11:
        pruner.apply()
    print(f"step {step:2d} loss {loss.item():.4f}")
