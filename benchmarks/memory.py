"""Shows that memory does not grow in a long run under the detector, and how much a trace takes at its peak.

    python benchmarks/memory.py [--steps N]
    python benchmarks/memory.py --trace

The first trains N steps under a detector with all its options on. The second runs a wide recurrent network (30,000
operators a step, written by hand) and a transformer: bare, in a `trace()` block, and under `firstnan run --trace`, each
in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import firstnan
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


class Recurrent(nn.Module):
    def __init__(self, wide: int = 1024) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wide, wide) / wide)
        self.scale, self.bias = nn.Parameter(torch.ones(1, wide)), nn.Parameter(torch.zeros(wide))

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], len(self.bias))
        for i in range(x.shape[1]):
            h = torch.tanh(h @ self.weight + x[:, i : i + 1] * self.scale + self.bias)
        return h


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "recurrent": (Recurrent, (8, 2000)),
    "transformer": (transformer, (16, 256, 256)),
}


def train(program: str, *, traced: bool, steps: int = 2) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    make, shape = PROGRAMS[program]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with firstnan.trace() if traced else contextlib.nullcontext():
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(shape)).square().mean().backward()
            optimizer.step()
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) // 1024)


def show_trace() -> None:
    print("peak in MB      bare   trace()   firstnan run --trace")
    for program in PROGRAMS:
        itself = [__file__, "--train", program]
        ways = [itself, [*itself, "--traced"], ["-m", "firstnan", "run", "--trace", *itself]]
        peaks = [subprocess.run([sys.executable, *way], stdout=subprocess.PIPE, check=True).stdout for way in ways]
        print(f"{program:<12} {int(peaks[0]):>7} {int(peaks[1]):>9} {int(peaks[2]):>22}", flush=True)


def show_detector(steps: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = ((torch.randn(8, 16), i % 100 == 50) for i in range(steps))
    with NaNDetector(model, optimizer, layers=True, stats=64, on_nonfinite="skip", max_events=200) as detector:
        for i, (x, bad) in enumerate(detector.batches(batches)):
            target = -1.0 if bad else 1.0
            loss = (model(x).square().mean() + 1.0).mul(target).log()  # every hundredth step is skipped
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % (steps // 10) == 0:
                gc.collect()
                print(f"step {i:>6}: {resident():.1f} MB", flush=True)
    gc.collect()
    print(f"at the end: {resident():.1f} MB; {detector.summary()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trace", action="store_true", help="the peak of traced programs instead")
    parser.add_argument("--train", choices=PROGRAMS, help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, traced=options.traced)
    elif options.trace:
        show_trace()
    else:
        show_detector(options.steps)


if __name__ == "__main__":
    main()
