"""Mixture of experts with top-1 routing and an importance penalty."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def feed_forward(d):
    return nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))


class MoE(nn.Module):
    def __init__(self, d, experts):
        super().__init__()
        self.router = nn.Linear(d, experts)
        self.experts = nn.ModuleList([feed_forward(d) for _ in range(experts)])
        self.penalty = torch.zeros(())

    def forward(self, x):
        gate = F.softmax(self.router(x), -1)
        best, chosen = gate.max(-1)
        out, importance = torch.zeros_like(x), []
        for e, expert in enumerate(self.experts):
            mine = (chosen == e).nonzero().squeeze(-1)
            out = out.index_copy(0, mine, expert(x[mine]) * best[mine, None])
            importance.append(gate[mine, e].mean())
        importance = torch.stack(importance)
        self.penalty = importance.var() / importance.mean() ** 2
        return x + out


class RMSNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    def __init__(self, d=12, depth=2):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Sequential(RMSNorm(d), MoE(d, 4)) for _ in range(depth)])
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        return self.head(self.layers(x))


def main():
    torch.manual_seed(26)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(9)
    x = torch.randn(480, 12, generator=g)
    y = x[:, :3].argmax(1)
    net = Net()
    moes = [m for m in net.modules() if isinstance(m, MoE)]
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for step, (xb, yb) in enumerate(DataLoader(TensorDataset(x, y), batch_size=24)):
        loss = F.cross_entropy(net(xb), yb) + 0.02 * sum(m.penalty for m in moes)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
