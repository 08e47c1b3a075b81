"""learning rate too large: matrix factorisation that grows step by step until it overflows."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
torch.set_num_threads(1)


class Factors(nn.Module):
    def __init__(self, users, films, rank):
        super().__init__()
        self.user = nn.Embedding(users, rank)
        self.film = nn.Embedding(films, rank)
        self.bias = nn.Embedding(films, 1)

    def forward(self, user, film):
        return (self.user(user) * self.film(film)).sum(dim=1) + self.bias(film).squeeze(1)


users, films = torch.randint(0, 40, (2048,)), torch.randint(0, 30, (2048,))
stars = 1.0 + 4.0 * torch.rand(2048)
model = Factors(40, 30, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.5)
loader = DataLoader(TensorDataset(users, films, stars), batch_size=128, shuffle=True)

for epoch in range(3):
    for user, film, star in loader:
        loss = ((model(user, film) - star) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.4g}")
