"""Steps that take a while, so there is time to interrupt the run at any moment; says when each begins."""

import hashlib
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.rand(240, 4) + 0.1
x[50] = 0.0
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.01)
batches = ((part,) for part in x.split(8)) if sys.argv[1] == "slices" else DataLoader(TensorDataset(x), batch_size=8)
begun, log, saves = (open(name, "a") for name in ("begun.txt", "steps.csv", "saves.txt"))
for step, (batch,) in enumerate(batches):
    print(step, file=begun, flush=True)
    begins = time.monotonic()
    while time.monotonic() < begins + 0.15:  # works, where sleeping could be skipped
        torch.rand(8, 8) @ torch.rand(8, 8)
    loss = (net(batch) - batch.sum(1, keepdim=True).log()).pow(2).mean()  # <-
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item(), file=log, flush=True)
    if step % 2 == 1:
        torch.save(net.state_dict(), "last.pt")
        print(step, hashlib.md5(open("last.pt", "rb").read()).hexdigest(), file=saves, flush=True)
    if step == int(sys.argv[2]):
        break
