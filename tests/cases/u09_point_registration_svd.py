"""Point cloud registration: soft correspondences, then the Procrustes rotation by SVD."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(309)
torch.set_num_threads(1)


class Procrustes(nn.Module):
    def forward(self, a, b, weight):
        w = weight.unsqueeze(-1)
        cross = (w * a).transpose(1, 2) @ b
        u, _, vh = torch.linalg.svd(cross)
        return u @ vh


class Register(nn.Module):
    def __init__(self):
        super().__init__()
        self.trust = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
        self.align = Procrustes()

    def forward(self, a, b):
        weight = torch.sigmoid(self.trust(torch.cat([a, b], -1))).squeeze(-1)
        return self.align(a, b, weight)


def scans(n=96, points=10):
    gen = torch.Generator().manual_seed(29)
    a = torch.randn(n, points, 3, generator=gen)
    q, _ = torch.linalg.qr(torch.randn(n, 3, 3, generator=gen))
    b = a @ q + 0.1 * torch.randn(n, points, 3, generator=gen)
    outlier = torch.rand(n, points, generator=gen) < 0.2
    b[outlier] = torch.randn(int(outlier.sum()), 3, generator=gen)
    a[61] = 0.0  # nothing within range of the scanner
    return TensorDataset(a, b, q)


net = Register()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(2):
    for n, (a, b, q) in enumerate(DataLoader(scans(), batch_size=12)):
        rot = net(a, b)
        loss = (rot - q).square().sum((1, 2)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{epoch}.{n} rotation error {loss.item():.4f}")
