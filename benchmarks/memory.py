"""Shows that memory does not grow in a long run under the detector, with all its options on.

python benchmarks/memory.py [--steps N]
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import torch
from torch import nn

from firstnan import NaNDetector


def resident() -> float:
    """The resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


class Masked(nn.Module):
    """A layer that returns infinities on purpose: one event every step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(x > 1.0, float("-inf"))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mask, self.last = nn.Linear(16, 32), Masked(), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.mask(self.first(x)).softmax(-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = ((torch.randn(8, 16), i % 100 == 50) for i in range(options.steps))
    with NaNDetector(model, optimizer, layers=True, stats=64, on_nonfinite="skip", max_events=200) as detector:
        for i, (x, bad) in enumerate(detector.batches(batches)):
            target = -1.0 if bad else 1.0
            loss = (model(x).square().mean() + 1.0).mul(target).log()  # every hundredth step is skipped
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % (options.steps // 10) == 0:
                gc.collect()
                print(f"step {i:>6}: {resident():.1f} MB", flush=True)
    gc.collect()
    print(f"at the end: {resident():.1f} MB; {detector.summary()}")


if __name__ == "__main__":
    main()
