"""EEG decoding: covariance of filtered channels, matrix logarithm, linear classifier."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class LogEig(nn.Module):
    """matrix logarithm through the eigenvalue decomposition"""

    def forward(self, spd):
        values, vectors = torch.linalg.eigh(spd)
        return vectors @ torch.diag_embed(values.log()) @ vectors.transpose(-1, -2)


class SPDNet(nn.Module):
    def __init__(self, channels=6, kept=4, classes=2, floor=1e-3):
        super().__init__()
        self.spatial = nn.Linear(channels, kept, bias=False)
        self.logeig = LogEig()
        self.head = nn.Linear(kept * kept, classes)
        self.register_buffer("floor", floor * torch.eye(kept))

    def forward(self, x):
        y = self.spatial(x.transpose(1, 2))
        cov = y.transpose(1, 2) @ y / x.shape[-1]
        return self.head(self.logeig(cov + self.floor).flatten(1))


def trials(n=160):
    gen = torch.Generator().manual_seed(31)
    label = torch.randint(0, 2, (n,), generator=gen)
    gain = torch.ones(n, 6, 1)
    gain[label == 1, 2] = 2.5
    x = gain * torch.randn(n, 6, 40, generator=gen)
    x[117] = 0.0  # cap came off
    return TensorDataset(x, label)


def fit():
    torch.manual_seed(310)
    torch.set_num_threads(1)
    net = SPDNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    order = torch.randperm(160, generator=torch.Generator().manual_seed(2)).tolist()
    loader = DataLoader(trials(), batch_size=16, sampler=order)
    for epoch in range(2):
        right = 0
        for x, label in loader:
            logits = net(x)
            loss = nn.functional.cross_entropy(logits, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            right += int((logits.argmax(1) == label).sum())
        print(f"epoch {epoch} accuracy {right / 160:.2f}")


if __name__ == "__main__":
    fit()
