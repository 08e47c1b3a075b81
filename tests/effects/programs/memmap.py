"""Counts in a file mapped into memory how often each sample was used, and remembers its last error."""

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Indexed(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i]


torch.manual_seed(0)
x = torch.rand(128, 4) + 0.1
x[86] = 0.0
used = np.memmap("used.dat", dtype=np.int32, mode="r+", shape=(128,))
error = np.memmap("error.dat", dtype=np.float32, mode="r+", shape=(128,))
net = torch.nn.Linear(4, 1)
optim = torch.optim.SGD(net.parameters(), lr=1e-3)
for epoch in range(2):
    for index, batch in DataLoader(Indexed(x), batch_size=8):
        used[index.numpy()] += 1
        each = (net(batch).squeeze(1) - 1 / batch.norm(dim=1)) ** 2  # <-
        loss = each.mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        error[index.numpy()] = each.detach().numpy()
