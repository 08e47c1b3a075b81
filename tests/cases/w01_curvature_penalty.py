"""Curvature penalty with torch.func.hessian of an energy that has |x|^1.5."""
import torch
from torch import nn
from torch.func import hessian, vmap

torch.manual_seed(14)
scale = nn.Parameter(torch.tensor([1.0, 0.5]))
opt = torch.optim.Adam([scale], 1e-2)


def energy(x):
    return ((scale * x).abs() ** 1.5).sum()


curvature = vmap(hessian(energy))
for it in range(8):
    x = torch.randn(6, 2)
    if it == 4:
        x[3, 0] = 0.0
    H = curvature(x)
    loss = (H.diagonal(dim1=1, dim2=2).sum(1) - 1).pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(it, loss.item())
