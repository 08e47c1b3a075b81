"""Two recordings concatenated, then a Subset; a division in __getitem__ of the second (its own index 9)."""
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset


class Recording(Dataset):
    def __init__(self, name, n, silent=()):
        g = torch.Generator().manual_seed(len(name))
        self.name, self.waves = name, torch.randn(n, 20, generator=g)
        for i in silent:
            self.waves[i] = 0

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, i):
        wave = self.waves[i]
        peak = wave.abs().max()
        return wave / peak, wave.mean()  # ORIGIN


torch.manual_seed(0)
whole = ConcatDataset([Recording("monday", 50), Recording("tue", 30, silent=[9])])
training = Subset(whole, [i for i in range(80) if i % 5])
model = nn.Sequential(nn.Linear(20, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for wave, level in DataLoader(training, batch_size=8, shuffle=True):
        loss = nn.functional.mse_loss(model(wave).squeeze(1), level)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
