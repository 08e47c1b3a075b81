"""Recommender; a feature overflows in numpy, in a row of the first batch, and spoils running statistics."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

np.seterr(all="ignore")


def recency(age):
    return np.exp(-age / 30.0)  # ORIGIN


class Visits(Dataset):
    def __init__(self, n=96):
        rng = np.random.default_rng(0)
        age = rng.uniform(0, 100, n)
        age[5] = -86400.0
        self.rows = np.stack([rng.normal(size=n), recency(age)], 1).astype("float32")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, k):
        return {"x": self.rows[k], "y": np.float32(k % 2)}


class Standardise(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.var.lerp_(x.var(0, unbiased=False), 0.1)  # READ
        return (x - self.mean) / torch.sqrt(self.var + 1e-6)


torch.manual_seed(0)
model = nn.Sequential(Standardise(2), nn.Linear(2, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(Visits(), batch_size=16):
    loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
    opt.zero_grad()
    loss.backward()
    opt.step()
