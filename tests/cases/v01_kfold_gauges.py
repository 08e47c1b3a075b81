"""Five-fold cross-validation of a river level model; every fold has its own scaling, model and optimizer."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(401)
torch.set_num_threads(1)
N, D, FOLDS, EPOCHS = 120, 6, 5, 2


def measurements():
    gen = torch.Generator().manual_seed(17)
    x = torch.randn(N, D, generator=gen)
    level = x @ torch.randn(D, 1, generator=gen) + 0.1 * torch.randn(N, 1, generator=gen)
    x[:, 4] = 0.0
    x[48:72, 4] = torch.rand(24, generator=gen)  # a gauge that was only installed for one season
    return x, level


def standardise(train, test):
    centre = train.mean(0)
    width = train.std(0)
    return (train - centre) / width, (test - centre) / width.clamp_min(1e-6)


def fit(x, y):
    net = nn.Sequential(nn.Linear(D, 16), nn.SiLU(), nn.Linear(16, 1))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for _ in range(EPOCHS):
        for xb, yb in zip(x.split(32), y.split(32), strict=True):
            loss = F.smooth_l1_loss(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
    return net, loss


x, y = measurements()
parts = torch.arange(N).chunk(FOLDS)
scores = []
for fold, test in enumerate(parts):
    train = torch.cat([p for k, p in enumerate(parts) if k != fold])
    x_train, x_test = standardise(x[train], x[test])
    net, last = fit(x_train, y[train])
    with torch.no_grad():
        scores.append(F.l1_loss(net(x_test), y[test]).item())
    print(f"fold {fold}: last loss {last:.4f}, test error {scores[-1]:.4f}")
print("mean error", sum(scores) / FOLDS)
