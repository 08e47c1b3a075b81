"""Crop yield and protein from satellite bands: a saved tensor file, dict samples, two heads, one of them patchy."""

import io

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


def make_file():
    g = torch.Generator().manual_seed(71)
    bands = torch.rand(160, 7, generator=g)
    fields = {"bands": bands, "yield": bands.sum(1), "protein": bands[:, :3].prod(1) * 10}
    fields["protein"][106] = float("nan")  # the laboratory sent no result
    buffer = io.BytesIO()
    torch.save(fields, buffer)
    buffer.seek(0)
    return buffer


class Fields(Dataset):
    def __init__(self, file):
        self.data = torch.load(file, weights_only=True)

    def __len__(self):
        return len(self.data["bands"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.data.items()}


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(7, 20), nn.ELU())
        self.heads = nn.ModuleDict({"yield": nn.Linear(20, 1), "protein": nn.Linear(20, 1)})

    def forward(self, sample):
        z = self.trunk(sample["bands"])
        return {name: head(z).squeeze(1) for name, head in self.heads.items()}


torch.manual_seed(405)
torch.set_num_threads(1)
model = TwoHeads()
optimizer = torch.optim.Adam(
    [{"params": model.trunk.parameters()}, {"params": model.heads.parameters(), "lr": 1e-2}], lr=3e-3
)
loader = DataLoader(Fields(make_file()), batch_size=12)
for epoch in range(2):
    total = 0.0
    for sample in loader:
        predicted = model(sample)
        losses = {name: nn.functional.huber_loss(p, sample[name]) for name, p in predicted.items()}
        loss = losses["yield"] + 0.3 * losses["protein"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.4f}")
