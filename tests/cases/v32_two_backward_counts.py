"""Bicycle rentals: two losses with their own backward call before one update, counts with a Poisson likelihood."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--hours", type=int, default=260)
parser.add_argument("--batch", type=int, default=13)
args = parser.parse_args()

torch.manual_seed(432)
torch.set_num_threads(1)
g = torch.Generator().manual_seed(64)
weather = torch.randn(args.hours, 5, generator=g)
weather[187, 4] = 9999.0  # placeholder for a missing pressure
rentals = torch.poisson((1 + weather[:, 0].abs()) * 2, generator=g)
is_weekend = (torch.arange(args.hours) // 24 % 7 >= 5).float()

body = nn.Sequential(nn.Linear(5, 16), nn.LeakyReLU(), nn.Linear(16, 16), nn.LeakyReLU())
count_head, weekend_head = nn.Linear(16, 1), nn.Linear(16, 1)
parameters = [*body.parameters(), *count_head.parameters(), *weekend_head.parameters()]
opt = torch.optim.SGD(parameters, lr=1e-2, momentum=0.5)
for epoch in range(2):
    for k in range(0, args.hours, args.batch):
        rows = slice(k, k + args.batch)
        h = body(weather[rows])
        opt.zero_grad()
        weekend = F.binary_cross_entropy_with_logits(weekend_head(h)[:, 0], is_weekend[rows])
        weekend.backward(retain_graph=True)
        counts = F.poisson_nll_loss(count_head(h)[:, 0], rentals[rows], full=True)
        (0.5 * counts).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        opt.step()
    print(f"epoch {epoch}: weekend {weekend.item():.3f} counts {counts.item():.3f}")
