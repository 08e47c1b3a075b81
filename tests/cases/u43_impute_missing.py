"""Patient risk from lab values with gaps: missing values become zero plus an indicator column."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(343)
torch.set_num_threads(1)


class Labs(Dataset):
    def __init__(self, n=240):
        gen = torch.Generator().manual_seed(137)
        full = torch.randn(n, 8, generator=gen)
        self.risk = (full[:, 0] - full[:, 3] > 0).float()
        self.x = full.masked_fill(torch.rand(n, 8, generator=gen) < 0.3, float("nan"))
        self.x[17] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.risk[i]


class Impute(nn.Module):
    def forward(self, x):
        return torch.cat([torch.nan_to_num(x, nan=0.0), torch.isnan(x).float()], dim=-1)


model = nn.Sequential(Impute(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 1))
opt = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(4):
    total = 0.0
    for x, risk in DataLoader(Labs(), batch_size=24, shuffle=True):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), risk)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    print(f"epoch {epoch} loss {total / 10:.4f}")
