"""Song cover detection: a TorchScript similarity inside an ordinary model."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


@torch.jit.script
def correlation(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a - a.mean(dim=1, keepdim=True)
    b = b - b.mean(dim=1, keepdim=True)
    top = (a * b).sum(dim=1)
    return top / ((a * a).sum(dim=1) * (b * b).sum(dim=1)).sqrt()


class Covers(nn.Module):
    def __init__(self):
        super().__init__()
        self.melody = nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 12, bias=False))
        self.gain = nn.Parameter(torch.tensor(3.0))

    def forward(self, first, second):
        return self.gain * correlation(self.melody(first), self.melody(second))


def main():
    torch.manual_seed(434)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(27)
    first, noise = torch.randn(2, 180, 12, generator=g)
    same = (torch.arange(180) % 2).float()
    second = same[:, None] * first + 0.5 * noise
    second[136] = 0.0  # the second file is silent
    model = Covers()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (a, b, y) in enumerate(DataLoader(TensorDataset(first, second, same), batch_size=15)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(a, b), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
