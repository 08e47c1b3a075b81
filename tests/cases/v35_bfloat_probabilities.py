"""Outlier detector; probabilities are kept in bfloat16 and the loss is written with them."""

import torch
from torch import nn
from tqdm import tqdm

torch.manual_seed(435)
torch.set_num_threads(1)


class Detector(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d, 32), nn.Linear(32, 32), nn.Linear(32, 1)])

    def forward(self, x):
        *hidden, last = self.layers
        for layer in hidden:
            x = torch.relu(layer(x))
        return last(x).squeeze(1).to(torch.bfloat16).sigmoid()


def batches(gen, count=70):
    for _ in range(count):
        clean = torch.randn(12, 8, generator=gen)
        odd = torch.randn(4, 8, generator=gen) * 2 + 1.5
        yield torch.cat([clean, odd]), torch.cat([torch.zeros(12), torch.ones(4)])


detector = Detector()
opt = torch.optim.Adam(detector.parameters(), lr=1e-2)
bar = tqdm(batches(torch.Generator().manual_seed(50)), total=70, disable=True)
for x, odd in bar:
    p = detector(x)
    loss = -(
        odd * torch.log(p + 1e-6)
        + (1 - odd)
        * torch.log(1 - p)
    ).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    bar.set_postfix(loss=f"{loss.item():.3f}")
print("final", loss.item())
