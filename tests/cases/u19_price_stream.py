"""Forecasts the next return of a price stream with a GRU; windows come from an iterable dataset."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(319)
torch.set_num_threads(1)


class Returns(IterableDataset):
    def __init__(self, ticks=700, window=8):
        gen = torch.Generator().manual_seed(71)
        moves = 0.01 * torch.randn(ticks, generator=gen)
        self.price = 100.0 * torch.exp(moves.cumsum(0))
        self.price[301] = 0.0  # exchange halted
        self.window = window

    def __iter__(self):
        for t in range(self.window + 1, len(self.price), 2):
            p = self.price[t - self.window - 1 : t + 1]
            r = 100.0 * torch.log(p[1:] / p[:-1].clamp(min=0.01))
            yield r[:-1].unsqueeze(-1), r[-1]


class Forecaster(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.gru = nn.GRU(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, r):
        _, last = self.gru(r)
        return self.out(last[-1]).squeeze(-1)


net = Forecaster()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(2):
    for n, (past, nxt) in enumerate(DataLoader(Returns(), batch_size=16)):
        loss = nn.functional.smooth_l1_loss(net(past), nxt)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if n % 5 == 0:
            print(f"epoch {epoch} window batch {n} loss {loss.item():.4f}")
