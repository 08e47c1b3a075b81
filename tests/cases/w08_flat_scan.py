"""Images min-max scaled by numpy inside a transform object."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class MinMax:
    def __call__(self, img):
        lo, hi = img.min(), img.max()
        return (img - lo) / (hi - lo)


class Compose:
    def __init__(self, *fs):
        self.fs = fs

    def __call__(self, x):
        for f in self.fs:
            x = f(x)
        return x


class Scans(Dataset):
    def __init__(self, transform):
        self.raw = np.random.default_rng(21).integers(0, 255, (40, 6, 6)).astype(np.float32)
        self.raw[12] = 17
        self.transform = transform

    def __len__(self):
        return len(self.raw)

    def __getitem__(self, i):
        return self.transform(self.raw[i]), i % 2


np.seterr(all="ignore")
torch.manual_seed(21)
net = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
opt = torch.optim.SGD(net.parameters(), 0.1)
ds = Scans(Compose(MinMax(), torch.from_numpy))
for ep in range(2):
    for x, y in DataLoader(ds, batch_size=8):
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
    print(ep, loss.item())
