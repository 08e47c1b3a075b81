"""Cloud cover from sky photographs: two worker processes crop at random; batches are drawn by a sampler object."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class SkyPhotos(Dataset):
    """Photographs with an alpha channel; the colour of a crop is the average over its opaque pixels."""

    def __init__(self, n=96):
        g = torch.Generator().manual_seed(61)
        self.colour = torch.rand(n, 3, 16, 16, generator=g)
        self.alpha = torch.ones(n, 1, 16, 16)
        self.alpha[40::11, :, :7, :7] = 0.0  # rotated photographs have transparent corners
        self.cover = self.colour.mean((1, 2, 3)).sub(0.5).mul(20).sigmoid()

    def __len__(self):
        return len(self.cover)

    def __getitem__(self, i):
        size = random.randint(5, 9)
        top, left = random.randrange(16 - size), random.randrange(16 - size)
        crop = self.colour[i, :, top : top + size, left : left + size]
        opaque = self.alpha[i, :, top : top + size, left : left + size]
        mean = (crop * opaque).sum((1, 2)) / opaque.sum()
        spread = crop.flatten(1).std(1)
        return torch.cat([mean, spread]), self.cover[i]


class ChunkSampler:
    """Yields lists of indices: neighbouring photographs stay together."""

    def __init__(self, n, size):
        self.chunks = [list(range(k, min(k + size, n))) for k in range(0, n, size)]

    def __iter__(self):
        return iter(self.chunks)

    def __len__(self):
        return len(self.chunks)


def main():
    random.seed(3)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    photos = SkyPhotos()
    loader = DataLoader(photos, batch_sampler=ChunkSampler(len(photos), 8), num_workers=2)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = 0
    for epoch in range(2):
        for features, cover in loader:
            loss = F.binary_cross_entropy_with_logits(model(features).squeeze(1), cover)
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
            step += 1


SEED = 443

if __name__ == "__main__":
    main()
