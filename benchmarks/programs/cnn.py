"""A small CNN on random 32x32 images from a DataLoader; prints the seconds of each step when BENCH_TIMES is set."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, BATCH = 10, 32


def layer(inside: int, outside: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2))


def make_model() -> nn.Sequential:
    return nn.Sequential(layer(3, 32), layer(32, 64), layer(64, 128), nn.Flatten(), nn.Linear(128 * 4 * 4, CLASSES))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    images, labels = torch.randn(BATCH * 8, 3, 32, 32), torch.randint(0, CLASSES, (BATCH * 8,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True)


def endless(loader: DataLoader[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    for _ in itertools.count():
        yield from loader


def make_step() -> Callable[[], None]:
    """One training step on the next batch, ready to be called."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = make_model(), endless(make_loader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        image, label = next(batches)
        loss = nn.functional.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    """Makes as many steps as each line of standard input says, and answers with their seconds."""
    step = make_step()
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
