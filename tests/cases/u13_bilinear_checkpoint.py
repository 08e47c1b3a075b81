"""Fine-grained recognition: bilinear pooling with signed square root, blocks recomputed in backward."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(313)
torch.set_num_threads(1)


class BilinearPool(nn.Module):
    def forward(self, f):
        f = f.flatten(2)
        gram = f @ f.transpose(1, 2) / f.shape[-1]
        signed = torch.sign(gram) * torch.sqrt(torch.abs(gram))
        return F.normalize(signed.flatten(1))


class Birds(nn.Module):
    def __init__(self, classes=4, ch=6):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, bias=False)
        self.mid = nn.Conv2d(ch, ch, 3, bias=False)
        self.pool = BilinearPool()
        self.fc = nn.Linear(ch * ch, classes)

    def tail(self, x):
        return self.pool(torch.tanh(self.mid(x)))

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return self.fc(checkpoint(self.tail, x, use_reentrant=True))


def crops(n=120):
    gen = torch.Generator().manual_seed(41)
    x = torch.randn(n, 1, 10, 10, generator=gen)
    x[52] = 0.0  # box outside of the photograph
    return TensorDataset(x, torch.randint(0, 4, (n,), generator=gen))


def main():
    net = Birds()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for epoch in range(2):
        for i, (x, y) in enumerate(DataLoader(crops(), batch_size=12)):
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if i % 3 == 0:
                print(f"epoch {epoch} batch {i} {loss.item():.4f}")


if __name__ == "__main__":
    main()
