"""A shuffled classifier that keeps a checkpoint every fourth step, the best one, and the final one of the run."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    out: str = "checkpoints"
    every: int = 4
    lr: float = 0.05
    seed: int = 7


class FocalLoss(nn.Module):
    def forward(self, p, target):
        picked = p.gather(1, target[:, None]).squeeze(1)
        return -((1 - picked) ** 2 * picked.log()).mean()  # <-


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 3)

    def forward(self, x, allowed):
        return (self.body(x).softmax(1)) * allowed


def data():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 8, generator=g), torch.randint(3, (240,), generator=g)
    allowed = torch.ones(240, 3)
    allowed[100, y[100]] = 0.0  # the label is one that the mask forbids
    return DataLoader(TensorDataset(x, allowed, y), batch_size=6, shuffle=True, generator=g)


def save(model, opt, step, path):
    torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, path)


def main(cfg: Config):
    torch.manual_seed(cfg.seed)
    os.makedirs(cfg.out, exist_ok=True)
    model, criterion = Net(), FocalLoss()
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    best, step = float("inf"), 0
    for x, allowed, y in data():
        loss = criterion(model(x, allowed), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if loss.item() < best:
            best = loss.item()
            save(model, opt, step, f"{cfg.out}/best.pt")
        if step % cfg.every == 3:
            save(model, opt, step, f"{cfg.out}/step_{step:04d}.pt")
        step += 1
    save(model, opt, step, f"{cfg.out}/final.pt")


if __name__ == "__main__":
    main(Config())
