"""Trains on batches that are taken in the way named on the command line; one sample is negative."""

import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler
from tqdm import tqdm

WAY = sys.argv[1]
BAD = 21  # in batch 5 of 10
torch.manual_seed(3)
random.seed(4)
numpy.random.seed(5)

rows = torch.rand(40, 4) + 1
if not WAY.startswith("chance"):
    rows[BAD, 2] = -0.5


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(rows)

    def __getitem__(self, index: int) -> Any:
        x = rows[index]
        if WAY == "augment":
            x = x * (1 + 0.1 * torch.rand(4)) + random.random() * 0.01
            x = x + torch.from_numpy(numpy.random.rand(4)).float() * 0.01
        return x, x.sum()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((x, x.sum()) for x in rows)


class Backwards(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))

    def __len__(self) -> int:
        return 40


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(torch.log(x)).squeeze(1)  # <-


def batches() -> Any:
    options: dict[str, Any] = {"batch_size": 4, "shuffle": WAY == "shuffle"}
    if WAY in ("workers", "persistent"):
        options |= {"num_workers": 2, "persistent_workers": WAY == "persistent"}
    if WAY == "sampler":
        options = {"batch_size": 4, "sampler": Backwards()}
    if WAY == "batch_sampler":
        options = {"batch_sampler": BatchSampler(SequentialSampler(Rows()), 4, drop_last=True)}
    loader = DataLoader(Stream() if WAY == "stream" else Rows(), **options)
    if WAY == "enumerate":
        return (batch for _, batch in enumerate(loader))
    if WAY == "tqdm":
        return tqdm(loader)
    if WAY == "islice":
        return itertools.islice(loader, 8)
    if WAY == "islice_last":
        return itertools.islice(loader, 6)
    if WAY == "chain":
        return itertools.chain(DataLoader(Rows(), batch_size=4, sampler=range(8)), loader)
    if WAY == "cycle":
        return itertools.islice(itertools.cycle(loader), 30)
    if WAY == "zip":
        return (x for x, _ in zip(loader, DataLoader(Rows(), batch_size=2), strict=False))
    if WAY == "next":
        return by_hand(iter(loader))
    return loader


def by_hand(it: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            batch = next(it)
        except StopIteration:
            return
        yield batch


def chance() -> float:
    """Now and then something that makes the logarithm's argument negative."""
    draw = {"chance_torch": lambda: torch.rand(()).item(), "chance_numpy": numpy.random.rand, "chance": random.random}
    return 3.0 if draw[WAY]() > 0.9 else 0.0


def evaluate() -> None:
    net.eval()
    with torch.no_grad():
        for x, _ in DataLoader(Rows(), batch_size=20):
            net(x.abs())
    net.train()


net = Net()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
step = 0
for epoch in range(2):
    for x, y in batches():
        if WAY == "persistent" and epoch == 0:
            x = x.abs()
        if WAY.startswith("chance"):
            x = x - chance()
        if (x < 0).any():
            print("negative", step)
        optimizer.zero_grad()
        # The running statistics as they were before this batch: a replay that does not put them back reads NaN here.
        drift = net.body[1].running_mean.square().sum() if WAY == "statistics" else 0.0
        loss = (net(x) - y).square().mean() + drift
        loss.backward()
        optimizer.step()
        if WAY == "scheduler":
            scheduler.step()
        if WAY == "break" and step == 5:
            break
        if WAY == "evaluate" and step % 2 == 1:
            evaluate()
        step += 1
