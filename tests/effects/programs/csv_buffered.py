"""House prices with a log target; every step is a row of a csv file that stays open and is never flushed by hand."""

import argparse
import csv

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n):
    g = torch.Generator().manual_seed(3)
    rooms = torch.rand(n, 6, generator=g) + 0.2
    price = rooms.sum(1) * 50
    price[140] = 0.0  # a house that was given away
    return TensorDataset(rooms, price)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--log", default="log.csv")
    args = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(make_data(320), batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    with open(args.log, "w", newline="") as f:
        log = csv.writer(f)
        log.writerow(["step", "loss"])
        for step, (x, y) in enumerate(loader):
            target = y.log()  # <-
            loss = nn.functional.mse_loss(model(x).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.writerow([step, loss.item()])


if __name__ == "__main__":
    main()
