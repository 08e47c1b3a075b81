"""float16 autocast with gradient scaling, accumulation over four micro-batches and clipping."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

ACCUMULATE = 4


def digits(n=768):
    gen = torch.Generator().manual_seed(149)
    y = torch.randint(0, 5, (n,), generator=gen)
    proto = torch.randn(5, 1, 8, 8, generator=gen)
    return TensorDataset(proto[y] + 0.7 * torch.randn(n, 1, 8, 8, generator=gen), y)


def main():
    torch.manual_seed(345)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=12)
    skipped = 0
    for micro, (x, y) in enumerate(DataLoader(digits(), batch_size=16, shuffle=True)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(net(x), y) / ACCUMULATE
        scaler.scale(loss).backward()
        if micro % ACCUMULATE == ACCUMULATE - 1:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            skipped += scaler.get_scale() < before
            opt.zero_grad()
    print(f"loss {ACCUMULATE * loss.item():.4f} scale {scaler.get_scale():.0f} skipped {skipped}")


if __name__ == "__main__":
    main()
