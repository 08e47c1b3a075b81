"""Calls another program at the end of every epoch, as one does to upload results; two loader workers."""

import subprocess

import torch
from torch.utils.data import DataLoader, TensorDataset


def upload(epoch, loss):
    subprocess.run(["sh", "-c", f"echo {epoch} {loss} >> uploads.txt"], check=True)


def epoch_loss(net, opt, loader, temperature):
    total = 0.0
    for x, y in loader:
        logits = net(x) / temperature  # <-
        loss = torch.nn.functional.cross_entropy(logits, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(loader)


def main():
    torch.manual_seed(0)
    x = torch.randn(30, 5)
    loader = DataLoader(TensorDataset(x, x.argmax(1)), batch_size=6, num_workers=2)
    net = torch.nn.Linear(5, 5)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(6):
        temperature = 1.0 - epoch / 4  # annealed one epoch too far
        upload(epoch, epoch_loss(net, opt, loader, temperature))


if __name__ == "__main__":
    main()
