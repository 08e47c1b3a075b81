"""Multi-assay toxicity regression with missing labels; masked before the arithmetic, so gradients are clean."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(352)
torch.set_num_threads(1)


def assays(n=220):
    gen = torch.Generator().manual_seed(173)
    x = torch.randn(n, 10, generator=gen)
    y = x[:, :4].exp()
    return TensorDataset(x, y.masked_fill(torch.rand(n, 4, generator=gen) < 0.5, float("nan")))


def masked_log_error(raw, y):
    known = ~torch.isnan(y)
    positive = known & (raw > 0)
    safe_raw = torch.where(positive, raw, torch.ones_like(raw))
    safe_y = torch.where(known, y, torch.ones_like(y))
    log_error = (safe_raw.log() - safe_y.log()).square()
    below = torch.where(known & ~positive, 1.0 - raw, torch.zeros_like(raw))
    return (torch.where(positive, log_error, torch.zeros_like(raw)) + below).sum() / known.sum().clamp(min=1)


net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 4))
opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
for epoch in range(3):
    for x, y in DataLoader(assays(), batch_size=22):
        raw = net(x)
        loss = masked_log_error(raw, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    seen = torch.nanmean(y, dim=0)
    spread = torch.nansum((y - seen).square(), dim=0)
    print(f"epoch {epoch} loss {loss.item():.4f} label means {seen.tolist()} spread {spread.tolist()}")
