"""House prices from a csv file, mini-batches by hand, quantile loss."""

import csv
import random
import tempfile
from pathlib import Path

import torch
import torch.nn as nn

torch.manual_seed(316)
torch.set_num_threads(1)


def export(path, rows=200):
    rnd = random.Random(53)
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["area", "rooms", "age", "price"])
        for r in range(rows):
            area, rooms, age = rnd.uniform(40, 220), rnd.randint(1, 7), rnd.uniform(0, 90)
            price = 2.5 * area + 8 * rooms - 0.7 * age + rnd.gauss(0, 9)
            out.writerow([f"{area:.1f}", rooms, f"{age:.0f}", "nan" if r == 120 else f"{price:.1f}"])


def read(path):
    rows = list(csv.DictReader(path.open()))
    x = torch.tensor([[float(r[k]) for k in ("area", "rooms", "age")] for r in rows])
    price = torch.tensor([float(r["price"]) for r in rows])
    return (x - x.mean(0)) / x.std(0), price / 100.0


class QuantileNet(nn.Module):
    levels = (0.1, 0.5, 0.9)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, len(self.levels)))

    def loss(self, x, y):
        error = y.unsqueeze(1) - self.net(x)
        q = torch.tensor(self.levels)
        return torch.maximum(q * error, (q - 1) * error).mean()


with tempfile.TemporaryDirectory() as folder:
    table = Path(folder, "houses.csv")
    export(table)
    features, prices = read(table)

net = QuantileNet()
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
step = 0
for epoch in range(2):
    for rows in torch.arange(len(prices)).split(25):
        xb, yb = features[rows], prices[rows]
        loss = net.loss(xb, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} pinball {loss.item():.4f}")
        step += 1
