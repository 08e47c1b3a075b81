"""Small real training runs for the tests of the detector, and what there is to compare afterwards."""

from __future__ import annotations

import copy
import linecache
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from firstnan.records import Report

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """With everything that a step changes: weights, running statistics, and random numbers where asked for."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return out


class Rooted(nn.Module):
    """Its derivative is infinite where the input is zero; its output is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x).abs().sqrt().sum(1)  # born: derivative in the model


def seeded(dropout: float = 0.0, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def batches(count: int = 6, size: int = 4, seed: int = 1) -> list[Batch]:
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=made), torch.rand(size, 1, generator=made) + 0.5) for _ in range(count)]


def with_bad_target(given: list[Batch], *which: int, value: float = -1.0) -> list[Batch]:
    """Targets whose logarithm does not exist, in these batches."""
    return [(x, torch.full_like(y, value) if i in which else y) for i, (x, y) in enumerate(given)]


def state_of(model: nn.Module, *holders: Any) -> dict[str, Any]:
    """Copies of all that training changes: parameters, buffers, and the state of optimizers and schedulers."""
    state: dict[str, Any] = {f"model.{name}": t.detach().clone() for name, t in model.state_dict().items()}
    for i, holder in enumerate(holders):
        state |= _flat(f"{type(holder).__name__} {i}", holder.state_dict())
    return state


def randomness() -> dict[str, Any]:
    name, words, *rest = np.random.get_state()  # type: ignore[misc]
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, words.tolist(), *rest),  # type: ignore[union-attr]
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Where two states are not the same to the last bit (a NaN equals a NaN)."""
    common = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in common if not same(one[name], other[name])})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        both_nan = one.isnan() & other.isnan() if one.is_floating_point() and one.shape == other.shape else one != one
        return one.shape == other.shape and one.dtype == other.dtype and bool(((one == other) | both_nan).all())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _flat(path: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for name, item in value.items() for k, v in _flat(f"{path}.{name}", item).items()}
    return {path: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)}


def birthplace(report: Report | None) -> str:
    """What the comment `# born: ...` on the blamed line says; the line itself where there is none."""
    assert report is not None
    assert report.origin is not None, report
    site = report.origin.site
    assert site is not None, report.origin
    line = linecache.getline(site.file, site.line).strip()
    return line.partition("# born: ")[2] or line
