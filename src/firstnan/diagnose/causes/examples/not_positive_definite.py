"""A two-dimensional Gaussian with a predicted correlation: above 1 its covariance is not positive definite."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
weather = torch.randn(512, 4) * 0.3
wind = torch.randn(512, 2)
weather[42] *= 30.0  # a storm

model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(DataLoader(TensorDataset(weather, wind), batch_size=8)):
    r = model(x).squeeze(1)
    one = torch.ones_like(r)
    root = torch.linalg.cholesky(torch.stack([one, r, r, one], dim=1).view(-1, 2, 2))
    white = torch.linalg.solve_triangular(root, y.unsqueeze(2), upper=False)
    loss = (white**2).sum(dim=1).mean() / 2 + root.diagonal(dim1=1, dim2=2).log().sum(dim=1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
