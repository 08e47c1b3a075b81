"""log of zero: a hand-written cross entropy, and a sigmoid that has reached exactly 1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)


class Churn(nn.Module):
    """Predicts whether a customer leaves, from six columns of a billing system."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return torch.sigmoid(self.body(x)).squeeze(1)


def cross_entropy(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()


customers = torch.randn(512, 6)
leaves = (customers[:, 0] > 0.5).float()
customers[300, 0] = 900.0  # an invoice in cents among invoices in thousands
leaves[300] = 1.0

model = Churn()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y) in enumerate(DataLoader(TensorDataset(customers, leaves), batch_size=32)):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
