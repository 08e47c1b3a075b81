"""Full-batch GNN without a loader; one node (17) has a zero feature vector that is normalised in forward."""
import torch
from torch import nn
import torch.nn.functional as F


class SageLayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.own, self.near = nn.Linear(i, o), nn.Linear(i, o)

    def forward(self, x, edge_index):
        src, dst = edge_index
        total = torch.zeros_like(x).index_add(0, dst, x[src])
        degree = torch.zeros(x.size(0)).index_add(0, dst, torch.ones(dst.numel())).clamp(min=1)
        return self.own(x) + self.near(total / degree[:, None])


class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = SageLayer(10, 16), SageLayer(16, 4)

    def forward(self, x, edge_index):
        x = x / x.norm(dim=1, keepdim=True)  # ORIGIN
        x = F.relu(self.a(x, edge_index))
        return self.b(x, edge_index)


torch.manual_seed(0)
nodes = 80
x = torch.randn(nodes, 10)
x[17] = 0
edge_index = torch.randint(0, nodes, (2, 300))
y = torch.randint(0, 4, (nodes,))
model = Sage()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(50):
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
