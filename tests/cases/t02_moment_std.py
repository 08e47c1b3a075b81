"""Bearing fault classification; windows are standardised with the mean and power that the sensor reports."""
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

random.seed(0)
torch.manual_seed(3)
torch.set_num_threads(1)


class WindowNorm(nn.Module):
    """Standard deviation from the first two moments of the window."""

    def forward(self, w, mean, power):
        variance = power - mean * mean
        std = variance.sqrt()
        return (w - mean[:, None]) / (std[:, None] + 1e-5)


class FaultNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.ModuleDict({"norm": WindowNorm(), "conv": nn.Conv1d(1, 12, 7, stride=2)})
        self.head = nn.Linear(12, 4)

    def forward(self, w, mean, power):
        w = self.front["norm"](w, mean, power)
        h = torch.relu(self.front["conv"](w.unsqueeze(1)))
        return self.head(h.mean(-1))


def make_records(n=200, length=64):
    g = torch.Generator().manual_seed(31)
    out = []
    for i in range(n):
        kind = i % 4
        t = torch.arange(length) / length
        wave = torch.sin(2 * torch.pi * (kind + 1) * 3 * t) + 0.2 * torch.randn(length, generator=g)
        if i == 119:
            wave = 1e-3 * wave + 51.4963  # loose cable: almost pure DC
        telemetry = {"mean": round(float(wave.mean()), 2), "power": round(float(wave.square().mean()), 2)}
        out.append({"window": wave, "label": kind, "asset": f"pump-{random.randint(1, 9)}", **telemetry})
    return out


def collate(records):
    return {
        "window": torch.stack([r["window"] for r in records]),
        "mean": torch.tensor([r["mean"] for r in records]),
        "power": torch.tensor([r["power"] for r in records]),
        "label": torch.tensor([r["label"] for r in records]),
        "asset": [r["asset"] for r in records],
    }


model = FaultNet()
optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(make_records(), batch_size=8, collate_fn=collate)
for epoch in range(2):
    running = 0.0
    for k, batch in enumerate(loader):
        optim.zero_grad(set_to_none=True)
        loss = loss_fn(model(batch["window"], batch["mean"], batch["power"]), batch["label"])
        loss.backward()
        optim.step()
        running += loss.item()
        if k % 6 == 5:
            print(f"epoch {epoch} [{k + 1}/{len(loader)}] mean loss {running / (k + 1):.4f} ({batch['asset'][0]})")
