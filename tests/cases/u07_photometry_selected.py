"""Galaxy photometry: magnitudes of a predicted spectrum, scored only in the bands that were observed."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(307)
torch.set_num_threads(1)
BANDS = 5


class Survey(Dataset):
    def __init__(self, n=180):
        gen = torch.Generator().manual_seed(19)
        self.z = torch.randn(n, 6, generator=gen)
        self.aperture = 0.5 + torch.rand(n, BANDS, generator=gen)
        self.aperture[101, 4] = 0.0  # the detector of that band was off
        self.mag = 20.0 + torch.randn(n, BANDS, generator=gen)
        self.seen = self.aperture > 0

    def __len__(self):
        return len(self.z)

    def __getitem__(self, i):
        return self.z[i], self.aperture[i], self.mag[i], self.seen[i]


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, BANDS))

    def forward(self, z):
        return nn.functional.softplus(self.body(z)) + 1e-3


def magnitude_error(flux, mag, seen):
    predicted = 22.5 - 2.5 * torch.log10(flux)
    residual = predicted - mag
    return residual[seen].pow(2).mean()


model = Spectrum()
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Survey(), batch_size=15)
it = iter(loader)
step = 0
while step < 30:
    try:
        z, aperture, mag, seen = next(it)
    except StopIteration:
        it = iter(loader)
        continue
    loss = magnitude_error(model(z) * aperture, mag, seen)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step:2d}  mag^2 {loss.item():.3f}")
    step += 1
