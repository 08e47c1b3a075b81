"""A stream of sensor windows, IterableDataset, two workers; window 41 has no variance."""
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Windows(IterableDataset):
    def __init__(self, n):
        self.n = n

    def raw(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randn(16, generator=g)
        if i == 41:
            x = torch.full((16,), 3.0)
        return x

    def __iter__(self):
        info = get_worker_info()
        first, every = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, self.n, every):
            x = self.raw(i)
            scale = x.std()
            x = (x - x.mean()) / scale  # ORIGIN
            yield x, x.abs().max().clamp(max=5)


loader = DataLoader(Windows(256), batch_size=8, num_workers=2)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
for x, y in loader:
    loss = (net(x).squeeze(1) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
