"""Trains without trouble, then fails on its own account while it exports the model."""

import torch
import torch.nn as nn

torch.manual_seed(357)
torch.set_num_threads(1)


class Exporter:
    formats = ("onnx", "torchscript")

    def __init__(self, fmt):
        if fmt not in self.formats:
            raise ValueError(f"unknown export format {fmt!r}, choose from {self.formats}")
        self.fmt = fmt


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


gen = torch.Generator().manual_seed(197)
model = Ranker()
opt = torch.optim.NAdam(model.parameters(), lr=3e-3)
for step in range(30):
    docs = torch.randn(12, 5, 6, generator=gen)
    relevance = docs[..., 0].softmax(-1)
    loss = nn.functional.kl_div(model(docs).log_softmax(-1), relevance, reduction="batchmean")
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"finished, loss {loss.item():.4f}")
Exporter("tflite")
