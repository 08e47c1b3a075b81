"""float16 overflow: similarities of unnormalised embeddings, multiplied by a learned temperature."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(4)
torch.set_num_threads(1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(64, 32)
        self.text = nn.Linear(48, 32)
        self.log_scale = nn.Parameter(torch.tensor(4.6))

    def forward(self, pixels, words):
        similarity = self.image(pixels) @ self.text(words).T
        return similarity * self.log_scale.exp()


pixels = torch.randn(160, 64)
words = torch.randn(160, 48)
pixels[90] *= 1000.0  # one picture was stored in raw counts

model = TwoTowers()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step, (p, w) in enumerate(DataLoader(TensorDataset(pixels, words), batch_size=16)):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(p, w)
        labels = torch.arange(len(p))
        loss = nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(logits.T, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
