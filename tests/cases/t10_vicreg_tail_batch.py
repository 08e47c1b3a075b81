"""Self-supervised pre-training with variance and invariance terms; the last batch of an epoch is smaller."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def augment(x, g):
    keep = (torch.rand(x.shape, generator=g) > 0.15).float()
    return x * keep + 0.05 * torch.randn(x.shape, generator=g)


class Projector(nn.Module):
    def __init__(self, d=14, width=40, out=12):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, width), nn.LayerNorm(width), nn.ReLU())
        self.expander = nn.Sequential(nn.Linear(width, out))

    def forward(self, x):
        return self.expander(self.encoder(x))


class VarianceInvariance(nn.Module):
    def __init__(self, gamma=1.0, weight=0.5):
        super().__init__()
        self.gamma, self.weight = gamma, weight

    def spread(self, z):
        deviation = z.std(dim=0)
        return F.relu(self.gamma - deviation).mean()

    def forward(self, a, b):
        return F.mse_loss(a, b) + self.weight * (self.spread(a) + self.spread(b))


def pretrain(samples=181, batch=15, epochs=2):
    torch.manual_seed(33)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(4)
    data = TensorDataset(torch.randn(samples, 14, generator=g))
    net, criterion = Projector(), VarianceInvariance()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    log = []
    for epoch in range(epochs):
        for (x,) in DataLoader(data, batch_size=batch):
            loss = criterion(net(augment(x, g)), net(augment(x, g)))
            opt.zero_grad()
            loss.backward()
            opt.step()
            log.append(loss.item())
        print(f"epoch {epoch}: first {log[0]:.4f} last {log[-1]:.4f}")


pretrain()
