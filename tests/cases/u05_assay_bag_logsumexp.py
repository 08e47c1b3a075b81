"""Multiple-instance learning: a molecule is active if any of its conformers is (smooth maximum)."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

torch.manual_seed(305)
torch.set_num_threads(1)
SLOTS = 6


class ConformerBags(IterableDataset):
    def __init__(self, bags, seed):
        self.bags, self.seed = bags, seed

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed)
        for n in range(self.bags):
            filled = int(torch.randint(1, SLOTS + 1, (1,), generator=gen))
            if n == 134:
                filled = 0  # the embedding of this molecule failed
            pad = torch.zeros(SLOTS)
            pad[filled:] = float("-inf")
            x = torch.randn(SLOTS, 10, generator=gen)
            active = float((x[:filled, 0] > 0.9).any()) if filled else 0.0
            yield x, pad, active


class MILScorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(10, 32), nn.Linear(32, 32)])
        self.score = nn.Linear(32, 1)

    def forward(self, x, pad):
        for layer in self.encoder:
            x = torch.relu(layer(x))
        logits = self.score(x).squeeze(-1) + pad
        pooled = torch.logsumexp(logits, dim=1)
        return torch.where(torch.isinf(pooled), torch.full_like(pooled, -4.0), pooled)


def run():
    model = MILScorer()
    criterion = nn.BCEWithLogitsLoss()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for n, (x, pad, active) in enumerate(DataLoader(ConformerBags(200, 40 + epoch), batch_size=16)):
            loss = criterion(model(x, pad), active.float())
            opt.zero_grad()
            loss.backward()
            opt.step()
            if n % 4 == 0:
                print("epoch", epoch, "batch", n, "bce", round(loss.item(), 4))


run()
