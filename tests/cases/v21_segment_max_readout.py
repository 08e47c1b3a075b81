"""Room rating from furniture lists: scatter a maximum over the items of each room, then read out."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(421)
torch.set_num_threads(1)


class Rooms(nn.Module):
    def __init__(self, d=14):
        super().__init__()
        self.item = nn.Sequential(nn.Linear(5, d), nn.ReLU())
        self.rate = nn.Linear(d, 1)

    def forward(self, items, room, rooms):
        h = self.item(items)
        best = torch.full((rooms, h.size(1)), float("-inf"))
        best = best.scatter_reduce(0, room[:, None].expand_as(h), h, reduce="amax")
        return self.rate(best).squeeze(1)


def houses(count, rng):
    for house in range(count):
        sizes = torch.randint(1, 5, (8,), generator=rng)
        if house == 10:
            sizes[2] = 0
        room = torch.repeat_interleave(torch.arange(8), sizes)
        items = torch.randn(len(room), 5, generator=rng)
        yield items, room, torch.rand(8, generator=rng)


model = Rooms()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for k, (items, room, rating) in enumerate(houses(18, torch.Generator().manual_seed(31))):
    loss = F.mse_loss(model(items, room, len(rating)), rating)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("house", k, "loss", f"{loss.item():.4f}")
