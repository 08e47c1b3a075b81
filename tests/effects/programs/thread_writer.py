"""A thread writes the log, fed by a queue that holds four lines at most; batches are slices."""

import queue
import threading

import torch


def writer(lines, path):
    with open(path, "w") as out:
        while (line := lines.get()) is not None:
            out.write(line)


def batches(x, size):
    for at in range(0, len(x), size):
        yield x[at : at + size]


torch.manual_seed(0)
lines = queue.Queue(maxsize=4)
thread = threading.Thread(target=writer, args=(lines, "thread.log"))
thread.start()
try:
    x = torch.rand(200, 4) + 0.1
    x[133, :] = 0
    w = torch.nn.Parameter(torch.full((4,), 0.3))
    opt = torch.optim.SGD([w], lr=0.01)
    for step, xb in enumerate(batches(x, 8)):
        loss = ((xb * w).sum(1).sqrt() - 1).square().mean()  # <-
        opt.zero_grad()
        loss.backward()
        opt.step()
        lines.put(f"{step} {loss.item()}\n")
finally:
    lines.put(None)
    thread.join()
