"""Dwell time from click sessions of different lengths; the collate function pads with NaN so that gaps show up."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(408)
torch.set_num_threads(1)


def sessions():
    g = torch.Generator().manual_seed(14)
    lengths = sorted([5] * 72 + [6] * 60 + [8] * 36)
    for n in lengths:
        clicks = torch.randn(n, 4, generator=g)
        yield clicks, clicks[:, 0].mean() + clicks[-1, 1]


def collate(items):
    clicks, dwell = zip(*items, strict=True)
    lengths = torch.tensor([len(c) for c in clicks])
    return pad_sequence(clicks, batch_first=True, padding_value=float("nan")), lengths, torch.stack(dwell)


class Pooler(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, width), nn.SiLU())
        self.outer = nn.Linear(width, 1)

    def forward(self, clicks, lengths):
        keep = torch.arange(clicks.size(1))[None, :] < lengths[:, None]
        h = self.inner(clicks * keep[..., None])
        return self.outer(h.sum(1) / lengths[:, None]).squeeze(1)


model = Pooler()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step, (clicks, lengths, dwell) in enumerate(DataLoader(list(sessions()), batch_size=16, collate_fn=collate)):
    error = model(clicks, lengths) - dwell
    loss = error.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} {loss.item():.4f}")
