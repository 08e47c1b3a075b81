"""Kernel regression of yield strength on alloy composition: learned features, polynomial kernel."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(44)
torch.set_num_threads(1)


class PolynomialKernel(nn.Module):
    def __init__(self, degree=9):
        super().__init__()
        self.degree = degree
        self.log_gain = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        return (a @ b.t() * self.log_gain.exp() + 1.0) ** self.degree


class KernelRegressor(nn.Module):
    def __init__(self, d=8, feats=6, anchors=12):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(d, feats), nn.Identity())
        self.kernel = PolynomialKernel()
        self.anchors = nn.Parameter(0.1 * torch.randn(anchors, feats))
        self.alpha = nn.Parameter(0.01 * torch.randn(anchors))

    def forward(self, x):
        k = self.kernel(self.features(x), self.anchors)
        return k @ self.alpha


def alloys(n=300):
    g = torch.Generator().manual_seed(13)
    x = torch.rand(n, 8, generator=g)
    x[215, 4] = 480000.0  # ppm instead of a fraction
    return TensorDataset(x, (x[:, :4]).sum(1) + 0.05 * torch.randn(n, generator=g))


def main():
    model = KernelRegressor()
    groups = [{"params": model.features.parameters()}, {"params": [model.anchors, model.alpha], "lr": 5e-4}]
    opt = torch.optim.Adam(groups, lr=1e-3)
    step = 0
    for epoch in range(1, 3):
        for x, y in DataLoader(alloys(), batch_size=25):
            residual = model(x) - y
            loss = nn.functional.huber_loss(residual, torch.zeros_like(residual), delta=0.5)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            print(f"epoch {epoch} step {step} huber {loss.item():.5f}")


if __name__ == "__main__":
    main()
