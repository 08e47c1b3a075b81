"""Differentially private training: per-sample gradients are clipped to a length, noise is added."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

torch.manual_seed(442)
torch.set_num_threads(1)
LIMIT, NOISE = 0.8, 0.05
net = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)


def hinge(weights, x, y):
    return torch.relu(0.5 - y * functional_call(net, weights, (x[None],)).squeeze())


each = vmap(grad(hinge), in_dims=(None, 0, 0))
gen = torch.Generator().manual_seed(1)
nothing = 0
for step in range(50):
    x = torch.randn(8, 5, generator=gen)
    y = torch.sign(x[:, 0] - x[:, 2])
    weights = {k: p.detach() for k, p in net.named_parameters()}
    grads = each(weights, x, y)
    length = sum(g.flatten(1).square().sum(1) for g in grads.values()).sqrt()
    nothing += int((length == 0).sum())
    factor = (LIMIT / length).clamp(max=1.0)
    for name, p in net.named_parameters():
        p.grad = torch.einsum("b,b...->...", factor, grads[name]) / len(x) + NOISE * torch.randn_like(p) / len(x)
    opt.step()
with torch.no_grad():
    print("wrong", int((net(x).squeeze(1).sign() != y).sum()), "samples without a gradient", nothing)
