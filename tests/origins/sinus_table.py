"""Character model; positional table with a bad divisor in __init__ (buffer)."""
import math

import torch
from torch import nn
import torch.nn.functional as F


class SinusoidalPositions(nn.Module):
    def __init__(self, width, longest):
        super().__init__()
        position = torch.arange(longest, dtype=torch.float32).unsqueeze(1)
        half = torch.arange(0, width, 2, dtype=torch.float32)
        wavelength = position / half  # ORIGIN
        table = torch.zeros(longest, width)
        table[:, 0::2] = torch.sin(wavelength)
        table[:, 1::2] = torch.cos(wavelength)
        self.register_buffer("table", table)

    def forward(self, x):
        return x + self.table[: x.size(1)]  # READ


class CharModel(nn.Module):
    def __init__(self, vocabulary=30, width=16):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = SinusoidalPositions(width, 64)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        h = self.positions(self.embed(ids))
        return self.head(torch.tanh(self.mix(h)))


def main():
    torch.manual_seed(0)
    model = CharModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    text = torch.randint(0, 30, (4000,))
    for step in range(20):
        at = torch.randint(0, 3900, (8,))
        x = torch.stack([text[i : i + 32] for i in at])
        y = torch.stack([text[i + 1 : i + 33] for i in at])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
