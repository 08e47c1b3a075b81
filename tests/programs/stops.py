"""Notices that something is wrong and stops by itself, in the way named on the command line."""

import math
import sys

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.data import DataLoader, TensorDataset

HOW = sys.argv[1]
torch.manual_seed(0)
data = torch.rand(40, 4) + 0.5
data[21] = -0.5
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)


def features(x: Tensor) -> Tensor:
    return torch.log(x)  # <- log


def loss_of(x: Tensor) -> Tensor:
    if HOW == "categorical":
        return -Categorical(logits=net(features(x))).log_prob(torch.zeros(len(x))).mean()
    if HOW == "normal":
        return -Normal(net(features(x)), 1.0).log_prob(x).mean()
    if HOW == "cholesky":
        factor = torch.linalg.cholesky(torch.diag(x[:, 0]) + 0 * net(x).sum())  # <- cholesky
        return factor.square().sum()
    return (net(features(x)) - x).square().mean()


def train() -> None:
    for (x,) in DataLoader(TensorDataset(data), batch_size=4):
        loss = loss_of(x)
        if HOW == "assert":
            assert torch.isfinite(loss), "the loss is not finite"
        elif HOW == "isnan" and torch.isnan(loss):
            raise FloatingPointError("NaN")
        elif not math.isfinite(loss.item()):
            if HOW == "exit":
                sys.exit(1)
            if HOW == "exit_0":
                sys.exit(0)
            if HOW == "raise":
                raise RuntimeError(f"bad loss {loss.item()}")
            if HOW == "break":
                break
            if HOW == "return":
                return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("after the loop")


train()
print("done")
