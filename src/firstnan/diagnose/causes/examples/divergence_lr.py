"""Matrix factorisation with a learning rate that is far too large: the loss squares itself every step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
users = torch.randint(0, 20, (512,))
films = torch.randint(0, 30, (512,))
stars = torch.randint(1, 6, (512,)).float()

taste, style = nn.Embedding(20, 8), nn.Embedding(30, 8)
optimizer = torch.optim.SGD([*taste.parameters(), *style.parameters()], lr=3.0)
for step, (u, f, y) in enumerate(DataLoader(TensorDataset(users, films, stars), batch_size=8)):
    predicted = (taste(u) * style(f)).sum(dim=1)
    loss = ((predicted - y) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
