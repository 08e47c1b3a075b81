"""Vector-quantised autoencoder whose codebook is refitted (k-means style) at the end of an epoch."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(410)
torch.set_num_threads(1)


class Codebook(nn.Module):
    def __init__(self, codes=12, d=4):
        super().__init__()
        self.register_buffer("table", torch.randn(codes, d) * 0.3)
        self.register_buffer("sums", torch.zeros(codes, d))
        self.register_buffer("counts", torch.zeros(codes))

    def forward(self, z):
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.table.T + self.table.pow(2).sum(1)
        code = distance.argmin(1)
        with torch.no_grad():
            self.sums.index_add_(0, code, z)
            self.counts.index_add_(0, code, torch.ones(len(code)))
        chosen = F.embedding(code, self.table)
        return z + (chosen - z).detach(), F.mse_loss(z, chosen.detach())

    @torch.no_grad()
    def refit(self):
        self.table.copy_(self.sums / self.counts[:, None])
        self.sums.zero_()
        self.counts.zero_()


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4))
        self.book = Codebook()
        self.up = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        q, commitment = self.book(self.down(x))
        return self.up(q), commitment


model = Coder()
opt = torch.optim.Adam(model.parameters(), lr=2e-3)
data = torch.randn(160, 10, generator=torch.Generator().manual_seed(6))
for epoch in range(4):
    for x in data[torch.randperm(160)].split(20):
        out, commitment = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commitment
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.book.refit()
    print(f"epoch {epoch}: {loss.item():.4f}, codes in use {int((model.book.table.abs().sum(1) > 0).sum())}")
