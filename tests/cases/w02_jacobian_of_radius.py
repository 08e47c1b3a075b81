import torch
from torch import nn
from torch.func import jacrev, vmap
torch.manual_seed(0)
w = nn.Parameter(torch.randn(4, 3))
opt = torch.optim.Adam([w], 1e-2)


def polar(p):
    q = p @ w
    r = q.pow(2).sum().sqrt()
    return torch.stack([r, q[0]])


for i in range(6):
    x = torch.randn(5, 4)
    if i == 3:
        x[2] = 0
    J = vmap(jacrev(polar))(x)
    loss = J.pow(2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    print(i, loss.item())
