"""Object heading from radar tracks with float16 autocast and gradient scaling; new tracks start at rest."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Heading(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 16)
        self.velocity = nn.Linear(16, 2, bias=False)

    def forward(self, track):
        v = self.velocity(torch.relu(self.mix(track))).float()
        speed = v.square().sum(1, keepdim=True).sqrt()
        return v / (speed + 1e-3)


def tracks(n=400, parked_from=150):
    g = torch.Generator().manual_seed(55)
    x = torch.randn(n, 6, generator=g)
    x[parked_from::10] = 0.0
    return TensorDataset(x, nn.functional.normalize(x[:, :2]))


def main():
    torch.manual_seed(423)
    torch.set_num_threads(1)
    model = Heading()
    nn.init.zeros_(model.mix.bias)
    model.mix.bias.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step, (track, heading) in enumerate(DataLoader(tracks(), batch_size=10)):
        with torch.autocast("cpu", dtype=torch.float16):
            direction = model(track)
        loss = 1 - (direction * heading).sum(1).mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 3 == 0:
            print(f"{step} loss {loss.item():.4f} scale {scaler.get_scale():g}")


main()
