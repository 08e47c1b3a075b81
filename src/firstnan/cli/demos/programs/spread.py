"""standard deviation of one sample: the last, short batch of an epoch in a self-supervised loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(10)
torch.set_num_threads(1)

encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.02)


def views(x):
    return x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)


def loss_of(a, b):
    """Pulls two views of a sample together and keeps the samples of a batch apart."""
    close = nn.functional.mse_loss(a, b)
    spread = torch.relu(1.0 - a.std(dim=0)).mean() + torch.relu(1.0 - b.std(dim=0)).mean()
    return close + spread


samples = torch.randn(129, 12)
for epoch in range(2):
    for x in DataLoader(samples, batch_size=16, shuffle=True):
        a, b = views(x)
        loss = loss_of(encoder(a), encoder(b))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}, last batch {len(x)}")
