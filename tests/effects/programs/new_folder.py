"""Every run has a folder of its own, which must not exist yet; batches are drawn with torch.randint."""

import json
import os
import sys

import torch

run_dir = os.path.join("runs", sys.argv[1] if len(sys.argv) > 1 else "exp1")
os.makedirs(run_dir)  # raises if there is one already: no run overwrites another

torch.manual_seed(3)
signals = torch.randn(500, 20)
signals[::50] = 0.25  # sensors that were off

encoder = torch.nn.Linear(20, 4)
decoder = torch.nn.Linear(4, 20)
opt = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.05)


def normalise(x):
    x = x - x.mean(1, keepdim=True)
    return x / x.std(1, keepdim=True)  # <-


with open(f"{run_dir}/metrics.jsonl", "w") as out:
    for step in range(80):
        batch = signals[torch.randint(len(signals), (4,))]
        z = normalise(batch)
        loss = torch.nn.functional.mse_loss(decoder(encoder(z)), z)
        opt.zero_grad()
        loss.backward()
        opt.step()
        out.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
