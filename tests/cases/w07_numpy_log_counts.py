"""Word-count features: log counts in numpy, then a torch DataLoader."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
rng = np.random.default_rng(0)
counts = rng.poisson(9.0, (96, 7)).clip(1)
counts[42, 3] = 0
np.seterr(all="ignore")


def features(c):
    total = c.sum(1, keepdims=True)
    logs = np.log(c / total)
    return logs.astype(np.float32)


X = torch.from_numpy(features(counts))
Y = torch.from_numpy((counts[:, 0] > 9).astype("int64"))
net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(2):
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=12):
        loss = nn.functional.cross_entropy(net(x - x.mean(1, keepdim=True)), y)
        opt.zero_grad(); loss.backward(); opt.step()
    print(epoch, loss.item())
