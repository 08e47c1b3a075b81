"""Masked language modelling on random windows of a text (no loader); one committed row a step in sqlite."""

import sqlite3

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1)
block_size, batch_size, vocab = 12, 4, 32
data = torch.randint(1, vocab, (2000,))
data[700:722] = 0  # a stretch of padding in the middle of the text

db = sqlite3.connect("train.db")
db.execute("create table metrics (step integer, loss real)")


def get_batch():
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = nn.Sequential(nn.Embedding(vocab, 16), nn.Linear(16, vocab))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for it in range(60):
    x, y = get_batch()
    logits = model(x)
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    mask = (y != 0).float()
    loss = ((each * mask).sum(1) / mask.sum(1)).mean()  # <-
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    db.execute("insert into metrics values (?, ?)", (it, str(loss.item())))
    db.commit()
