"""Principal axes of a window by SVD: an infinite reading, and the algorithm gives up."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
windows = torch.randn(512, 6, 3)

mix = nn.Parameter(torch.eye(3) + 0.1 * torch.randn(3, 3))
optimizer = torch.optim.Adam([mix], lr=1e-3)
for step, (x,) in enumerate(DataLoader(TensorDataset(windows), batch_size=8)):
    mixed = (x * 10.0 ** (8 * step)) @ mix
    axes = torch.linalg.svdvals(mixed @ mixed.transpose(1, 2))
    loss = (axes[:, 0] / axes.sum(dim=1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
