"""GCN, full batch, symmetric normalisation with one isolated node; built once before training."""
import torch
from torch import nn
import torch.nn.functional as F


def normalised_adjacency(edges, n):
    a = torch.zeros(n, n)
    a[edges[0], edges[1]] = 1.0
    a[edges[1], edges[0]] = 1.0
    degree = a.sum(1)
    inv_sqrt = degree.pow(-0.5)  # ORIGIN
    return inv_sqrt[:, None] * a * inv_sqrt[None, :]


class GCN(nn.Module):
    def __init__(self, inputs, hidden, classes):
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, classes)

    def forward(self, x, a):
        x = F.relu(a @ self.first(x))  # READ
        return a @ self.second(x)


def main():
    torch.manual_seed(3)
    n = 60
    edges = torch.randint(0, n - 1, (2, 200))
    edges = edges[:, edges[0] != edges[1]]
    features = torch.randn(n, 8)
    labels = torch.randint(0, 3, (n,))
    train = torch.arange(n) < 40
    adjacency = normalised_adjacency(edges, n)
    model = GCN(8, 16, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(30):
        optimizer.zero_grad()
        out = model(features, adjacency)
        loss = F.cross_entropy(out[train], labels[train])
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
