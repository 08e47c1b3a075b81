"""Satellite regression on noisy downloads: batches with a non-finite loss or gradient are skipped."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def tiles(n=200):
    gen = torch.Generator().manual_seed(163)
    x = torch.randn(n, 12, generator=gen)
    y = x[:, :3].sum(1)
    x[43, 5] = float("nan")
    y[131] = float("inf")
    return TensorDataset(x, y)


def update(model, opt, x, y):
    opt.zero_grad()
    loss = (model(x).squeeze(1) - y).abs().mean()
    if not torch.isfinite(loss):
        return None
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not torch.isfinite(norm):
        opt.zero_grad()
        return None
    opt.step()
    return loss.item()


def main():
    torch.manual_seed(350)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        losses = [update(model, opt, x, y) for x, y in DataLoader(tiles(), batch_size=20)]
        good = [v for v in losses if v is not None]
        print(f"epoch {epoch} loss {sum(good) / len(good):.4f} skipped {len(losses) - len(good)}")


main()
