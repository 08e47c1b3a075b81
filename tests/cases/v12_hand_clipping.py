"""Linear ranking of search results with a margin loss; gradient clipping and update written out by hand."""

import torch
from torch import nn

torch.manual_seed(412)
torch.set_num_threads(1)
MAX_NORM = 0.5


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(6, 12), nn.LeakyReLU(), nn.Linear(12, 1))

    def forward(self, better, worse):
        return (self.score(better) - self.score(worse)).squeeze(1)


def pairs(steps, size=4):
    g = torch.Generator().manual_seed(33)
    for _ in range(steps):
        a, b = torch.randn(2, size, 6, generator=g)
        swap = (a[:, :2].sum(1) < b[:, :2].sum(1))[:, None]
        yield torch.where(swap, b, a), torch.where(swap, a, b)


def shrink(parameters):
    grads = [p.grad for p in parameters if p.grad is not None]
    total = sum(g.pow(2).sum() for g in grads).sqrt()
    scale = torch.minimum(MAX_NORM / total, 1 / total)
    for g in grads:
        g *= scale
    return total


ranker = Ranker()
optimizer = torch.optim.SGD(ranker.parameters(), lr=0.1)
done = 0
for better, worse in pairs(80):
    loss = torch.relu(0.2 - ranker(better, worse)).mean()
    optimizer.zero_grad()
    loss.backward()
    size = shrink(list(ranker.parameters()))
    optimizer.step()
    done += 1
    if done % 10 == 0:
        print(f"{done}: loss {loss.item():.4f} gradient {size.item():.4f}")
