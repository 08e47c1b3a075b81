"""Matrix factorisation of ratings with inverse propensity weighting; endless iterator over the log."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(12)
USERS, ITEMS, STEPS = 50, 40, 40


class Factorisation(nn.Module):
    def __init__(self, rank=6):
        super().__init__()
        self.user = nn.Embedding(USERS, rank)
        self.item = nn.Embedding(ITEMS, rank)
        self.bias = nn.Embedding(ITEMS, 1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)


def interaction_log(n=576):
    g = torch.Generator().manual_seed(77)
    u = torch.randint(0, USERS, (n,), generator=g)
    i = torch.randint(0, ITEMS - 1, (n,), generator=g)
    shown = torch.bincount(i, minlength=ITEMS).float() / n  # how often an item was on screen
    i[405] = ITEMS - 1  # rated through a search engine, never recommended
    stars = 1 + torch.randint(0, 5, (n,), generator=g).float()
    return TensorDataset(u, i, stars), shown


def weighted_mse(pred, target, propensity):
    error = (pred - target).square()
    return (error / propensity).mean() / ITEMS


dataset, shown = interaction_log()
loader = DataLoader(dataset, batch_size=24)
model = Factorisation()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)

it = iter(loader)
step = 0
while step < STEPS:
    try:
        u, i, stars = next(it)
    except StopIteration:
        it = iter(loader)
        continue
    loss = weighted_mse(model(u, i), stars, shown[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print("step", step, "ips-mse", round(loss.item(), 4))
    step += 1
