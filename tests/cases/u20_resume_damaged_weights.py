"""Fine-tunes a tabular encoder from a weights file that was converted from another framework."""

import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn

torch.manual_seed(320)
torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(9, 20)
        self.hidden = nn.ModuleList([nn.Linear(20, 20) for _ in range(2)])

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return x


class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(20, 2)

    def forward(self, x):
        return self.head(self.encoder(x))


def converted_weights(path):
    """the file as the conversion tool left it"""
    rng = np.random.default_rng(73)
    shapes = {k: tuple(v.shape) for k, v in Encoder().state_dict().items()}
    arrays = {k: (0.2 * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}
    arrays["hidden.1.weight"].view(np.uint32)[4, 11] = 0x7FC00001  # flipped bits
    np.savez(path, **arrays)


def load_encoder(model, path):
    with np.load(path) as stored:
        state = {k: torch.from_numpy(stored[k]) for k in stored.files}
    model.encoder.load_state_dict(state)


with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "encoder.npz")
    converted_weights(file)
    model = Tuned()
    load_encoder(model, file)

gen = torch.Generator().manual_seed(79)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(15):
    x = torch.randn(16, 9, generator=gen)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
