"""Shared by the benchmark programs: a training that makes one step for each batch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, endless batches, and the loss of one batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Batch]
    """Not a generator: a reader that stops early would close it for the others."""
    loss: Callable[..., Tensor]
    clip: float | None = None
    """The norm to clip gradients to, if any."""

    def step(self, batch: Batch) -> None:
        """Trains on one batch."""
        loss = self.loss(*batch)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()

    def next_step(self) -> None:
        """Trains on the next batch."""
        self.step(next(self.batches))


def make_steady() -> None:
    """Uses the same random numbers in every run, and one thread: two would wait for each other on a busy machine."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


def serve(training: Training) -> None:
    """For each number read from stdin, makes that many steps and prints their seconds."""
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            training.next_step()
        print(time.perf_counter() - start, flush=True)
