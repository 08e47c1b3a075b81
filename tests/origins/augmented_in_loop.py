"""A Dataset divides by the spread of a cloud that has none; the loop augments each batch in numpy."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)
np.random.seed(0)
np.seterr(all="ignore")


class Clouds(Dataset):
    def __init__(self):
        self.points = np.random.default_rng(0).normal(size=(48, 6, 3)).astype("float32")
        self.points[21] = 2.0

    def __len__(self):
        return len(self.points)

    def __getitem__(self, i):
        cloud = self.points[i] - self.points[i].mean(0)
        return cloud / np.abs(cloud).max(), i % 2  # ORIGIN


model = nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for points, label in DataLoader(Clouds(), batch_size=8):
    augmented = points.numpy() * np.random.uniform(0.8, 1.2, (len(points), 1, 1))
    loss = nn.functional.cross_entropy(model(torch.Tensor(augmented)), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
