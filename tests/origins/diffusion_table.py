"""A diffusion model; its table of loss weights ends in 0/0, and only a sample that draws the last step reads it."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Blobs(Dataset):
    """Mirrors half of its samples by chance, so making a batch draws random numbers."""

    def __init__(self):
        self.rows = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i] if np.random.rand() < 0.5 else -self.rows[i]


class Diffusion(nn.Module):
    def __init__(self, steps=60):
        super().__init__()
        self.net = nn.Linear(3, 2)
        kept = torch.linspace(1, 0, steps)
        snr = kept / (1 - kept + 1e-3)
        self.register_buffer("kept", kept)
        self.register_buffer("weight", snr.clamp(max=5.0) / snr)  # ORIGIN

    def forward(self, clean):
        t = torch.randint(0, len(self.kept), (len(clean),))
        kept, noise = self.kept[t].unsqueeze(1), torch.randn_like(clean)
        guess = self.net(torch.cat([kept * clean + (1 - kept) * noise, kept], 1))
        return (((guess - noise) ** 2).mean(1) * self.weight[t]).mean()  # READ


def endless(loader):
    while True:
        yield from loader


torch.manual_seed(5)
np.random.seed(0)
model = Diffusion()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
batches = endless(DataLoader(Blobs(), batch_size=8, shuffle=True))
for step in range(40):
    for _ in range(2):
        x = next(batches)
        loss = model(x) / 2
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
