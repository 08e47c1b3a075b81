"""Next-product prediction; only products in stock may be predicted."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

PRODUCTS = 15


class Baskets(Dataset):
    def __init__(self, n=220):
        g = torch.Generator().manual_seed(18)
        self.history = torch.randint(0, PRODUCTS, (n, 6), generator=g)
        self.stock = torch.rand(n, PRODUCTS, generator=g) < 0.7
        self.bought = torch.randint(0, PRODUCTS, (n,), generator=g)
        self.stock[torch.arange(n), self.bought] = True
        self.stock[166, self.bought[166]] = False  # sold from the shop window

    def __getitem__(self, i):
        return self.history[i], self.stock[i], self.bought[i]

    def __len__(self):
        return len(self.bought)


class Recommender(nn.Module):
    def __init__(self, d=20):
        super().__init__()
        self.embed = nn.Embedding(PRODUCTS, d)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, PRODUCTS)

    def forward(self, history, stock):
        _, h = self.rnn(self.embed(history))
        logits = self.out(h[-1])
        return logits.masked_fill(~stock, -torch.inf)


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader = model, loader
        self.opt = torch.optim.Adam(model.parameters(), lr=3e-3)
        self.losses = []

    def fit(self, epochs):
        for epoch in range(epochs):
            for history, stock, bought in self.loader:
                self.opt.zero_grad()
                logits = self.model(history, stock)
                loss = F.cross_entropy(logits, bought)
                loss.backward()
                self.opt.step()
                self.losses.append(loss.item())
            print(f"epoch {epoch}: mean loss {sum(self.losses) / len(self.losses):.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    Trainer(Recommender(), DataLoader(Baskets(), batch_size=20)).fit(2)
