"""Rating regression; the logged correlation and relative error are undefined on some batches."""

from collections import deque

import torch
import torch.nn as nn

torch.manual_seed(344)
torch.set_num_threads(1)


def correlation(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a * b).sum() / (a.norm() * b.norm())


def relative_error(pred, y):
    return ((pred - y).abs() / y.abs()).mean()


class Rater(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 6), nn.Embedding(30, 6)
        self.bias = nn.Parameter(torch.tensor(3.0))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias


gen = torch.Generator().manual_seed(139)
model = Rater()
opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
recent = deque(maxlen=5)
for step in range(30):
    u, i = torch.randint(0, 30, (2, 16), generator=gen)
    rating = torch.full((16,), 4.0) if step % 7 == 3 else torch.randint(0, 6, (16,), generator=gen).float()
    pred = model(u, i)
    loss = (pred - rating).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    recent.append({"r": correlation(pred.detach(), rating), "rel": relative_error(pred.detach(), rating)})
    if step % 6 == 3:
        print(f"step {step} loss {loss.item():.3f} r {recent[-1]['r']:.3f} relative {recent[-1]['rel']:.3f}")
