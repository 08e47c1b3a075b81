"""RealNVP density model of turbine readings, maximum likelihood with Adam."""
import argparse
import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip, self.half = flip, dim // 2
        self.net = nn.Sequential(nn.Linear(self.half, hidden), nn.ReLU(), nn.Linear(hidden, 2 * (dim - self.half)))

    def forward(self, x):
        a, b = x[:, : self.half], x[:, self.half:]
        if self.flip:
            a, b = b, a
        log_scale, shift = self.net(a).chunk(2, dim=1)
        b = b * log_scale.exp() + shift
        out = torch.cat([b, a] if self.flip else [a, b], 1)
        return out, log_scale.sum(1)


class RealNVP(nn.Module):
    def __init__(self, dim=6, hidden=32, depth=4):
        super().__init__()
        self.couplings = nn.ModuleList([Coupling(dim, hidden, bool(k % 2)) for k in range(depth)])

    def forward(self, x):
        logdet = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, ld = coupling(x)
            logdet = logdet + ld
        return x, logdet

    def nll(self, x):
        z, logdet = self(x)
        prior = -0.5 * (z * z + math.log(2 * math.pi)).sum(1)
        return -(prior + logdet).mean()


def readings(n):
    g = torch.Generator().manual_seed(15)
    base = torch.randn(n, 6, generator=g)
    base[:, 1] = base[:, 0] * 0.6 + 0.3 * base[:, 1]
    base[n - 70, :3] = torch.tensor([-350.0, 900.0, 410.0])
    return TensorDataset(base)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--n", type=int, default=450)
    p.add_argument("--batch", type=int, default=30)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=21)
    args = p.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    flow = RealNVP()
    opt = torch.optim.Adam(flow.parameters(), lr=args.lr)
    for step, (x,) in enumerate(DataLoader(readings(args.n), batch_size=args.batch)):
        loss = flow.nll(x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"{step:3d} nll {loss.item():.4f}")


if __name__ == "__main__":
    main()
