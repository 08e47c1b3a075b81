"""Class-incremental learning: the classifier gets new rows when new classes arrive."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.use_deterministic_algorithms(True)
torch.manual_seed(321)
torch.set_num_threads(1)


class GrowingHead(nn.Module):
    def __init__(self, d, classes):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(classes, d))

    def grow(self, extra):
        old = self.weight.data
        new = old.new_empty(len(old) + extra, old.shape[1])
        new[: len(old)] = old
        self.weight = nn.Parameter(new)

    def forward(self, h):
        return F.linear(h, self.weight)


class Learner(nn.Module):
    def __init__(self, d=10, hidden=24, classes=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(d, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh())
        self.head = GrowingHead(hidden, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def task(prototypes, classes, gen, size=18):
    y = torch.randint(0, classes, (size,), generator=gen)
    return prototypes[y] + 0.5 * torch.randn(size, prototypes.shape[1], generator=gen), y


def main():
    gen = torch.Generator().manual_seed(83)
    prototypes = torch.randn(5, 10, generator=gen)
    learner = Learner()
    for classes in (3, 5):
        if classes > len(learner.head.weight):
            learner.head.grow(classes - len(learner.head.weight))
        opt = torch.optim.SGD(learner.parameters(), lr=0.1)
        for i in range(8):
            x, y = task(prototypes, classes, gen)
            loss = F.cross_entropy(learner(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"{classes} classes, batch {i}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
