"""Weather balloon soundings from a memory-mapped file, random access, no DataLoader."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

ROWS, LEVELS = 500, 12


def write_archive(path):
    rng = np.random.default_rng(44)
    archive = np.memmap(path, dtype=np.float32, mode="w+", shape=(ROWS, LEVELS + 1))
    archive[:, :LEVELS] = rng.normal(size=(ROWS, LEVELS)).cumsum(axis=1)
    archive[:, LEVELS] = archive[:, :LEVELS].mean(axis=1)
    archive[333, 9:LEVELS] = np.nan  # the balloon burst
    archive.flush()


class Reader:
    def __init__(self, path, size, seed):
        self.table = np.memmap(path, dtype=np.float32, mode="r", shape=(ROWS, LEVELS + 1))
        self.rng = np.random.default_rng(seed)
        self.size = size

    def draw(self):
        rows = self.rng.choice(ROWS, self.size, replace=False)
        block = torch.from_numpy(self.table[rows])
        return block[:, :LEVELS], block[:, LEVELS]


def main():
    torch.manual_seed(404)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "soundings.bin")
        write_archive(path)
        reader = Reader(path, size=20, seed=8)
        net = nn.Sequential(nn.Linear(LEVELS, 32), nn.Tanh(), nn.Linear(32, 1))
        opt = torch.optim.RMSprop(net.parameters(), lr=1e-3)
        losses = []
        while len(losses) < 40:
            profile, target = reader.draw()
            loss = (net(profile).squeeze(-1) - target).abs().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        print("first", losses[0], "last", losses[-1])


main()
