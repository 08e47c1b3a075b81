"""Support tickets are routed to one small head a language; head losses are averaged in a comprehension."""

from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = SimpleNamespace(languages=("de", "fr", "fi"), width=18, rate=3e-3, batch=10, tickets=220, seed=427)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(9, cfg.width), nn.Hardswish())
        self.heads = nn.ModuleDict({name: nn.Linear(cfg.width, 3) for name in cfg.languages})

    def losses(self, x, urgency, language):
        z = self.body(x)
        routes = {name: language == k for k, name in enumerate(cfg.languages)}
        return {
            name: F.cross_entropy(self.heads[name](z[rows]), urgency[rows], reduction="none").sum() / rows.sum()
            for name, rows in routes.items()
        }


def tickets():
    g = torch.Generator().manual_seed(40)
    language = torch.arange(cfg.tickets) % 3
    language[130:150] = torch.arange(20) % 2
    return torch.randn(cfg.tickets, 9, generator=g), torch.randint(0, 3, (cfg.tickets,), generator=g), language


class Meter(list):
    def __call__(self, value):
        self.append(float(value))


def main():
    torch.manual_seed(cfg.seed)
    torch.set_num_threads(1)
    router, meter = Router(), Meter()
    optimizer = torch.optim.AdamW(router.parameters(), lr=cfg.rate)
    for x, urgency, language in zip(*(column.split(cfg.batch) for column in tickets()), strict=True):
        parts = router.losses(x, urgency, language)
        loss = torch.stack(list(parts.values())).mean()
        optimizer.zero_grad(), loss.backward(), optimizer.step()
        meter(loss.detach())
    print("losses", [round(v, 3) for v in meter])


main()
