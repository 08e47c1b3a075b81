"""Weight averaging with a burn-in; every epoch restarts from the average (torch.optim.swa_utils)."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

BURN_IN = 2


def after_burn_in(average, current, count):
    return average + (current - average) / (count - BURN_IN)


def spirals(n=240):
    g = torch.Generator().manual_seed(91)
    t = torch.rand(n, generator=g) * 6
    arm = torch.arange(n) % 2
    angle = t + 3.14159 * arm
    return TensorDataset(torch.stack([t * angle.cos(), t * angle.sin()], 1) / 6, arm)


def main():
    torch.manual_seed(409)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    average = AveragedModel(net, avg_fn=after_burn_in)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8)
    loader = DataLoader(spirals(), batch_size=48, shuffle=True)
    for epoch in range(6):
        for x, arm in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), arm)
            loss.backward()
            optimizer.step()
        average.update_parameters(net)
        if epoch >= BURN_IN:
            net.load_state_dict(average.module.state_dict())
        print(f"epoch {epoch} loss {loss.item():.4f}")


main()
