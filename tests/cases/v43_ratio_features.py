"""Company distress from ratios: divisions by zero become infinite and are clamped before training."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Balance(Dataset):
    def __init__(self, n=160):
        g = torch.Generator().manual_seed(23)
        self.assets = torch.rand(n, generator=g) + 0.1
        self.debt = torch.rand(n, generator=g)
        self.debt[::9] = 0.0
        self.profit = torch.randn(n, generator=g)
        self.profit[::27] = 0.0

    def __len__(self):
        return len(self.debt)

    def __getitem__(self, i):
        cover = self.profit[i] / self.debt[i]
        leverage = (self.assets[i] / self.debt[i]).log()
        x = torch.stack([cover, leverage, self.assets[i]])
        return torch.nan_to_num(x, nan=0.0).clamp(-5, 5), (self.profit[i] < self.debt[i]).float()


class Distress(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("lowest", torch.full((3,), float("inf")))
        self.register_buffer("highest", torch.full((3,), float("-inf")))
        self.net = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        if self.training:
            self.lowest = torch.minimum(self.lowest, x.detach().amin(0))
            self.highest = torch.maximum(self.highest, x.detach().amax(0))
        return self.net((x - self.lowest) / (self.highest - self.lowest + 1e-6)).squeeze(1)


def main():
    torch.manual_seed(443)
    torch.set_num_threads(1)
    model = Distress()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for x, y in DataLoader(Balance(), batch_size=16, shuffle=True, num_workers=1):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item(), model.lowest.tolist())


if __name__ == "__main__":
    main()
