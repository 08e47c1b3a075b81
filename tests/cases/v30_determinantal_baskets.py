"""Determinantal point process over baskets of products: likelihood by log-determinants."""

import random

import torch
from torch import nn

random.seed(30)
torch.manual_seed(430)
torch.set_num_threads(1)
PRODUCTS, RANK = 20, 8


class Diversity(nn.Module):
    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(PRODUCTS, RANK) * 0.5)

    def forward(self, baskets):
        whole = torch.linalg.slogdet(torch.eye(RANK) + self.v.T @ self.v).logabsdet
        parts = []
        for basket in baskets:
            rows = self.v[basket]
            parts.append(torch.linalg.slogdet(rows @ rows.T)[1])
        return torch.stack(parts) - whole


def basket():
    return random.sample(range(PRODUCTS), random.randint(2, 4))


model = Diversity()
opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
stock = [[basket() for _ in range(6)] for _ in range(22)]
stock[14][3] = [7, 7, 2]  # the scanner beeped twice
for n, baskets in enumerate(stock):
    opt.zero_grad()
    loss = -model(baskets).mean()
    if not torch.isfinite(loss.detach()):
        print(f"week {n}: likelihood is zero")
    loss.backward()
    opt.step()
    print(f"week {n} loss {loss.item():.4f}")
