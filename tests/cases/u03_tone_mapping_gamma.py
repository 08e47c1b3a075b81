"""Learned tone mapping of bracketed exposures; display gamma is part of the model."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    seed: int = 303
    images: int = 144
    batch: int = 12
    lr: float = 3e-3
    gamma: float = 2.2
    epochs: int = 2


class Display(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.inv_gamma = 1.0 / gamma

    def forward(self, linear):
        return linear.pow(self.inv_gamma)


class ToneMapper(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ELU(), nn.Conv2d(8, 1, 3, padding=1))
        self.display = Display(cfg.gamma)

    def forward(self, scene, exposure):
        radiance = F.softplus(self.features(scene))
        return self.display(radiance * exposure.view(-1, 1, 1, 1))


def brackets(cfg):
    gen = torch.Generator().manual_seed(cfg.seed + 1)
    scene = torch.rand(cfg.images, 1, 8, 8, generator=gen)
    exposure = 2.0 ** torch.randint(-3, 3, (cfg.images,), generator=gen).float()
    exposure[68] = 0.0  # shutter did not open
    target = (scene * exposure.view(-1, 1, 1, 1)).clamp(max=1.0) ** 0.5
    return TensorDataset(scene, exposure, target)


def main(cfg):
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    net = ToneMapper(cfg)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        total = 0.0
        for scene, exposure, target in DataLoader(brackets(cfg), batch_size=cfg.batch):
            loss = F.l1_loss(net(scene, exposure), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item()
        print(f"epoch {epoch} l1 {total:.4f}")


if __name__ == "__main__":
    main(Config())
