"""Time series forecaster (GRU) whose learning rate is raised at every step in search of the best one."""
import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def windows(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    t = torch.arange(length + 1) * 0.3
    series = torch.sin(t + phase) + 0.1 * torch.randn(n, length + 1, generator=g)
    return TensorDataset(series[:, :-1, None], series[:, -1:])


class Forecaster(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.mlp(out[:, -1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--factor", type=float, default=1.35)
    parser.add_argument("--batch-size", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(47)
    torch.set_num_threads(1)
    net = Forecaster(args.hidden)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: args.factor ** k)
    loader = DataLoader(windows(512, 12, 5), batch_size=args.batch_size, shuffle=True)
    step = 0
    for _ in range(5):
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            opt.step()
            sched.step()
            print(f"step {step} lr {sched.get_last_lr()[0]:.4g} mse {loss.item():.4g}")
            step += 1


if __name__ == "__main__":
    main()
