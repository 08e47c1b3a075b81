"""Ends with os._exit, since some library's threads would keep the process alive otherwise."""

import os
import sys

import torch

torch.manual_seed(0)
data = torch.rand(20, 6, 3) + 0.1
data[int(sys.argv[2]), 2] = 0.0
net = torch.nn.Linear(3, 1)
opt = torch.optim.Adam(net.parameters(), lr=0.01)


def train():
    with open("exit.log", "w") as log:
        for step, x in enumerate(data):
            loss = (net(x).squeeze(1) - torch.rsqrt(x.sum(1))).square().mean()  # <-
            opt.zero_grad()
            loss.backward()
            opt.step()
            log.write(f"{step} {loss.item()}\n")


if sys.argv[1] == "finally":
    try:
        train()
    finally:
        os._exit(0)
else:
    train()
    os._exit(0)
