"""Several backward calls belong to one step: accumulated micro-batches, or two optimizers that take turns."""

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND, WHICH = sys.argv[1:]
torch.manual_seed(0)


def accumulate(bad: int) -> None:
    """Four micro-batches a step; micro-batch `bad` of step 3 divides 0 by 0."""
    mask = torch.ones(96, 4)
    mask[(3 * 4 + bad) * 4 + 1] = 0.0
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for i, (x, m) in enumerate(DataLoader(TensorDataset(torch.randn(96, 4), mask), batch_size=4)):
        error = (net(x) - x).square() * m
        loss = (error.sum(1) / m.sum(1)).mean()  # <- accumulate
        (loss / 4).backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()


def gan(bad: str) -> None:
    """One sample of batch 5 spoils the discriminator's or the generator's loss."""
    weight, scale = torch.ones(40), torch.ones(40)
    (weight if bad == "discriminator" else scale)[22] = -1.0
    g, d = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    g_optimizer, d_optimizer = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    for real, w, s in DataLoader(TensorDataset(torch.randn(40, 4), weight, scale), batch_size=4):
        d_loss = d_loss_of(d(real), d(g(torch.randn(len(real), 2)).detach()), w)
        d_optimizer.zero_grad()
        d_loss.backward()
        d_optimizer.step()
        g_loss = (nn.functional.softplus(-d(g(torch.randn(len(real), 2)))).squeeze(1) * torch.sqrt(s)).mean()  # <- g
        g_optimizer.zero_grad()
        g_loss.backward()
        g_optimizer.step()


def d_loss_of(real: Tensor, fake: Tensor, weight: Tensor) -> Tensor:
    score = nn.functional.softplus(-real) + nn.functional.softplus(fake)
    return (score.squeeze(1) - torch.log(weight)).mean()  # <- discriminator


if KIND == "accumulate":
    accumulate(int(WHICH))
else:
    gan(WHICH)
