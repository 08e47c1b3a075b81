"""Regression with batch norm; one bad row (index 333: a negative number under a log) poisons the whole batch."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        amount, rest = x[:, :1], x[:, 1:]
        features = torch.cat([torch.log(amount), rest], dim=1)  # ORIGIN
        return self.body(features).squeeze(1)


def main():
    torch.manual_seed(4)
    x = torch.rand(512, 6) + 0.1
    x[333, 0] = -0.02
    y = x.sum(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for epoch in range(4):
        for xb, yb in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(xb), yb)
            loss.backward()
            optimizer.step()


main()
