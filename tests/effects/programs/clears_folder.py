"""A curve fit with LBFGS that clears its output folder at the start and saves the parameters after every step."""

import argparse
import pathlib
import shutil

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()

shutil.rmtree(args.out, ignore_errors=True)
args.out.mkdir()

torch.manual_seed(0)
t = torch.linspace(0.1, 3.0, 40)
growth = 2.0 * t**0.7
a, b = torch.nn.Parameter(torch.tensor(1.0)), torch.nn.Parameter(torch.tensor(1.0))
optimizer = torch.optim.LBFGS([a, b], lr=0.05, max_iter=2)

for step in range(args.steps):
    times = t - 0.1 if step == 12 else t  # from here on the clock starts at zero

    def closure():
        optimizer.zero_grad()
        curve = a * torch.exp(b * torch.log(times))  # <-
        loss = ((curve - growth) ** 2).mean()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    torch.save({"a": a.detach(), "b": b.detach()}, args.out / f"step_{step:03d}.pt")
    with open(args.out / "fit.txt", "a") as f:
        print(step, loss.item(), file=f)
