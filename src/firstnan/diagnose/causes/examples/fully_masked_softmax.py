"""Attention over padded words: one sentence has no word at all."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
words = torch.randn(512, 5, 8)
label = torch.randint(0, 2, (512,))
padding = torch.arange(5) >= torch.randint(1, 6, (512, 1))
padding[50] = True  # an empty sentence

query, head = nn.Linear(8, 1), nn.Linear(8, 2)
optimizer = torch.optim.Adam([*query.parameters(), *head.parameters()], lr=1e-2)
for step, (x, mask, y) in enumerate(DataLoader(TensorDataset(words, padding, label), batch_size=8)):
    scores = query(x).squeeze(2).masked_fill(mask, float("-inf"))
    attention = torch.softmax(scores, dim=1)
    pooled = (attention.unsqueeze(2) * x).sum(dim=1)
    loss = nn.functional.cross_entropy(head(pooled), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
