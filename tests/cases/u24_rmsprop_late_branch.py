"""Taxi demand: a holiday embedding joins the model when the first holiday week comes up."""

import torch
import torch.nn as nn

torch.manual_seed(324)
torch.set_num_threads(1)


class Demand(nn.Module):
    def __init__(self, zones=15, holidays=10, d=8):
        super().__init__()
        self.zone = nn.Embedding(zones, d)
        self.holiday = nn.Embedding(holidays, d)
        self.mlp = nn.Sequential(nn.Linear(d + 2, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, zone, clock, holiday=None):
        h = self.zone(zone)
        if holiday is not None:
            h = h + self.holiday(holiday)
        return self.mlp(torch.cat([h, clock], dim=1)).squeeze(1)


def week(number, gen):
    zone = torch.cat([torch.arange(15), torch.randint(0, 15, (9,), generator=gen)])
    hour = 24 * torch.rand(24, generator=gen)
    clock = torch.stack([torch.sin(hour / 3.82), torch.cos(hour / 3.82)], dim=1)
    trips = 0.1 * zone + clock[:, 0]
    holiday = None
    if number in (6, 12):
        holiday = torch.full((24,), number // 6)
    return zone, clock, holiday, trips


gen = torch.Generator().manual_seed(101)
model = Demand()
opt = torch.optim.RMSprop(model.parameters(), lr=3e-3, alpha=0.95, eps=0.0)
for number in range(18):
    zone, clock, holiday, trips = week(number, gen)
    loss = (model(zone, clock, holiday) - trips).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"week {number:2d} mse {loss.item():.4f}{'' if holiday is None else ' (holiday)'}")
