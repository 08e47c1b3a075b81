"""Contrastive training of a bird-song encoder; positives are clips of the same species inside a batch."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(14)
SPECIES = 30


def clips(n=240):
    g = torch.Generator().manual_seed(6)
    species = torch.randint(0, SPECIES, (n,), generator=g)
    song = torch.randn(SPECIES, 18, generator=g)
    return TensorDataset(song[species] + 0.5 * torch.randn(n, 18, generator=g), species)


class SongEncoder(nn.Sequential):
    def __init__(self, d=18, out=8):
        super().__init__(nn.Linear(d, 32), nn.LayerNorm(32), nn.ELU(), nn.Linear(32, out))

    def forward(self, x):
        return F.normalize(super().forward(x), dim=-1)


def contrast(z, species, margin=0.4):
    sim = z @ z.t()
    same = species[:, None].eq(species[None, :])
    same.fill_diagonal_(False)
    other = species[:, None].ne(species[None, :])
    pull = (1 - sim[same]).mean()
    push = F.relu(sim[other] - margin).mean()
    return pull + push


encoder = SongEncoder()
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.8)
data = clips()
order = RandomSampler(data, generator=torch.Generator().manual_seed(2))
loader = DataLoader(data, batch_sampler=BatchSampler(order, batch_size=10, drop_last=True))
step = 0
for epoch in range(2):
    for x, species in loader:
        loss = contrast(encoder(x), species)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"[{epoch}] {step}: contrast {loss.item():.4f}")
        step += 1
