"""Colourisation net; a background thread renders previews of earlier snapshots while training goes on."""

import copy
import queue
import threading

import torch
import torch.nn as nn

torch.manual_seed(358)
torch.set_num_threads(1)


class Preview(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.jobs, self.mean_colour = queue.Queue(), []

    def run(self):
        grey = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        while (net := self.jobs.get()) is not None:
            with torch.no_grad():
                self.mean_colour.append(net(grey).mean((0, 2, 3)).tolist())


def colour_net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1), nn.Sigmoid())


def main():
    net, preview = colour_net(), Preview()
    preview.start()
    gen = torch.Generator().manual_seed(199)
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(40):
        colour = torch.rand(10, 3, 8, 8, generator=gen) * torch.tensor([1.0, 0.7, 0.4]).view(1, 3, 1, 1)
        loss = nn.functional.mse_loss(net(colour.mean(1, keepdim=True)), colour)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            preview.jobs.put(copy.deepcopy(net).eval())
    preview.jobs.put(None)
    preview.join()
    print(f"loss {loss.item():.4f}, previews {[[round(c, 2) for c in m] for m in preview.mean_colour]}")


if __name__ == "__main__":
    main()
