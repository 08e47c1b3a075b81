"""Unit vectors by hand: one embedding is the zero vector."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
words = torch.rand(512, 12)
topic = torch.randint(0, 4, (512,))
words[46] = 0.0  # a document without a known word

embed = nn.Linear(12, 8, bias=False)
head = nn.Linear(8, 4)
optimizer = torch.optim.Adam([*embed.parameters(), *head.parameters()], lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(words, topic), batch_size=8)):
    vector = embed(x)
    unit = vector / vector.norm(dim=1, keepdim=True)
    loss = nn.functional.cross_entropy(head(unit), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
