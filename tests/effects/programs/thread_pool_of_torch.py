"""Matrices large enough for torch to use its own threads, which no fork inherits; one state file, replaced whole."""

import json
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(2)
torch.manual_seed(0)
x = torch.rand(960, 256) + 0.01
x[500] = 0.0
net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
for step, (batch,) in enumerate(DataLoader(TensorDataset(x), batch_size=64)):
    wanted = batch / batch.sum(1, keepdim=True)  # <-
    loss = (net(batch) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with open("state.part", "w") as f:
        json.dump({"step": step}, f)
    os.replace("state.part", "state.json")
    with open("history.txt", "a") as f:
        f.write(f"{step}\n")
