"""What the programs are made of; importing a module of this folder adds its programs to `PROGRAMS`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name of the trade
from torch import Tensor, nn


class DivergedError(Exception):
    """A loss or gradient is not finite."""


Step = Callable[[int], None]


@dataclass
class Training:
    models: dict[str, nn.Module]
    optimizers: list[Any]
    step: Step


SEEN: dict[tuple[int, str], list[float]] = {}
"""Losses and gradient norms of each optimizer."""


def update(optimizer: Any, loss: Tensor, clip: float | None = None, scaler: Any = None) -> None:
    """One update, if loss and gradients are finite."""
    if not math.isfinite(loss.item()):
        raise DivergedError
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 1:
            raise DivergedError
        return
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    SEEN.setdefault((id(optimizer), "loss"), []).append(loss.item())
    SEEN.setdefault((id(optimizer), "norm"), []).append(norm.item())
    if any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in parameters):
        raise DivergedError
    if clip is not None:
        nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    if not all(bool(torch.isfinite(v).all()) for v in kept):
        raise DivergedError


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    return nn.Sequential(*[part for i, o in pairwise(sizes) for part in (nn.Linear(i, o), act())][:-1])


@dataclass(frozen=True)
class Program:
    name: str
    diverges: bool
    steps: int
    make: Callable[[], Training]


PROGRAMS: list[Program] = []


def program(name: str, steps: int, *, diverges: bool = False) -> Callable[[Any], Any]:
    def add(make: Callable[[], Training]) -> Callable[[], Training]:
        PROGRAMS.append(Program(name, diverges, steps, make))
        return make

    return add


def regression(model: nn.Module, optimizer: Any, *, noise: float = 0.1, scale: float = 1.0, **more: Any) -> Training:
    x = torch.randn(512, 10)
    y = x.sum(1, keepdim=True) * scale

    def step(t: int) -> None:
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.mse_loss(model(x[rows]), y[rows] + noise * torch.randn(32, 1)), **more)

    return Training({"": model}, [optimizer], step)


def classification(model: nn.Module, optimizer: Any, *, before: Step = lambda t: None, **more: Any) -> Training:
    x = torch.randn(512, 10)
    y = x[:, :3].argmax(1)

    def step(t: int) -> None:
        before(t)
        rows = torch.randint(0, 512, (32,))
        update(optimizer, F.cross_entropy(model(x[rows]), y[rows]), **more)

    return Training({"": model}, [optimizer], step)


def rate(optimizer: Any, of: Callable[[int], float]) -> Step:
    def before(t: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = of(t)

    return before
