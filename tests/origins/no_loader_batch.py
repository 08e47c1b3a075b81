"""nanoGPT-like loop without a loader: get_batch; row with zero weights sum."""
import torch
from torch import nn

torch.manual_seed(0)
N = 300
prices = torch.rand(N, 10) + 0.5
volumes = torch.randint(0, 5, (N, 10)).float()
volumes[123] = 0
target = torch.rand(N)
order = torch.randperm(N)


def get_batch(i):
    at = order[i * 10 : (i + 1) * 10]
    return prices[at], volumes[at], target[at]


model = nn.Linear(1, 1)
opt = torch.optim.SGD(model.parameters(), 0.01)
for i in range(30):
    p, v, y = get_batch(i)
    vwap = (p * v).sum(1) / v.sum(1)  # ORIGIN
    loss = (model(vwap[:, None]).squeeze(1) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
