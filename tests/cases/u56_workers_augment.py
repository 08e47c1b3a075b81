"""Image classification with augmenting workers, shuffling, dropout and batch norm."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, n=192):
        gen = torch.Generator().manual_seed(193)
        self.y = torch.randint(0, 3, (n,), generator=gen)
        self.x = 0.3 * torch.randn(n, 1, 8, 8, generator=gen)
        self.x[self.y == 1, :, 2:6, 2:6] += 1.0
        self.x[self.y == 2, :, :, 3:5] += 1.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if torch.rand(()) < 0.5:
            x = x.flip(-1)
        return (x - x.mean()) / (x.std() + 1e-5), self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(128, 3))

    def forward(self, x):
        return self.fc(self.conv(x))


def main():
    torch.manual_seed(356)
    torch.set_num_threads(1)
    net = Net()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    loader = DataLoader(Shapes(), batch_size=24, shuffle=True, num_workers=2)
    for epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
