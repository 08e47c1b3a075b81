"""Recommender: a user is the gate-weighted average of the items in the history."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(306)
torch.set_num_threads(1)
ITEMS, LEN = 60, 7


class HistoryPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate = nn.Linear(dim, 1)

    def forward(self, items, present):
        weight = torch.sigmoid(self.gate(items)).squeeze(-1) * present
        total = weight.sum(1, keepdim=True)
        share = torch.nan_to_num(weight / total)
        return (share.unsqueeze(-1) * items).sum(1)


class Recommender(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.items = nn.Embedding(ITEMS, dim)
        self.pool = HistoryPool(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, ITEMS))

    def forward(self, history, present):
        return self.mlp(self.pool(self.items(history), present))


def logs(users=256):
    gen = torch.Generator().manual_seed(9)
    start = torch.randint(0, ITEMS - LEN - 1, (users, 1), generator=gen)
    history = start + torch.arange(LEN)
    present = (torch.arange(LEN) >= torch.randint(0, LEN, (users, 1), generator=gen)).float()
    present[179] = 0.0  # signed up a minute ago
    return TensorDataset(history, present, history[:, -1] + 1)


model = Recommender()
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(3):
    losses = []
    for history, present, bought in DataLoader(logs(), batch_size=16):
        logits = model(history, present)
        loss = F.cross_entropy(logits, bought)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    print(f"epoch {epoch}: first {losses[0]:.3f} last {losses[-1]:.3f}")
