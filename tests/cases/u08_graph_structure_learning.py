"""Graph classification with learned edge weights and symmetric degree normalisation."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(308)
torch.set_num_threads(1)


class EdgeScorer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, adj):
        return torch.sigmoid(self.q(x) @ self.k(x).transpose(1, 2)) * adj


class Propagate(nn.Module):
    def forward(self, x, weight):
        degree = weight.sum(-1)
        scale = degree.rsqrt().masked_fill(degree == 0, 0.0)
        return scale.unsqueeze(-1) * (weight @ (scale.unsqueeze(-1) * x))


class GraphNet(nn.Module):
    def __init__(self, d=8, classes=3):
        super().__init__()
        self.edges = EdgeScorer(d)
        self.spread = Propagate()
        self.lin = nn.ModuleDict({"self": nn.Linear(d, 24), "near": nn.Linear(d, 24)})
        self.out = nn.Linear(24, classes)

    def forward(self, x, adj):
        near = self.spread(x, self.edges(x, adj))
        h = F.elu(self.lin["self"](x) + self.lin["near"](near))
        return self.out(h.mean(1))


def graphs(count, nodes=6):
    gen = torch.Generator().manual_seed(23)
    x = torch.randn(count, nodes, 8, generator=gen)
    adj = torch.ones(count, nodes, nodes) - torch.eye(nodes)
    drop = (torch.rand(count, nodes, nodes, generator=gen) < 0.2).float().triu(1)
    adj = adj * (1 - drop - drop.transpose(1, 2))
    lonely = (adj.sum(-1) == 0).any(1)
    adj[lonely] = 1.0
    adj[97, 2, :] = adj[97, :, 2] = 0.0  # an atom without bonds: counter ion
    return x, adj, torch.randint(0, 3, (count,), generator=gen)


def train(epochs=2, size=14):
    x, adj, y = graphs(140)
    net = GraphNet()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for lo in range(0, len(y), size):
            part = slice(lo, lo + size)
            loss = F.cross_entropy(net(x[part], adj[part]), y[part])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


train()
