"""Step-based training from an endless iterator over a split of a wrapped dataset, two workers."""
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Spectra(Dataset):
    def __init__(self, n=120):
        g = torch.Generator().manual_seed(3)
        self.raw = torch.rand(n, 24, generator=g)
        self.raw[64] = 0
        self.y = torch.rand(n, generator=g)

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        return self.raw[i], self.y[i]


class Transformed(Dataset):
    """Applies a transform to a subset, so that both halves can have different ones."""

    def __init__(self, subset, transform):
        self.subset, self.transform = subset, transform

    def __len__(self):
        return len(self.subset)

    def __getitem__(self, i):
        x, y = self.subset[i]
        return self.transform(x), y


def unit_area(x):
    area = x.sum()
    return x / area  # ORIGIN


def endless(loader):
    while True:
        yield from loader


def main():
    torch.manual_seed(0)
    first, second = random_split(Spectra(), [100, 20], generator=torch.Generator().manual_seed(2))
    assert 64 in first.indices
    batches = endless(DataLoader(Transformed(first, unit_area), batch_size=10, shuffle=True, num_workers=2))
    model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for step in range(40):
        x, y = next(batches)
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
