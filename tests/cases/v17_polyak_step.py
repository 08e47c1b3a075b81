"""Perceptron-style classifier with Polyak's step size: rate = loss / |gradient|^2."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def blobs(n=320):
    g = torch.Generator().manual_seed(10)
    y = torch.arange(n) % 2 * 2.0 - 1.0
    x = torch.randn(n, 4, generator=g) * 0.7
    x[:, 0] += 1.6 * y
    return TensorDataset(x, y)


def train():
    torch.manual_seed(417)
    torch.set_num_threads(1)
    net = nn.Linear(4, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(3):
        wrong = 0
        for x, y in DataLoader(blobs(), batch_size=10):
            score = net(x).squeeze(1)
            loss = (0.6 - y * score).clamp_min(0).mean()
            opt.zero_grad()
            loss.backward()
            steepness = sum(p.grad.square().sum() for p in net.parameters())
            rate = loss.detach() / steepness
            for group in opt.param_groups:
                group["lr"] = min(rate.item(), 0.5)
            opt.step()
            wrong += int((score.sign() != y).sum())
        print(f"epoch {epoch}: wrong {wrong}, loss {loss.item():.4f}")


train()
