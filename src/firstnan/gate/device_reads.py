"""Scalars on a device, read together: once a step, or one step late and without waiting for the device."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from firstnan.records import Noticed
from firstnan.tensors.finite import read_all

_MOST_IN_FLIGHT = 4
LATE = (
    "detected one step late: this policy does not synchronise with the device; on_nonfinite='raise' and 'skip' check "
    "before the update and can show where the value originated"
)
"""The note in a report about a value that was read after the update."""


class ExtraValues(Protocol):
    """Another source of scalars to include in the same read."""

    def collect(self) -> list[Tensor]: ...
    def judge(self, values: list[float]) -> None: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """The norm of some tensors, or a loss."""

    noticed: Noticed
    tensors: list[Tensor]
    """Those that still exist."""
    size: float


@dataclass(slots=True)
class _Copy:
    """Scalars on their way to main memory."""

    values: Tensor
    arrived: Any
    what: list[tuple[Noticed, list[weakref.ref[Tensor]]]]


class DeviceReads:
    """Collects the scalars of a step; `synchronous` if they must be known before the optimizer runs."""

    def __init__(self, synchronous: bool = True) -> None:
        self.synchronous = synchronous
        self.extra: ExtraValues | None = None
        self._waiting: list[tuple[Noticed, list[Tensor], Tensor]] = []
        self._in_flight: deque[_Copy] = deque()

    @property
    def late(self) -> bool:
        """Whether the values read now belong to an earlier step."""
        return bool(self._in_flight)

    def also_read(self, extra: ExtraValues) -> None:
        """From now on its values are read together with these."""
        self.extra = extra

    def forget(self) -> None:
        """Drops all values: their step is discarded."""
        self._waiting = []
        self._in_flight.clear()

    def add(self, noticed: Noticed, tensors: list[Tensor], size: Tensor) -> None:
        self._waiting.append((noticed, tensors, size))

    def take(self) -> list[Measured]:
        """Reads all pending values at once; or, if not synchronous, those of earlier steps that have arrived."""
        waiting, self._waiting = self._waiting, []
        sizes = [size for *_, size in waiting]
        extra = self.extra.collect() if self.extra is not None else []
        if self.synchronous:
            numbers = read_all(extra + sizes)
            self._judge_extra(numbers[: len(extra)])
            return [Measured(n, t, x) for (n, t, _), x in zip(waiting, numbers[len(extra) :], strict=True)]
        self._send(waiting, extra + sizes)
        return self._arrived()

    def _judge_extra(self, numbers: list[float]) -> None:
        if self.extra is not None and numbers:
            self.extra.judge(numbers)

    def _send(self, waiting: list[tuple[Noticed, list[Tensor], Tensor]], values: list[Tensor]) -> None:
        home = values[-1].device
        copy = torch.stack([v.to(home, torch.float32) for v in values]).to("cpu", non_blocking=True)
        arrived = None
        if home.type != "cpu":
            arrived = torch.get_device_module(home).Event()
            arrived.record()
        # Weak references: gradients that the program frees must not be kept alive for this.
        self._in_flight.append(_Copy(copy, arrived, [(n, [weakref.ref(t) for t in ts]) for n, ts, _ in waiting]))

    def _arrived(self) -> list[Measured]:
        found: list[Measured] = []
        while len(self._in_flight) > 1:
            first = self._in_flight[0]
            if first.arrived is not None and not first.arrived.query():
                if len(self._in_flight) <= _MOST_IN_FLIGHT:
                    break
                first.arrived.synchronize()
            self._in_flight.popleft()
            numbers = first.values.tolist()
            extra = len(numbers) - len(first.what)
            self._judge_extra(numbers[:extra])
            for (noticed, refs), x in zip(first.what, numbers[extra:], strict=True):
                found.append(Measured(noticed, [t for r in refs if (t := r()) is not None], x))
        return found
