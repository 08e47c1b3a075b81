"""BYOL-style training with an EMA teacher; raises when the loss is not finite."""
import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class NonFiniteLoss(RuntimeError):
    pass


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 6, 3, bias=False), nn.ReLU(), nn.Conv2d(6, 8, 3, bias=False), nn.ReLU())
        self.proj = nn.Linear(8, 10, bias=False)

    def forward(self, x):
        return self.proj(self.conv(x).mean((2, 3)))


def unit(v):
    return v / v.norm(dim=-1, keepdim=True)


class BYOL(nn.Module):
    def __init__(self, momentum=0.98):
        super().__init__()
        self.online = Encoder()
        self.predictor = nn.Linear(10, 10)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.momentum = momentum

    def forward(self, view1, view2):
        p = unit(self.predictor(self.online(view1)))
        with torch.no_grad():
            z = unit(self.target(view2))
        return 2 - 2 * (p * z).sum(-1).mean()

    @torch.no_grad()
    def update_target(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.lerp_(o, 1 - self.momentum)


def crops(x, g):
    """A random 10x10 window of every image."""
    top, left = torch.randint(0, 7, (2,), generator=g).tolist()
    return x[:, :, top: top + 10, left: left + 10]


def train():
    torch.manual_seed(65)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(3)
    images = torch.rand(192, 1, 16, 16, generator=g)
    images[124] = 0.0  # lens cap
    byol = BYOL()
    opt = torch.optim.SGD([p for p in byol.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for step, (x,) in enumerate(DataLoader(TensorDataset(images), batch_size=16)):
        loss = byol(crops(x, g), crops(x, g))
        if not torch.isfinite(loss):
            raise NonFiniteLoss(f"loss became {loss.item()} at iteration {step}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        byol.update_target()
        print(f"it {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
