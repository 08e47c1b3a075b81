"""Only one training at a time on this machine: a lock that is held on an open file. The step is a function."""

import fcntl
import sys

import torch
import torch.nn.functional as F

lock = open("training.lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("another training is running", file=sys.stderr)
    sys.exit(75)

torch.manual_seed(4)
directions = F.normalize(torch.randn(120, 3), dim=1)
rotated = F.normalize(directions + 0.3 * torch.randn(120, 3), dim=1)
directions[77] = torch.tensor([0.0, 0.0, 1.0])
rotated[77] = torch.tensor([0.0, 0.0, 1.0])  # an object that did not move
scale = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([scale], lr=1e-3)
history = open("angles.txt", "w")


def train_step(a, b):
    gap = ((a - b).abs() * scale).sum(1)
    angle = gap**0.5  # <-
    loss = angle.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


for n in range(24):
    rows = slice(5 * n, 5 * n + 5)
    value = train_step(directions[rows], rotated[rows])
    history.write(f"{n}\t{value}\n")
