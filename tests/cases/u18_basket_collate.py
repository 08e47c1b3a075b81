"""Basket value prediction: the collate function averages the product vectors of each basket."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(318)
torch.set_num_threads(1)
CATALOGUE = torch.randn(80, 12, generator=torch.Generator().manual_seed(61))


class Baskets(Dataset):
    def __init__(self, n=168):
        gen = torch.Generator().manual_seed(67)
        sizes = torch.randint(1, 9, (n,), generator=gen).tolist()
        sizes[100] = 0  # everything was taken out again before paying
        self.baskets = [torch.randint(0, 80, (s,), generator=gen) for s in sizes]

    def __len__(self):
        return len(self.baskets)

    def __getitem__(self, i):
        return self.baskets[i]


def collate(baskets):
    pooled = [CATALOGUE[b].mean(0) for b in baskets]
    return {
        "vector": torch.stack(pooled),
        "count": torch.tensor([[float(len(b))] for b in baskets]),
        "value": torch.tensor([float(CATALOGUE[b, 0].exp().sum()) for b in baskets]),
    }


class ValueNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(13, 32), nn.ELU())
        self.value = nn.Linear(32, 1)

    def forward(self, vector, count):
        return self.value(self.inner(torch.cat([vector, count], 1))).squeeze(1)


net = ValueNet()
huber = nn.HuberLoss(delta=2.0)
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
loader = DataLoader(Baskets(), batch_size=12, collate_fn=collate)
for epoch in range(2):
    for i, batch in enumerate(loader):
        loss = huber(net(batch["vector"], batch["count"]), batch["value"])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if i % 4 == 0:
            print(f"[{epoch}:{i}] huber {loss.item():.4f}")
