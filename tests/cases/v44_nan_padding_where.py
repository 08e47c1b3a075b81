"""Glucose curves of different lengths: NaN marks what is missing and is taken out before any arithmetic."""

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

torch.manual_seed(444)
torch.set_num_threads(1)


def collate(curves):
    return pad_sequence(curves, batch_first=True, padding_value=float("nan"))


class Fill(nn.Module):
    def __init__(self):
        super().__init__()
        self.default = nn.Parameter(torch.zeros(1))
        self.net = nn.GRU(2, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, curve):
        missing = curve.isnan()
        filled = torch.where(missing, self.default, curve)
        h, _ = self.net(torch.stack([filled, missing.float()], -1))
        return self.out(h).squeeze(-1)


g = torch.Generator().manual_seed(9)
curves = [torch.randn(int(n), generator=g).cumsum(0) * 0.3 for n in torch.randint(4, 15, (150,), generator=g)]
model = Fill()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
typical = []
for curve in DataLoader(curves, batch_size=10, collate_fn=collate):
    predicted = model(curve)[:, :-1]
    error = predicted - curve[:, 1:]
    loss = torch.nanmean(error[~error.isnan()].square())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    typical.append(torch.nanmedian(curve).item())
    worst = curve.max().item()
    print(f"loss {loss.item():.4f} median {typical[-1]:.3f} max {worst}")
