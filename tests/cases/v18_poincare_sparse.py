"""Poincare embedding of a small taxonomy: sparse gradients, two optimizers, distances by acosh."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

TREE = {k: (k - 1) // 2 for k in range(1, 40)}  # child -> parent


class Hyperbolic(nn.Module):
    def __init__(self, n, d=3):
        super().__init__()
        self.place = nn.Embedding(n, d, sparse=True)
        nn.init.uniform_(self.place.weight, -0.05, 0.05)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def distance(self, a, b):
        u, v = self.place(a), self.place(b)
        gap = (u - v).square().sum(-1)
        shrink = (1 - u.square().sum(-1)) * (1 - v.square().sum(-1))
        return self.scale * torch.acosh(1 + 2 * gap / shrink)

    def forward(self, child, parent, others):
        near = self.distance(child, parent)
        far = self.distance(child[:, None].expand_as(others), others)
        logits = -torch.cat([near[:, None], far], 1)
        return F.cross_entropy(logits, torch.zeros(len(child), dtype=torch.long))


def batch(rng, size=8, negatives=3):
    child = rng.sample(sorted(TREE), size)
    parent = [TREE[c] for c in child]
    others = [[rng.choice([k for k in range(40) if k != c or rng.random() < 0.15]) for _ in range(negatives)] for c in child]
    return torch.tensor(child), torch.tensor(parent), torch.tensor(others)


torch.manual_seed(418)
torch.set_num_threads(1)
rng = random.Random(4)
model = Hyperbolic(40)
sparse = torch.optim.SparseAdam([model.place.weight], lr=2e-3)
dense = torch.optim.SGD([model.scale], lr=1e-2)
for n in range(30):
    loss = model(*batch(rng))
    for opt in (sparse, dense):
        opt.zero_grad()
    loss.backward()
    for opt in (sparse, dense):
        opt.step()
    print(n, f"{loss.item():.4f}")
