"""bad data: a sensor log in JSON where one reading is NaN, which json.loads accepts."""

import json
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

random.seed(6)
torch.manual_seed(6)
torch.set_num_threads(1)


def write_log(rows):
    """The log of a machine: one JSON object per line."""
    for row in range(rows):
        values = [round(random.gauss(20, 4), 2) for _ in range(8)]
        if row == 131:
            values[5] = float("nan")  # the probe was unplugged
        yield json.dumps({"probes": values, "wear": round(random.random(), 3)})


class Telemetry(Dataset):
    def __init__(self, lines):
        self.rows = [json.loads(line) for line in lines]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return (torch.tensor(row["probes"]) - 20.0) / 4.0, torch.tensor(row["wear"])


model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (probes, wear) in enumerate(DataLoader(Telemetry(write_log(192)), batch_size=16)):
    loss = nn.functional.smooth_l1_loss(model(probes).squeeze(1), wear)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
