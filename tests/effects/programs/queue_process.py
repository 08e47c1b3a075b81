"""A forked process writes what it gets from a multiprocessing queue; it ends when it gets None."""

import multiprocessing as mp

import torch
from torch.utils.data import DataLoader, TensorDataset


def write_all(queue, path):
    with open(path, "w") as out:
        for line in iter(queue.get, None):
            out.write(line)


def main():
    context = mp.get_context("fork")
    queue = context.Queue()
    writer = context.Process(target=write_all, args=(queue, "writer.log"))
    writer.start()
    try:
        train(queue)
    finally:
        queue.put(None)
        writer.join()


def train(queue):
    torch.manual_seed(0)
    x = torch.rand(160, 3) + 0.1
    x[59] = 0.0
    net = torch.nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=5)):
        share = batch / batch.sum(1, keepdim=True)  # <-
        loss = (net(batch) - share).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        queue.put(f"{step} {loss.item()}\n")


if __name__ == "__main__":
    main()
