"""NaN from the start: fine-tuning from a checkpoint that an earlier, broken run left behind."""

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(8)
torch.set_num_threads(1)


def build():
    return nn.ModuleDict({"backbone": nn.Sequential(nn.Linear(20, 32), nn.SiLU()), "head": nn.Linear(32, 4)})


def leave_checkpoint(path):
    """The earlier run: its last update ruined a few weights, and it saved them."""
    state = build().state_dict()
    state["backbone.0.weight"][3, 7:9] = float("nan")
    torch.save(state, path)


def finetune(path):
    net = build()
    net.load_state_dict(torch.load(path, weights_only=True))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    for step in range(10):
        x, y = torch.randn(24, 20), torch.randint(0, 4, (24,))
        loss = nn.functional.cross_entropy(net["head"](net["backbone"](x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")


with tempfile.TemporaryDirectory() as folder:
    leave_checkpoint(Path(folder, "last.pt"))
    finetune(Path(folder, "last.pt"))
