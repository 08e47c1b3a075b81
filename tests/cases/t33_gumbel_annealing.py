"""Discrete autoencoder with Gumbel-softmax codes whose temperature is annealed linearly."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(53)
torch.set_num_threads(1)


class Quantiser(nn.Module):
    def __init__(self, codes=16, d=8):
        super().__init__()
        self.book = nn.Parameter(torch.randn(codes, d))
        self.tau = 1.0

    def forward(self, logits):
        onehot = F.gumbel_softmax(logits, tau=self.tau)
        return onehot @ self.book


class DiscreteAE(nn.Module):
    def __init__(self, d=15):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 16))
        self.quantiser = Quantiser()
        self.dec = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, d))

    def forward(self, x):
        return self.dec(self.quantiser(self.enc(x)))


class Annealer:
    def __init__(self, module, start, rate):
        self.module, self.start, self.rate, self.calls = module, start, rate, 0

    def step(self):
        self.calls += 1
        self.module.tau = max(self.start - self.rate * self.calls, 0.0)


def main():
    x = torch.randn(160, 15, generator=torch.Generator().manual_seed(62))
    model = DiscreteAE()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    anneal = Annealer(model.quantiser, start=1.0, rate=1 / 16)
    done = 0
    for _ in range(3):
        for (batch,) in DataLoader(TensorDataset(x), batch_size=16):
            loss = F.mse_loss(model(batch), batch)
            opt.zero_grad()
            loss.backward()
            opt.step()
            anneal.step()
            done += 1
            if done % 3 == 0:
                print(f"updates {done} tau {model.quantiser.tau:.3f} reconstruction {loss.item():.4f}")


if __name__ == "__main__":
    main()
