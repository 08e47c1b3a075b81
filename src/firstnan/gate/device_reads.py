"""Values that lie on a device: looked at together, once a step, or a step later without waiting at all."""

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
    "noticed a step later, since no update waits for the device here: on_nonfinite='raise' and 'skip' look before the "
    "update, and can show where the value is born"
)
"""What a report says of a value that was looked at after the update."""


class Passenger(Protocol):
    """Someone else whose values ride along in the same read."""

    def collect(self) -> list[Tensor]: ...
    def judge(self, values: list[float]) -> None: ...


@dataclass(frozen=True, slots=True)
class Measured:
    noticed: Noticed
    tensors: list[Tensor]
    """What was measured, as far as it still exists."""
    size: float


@dataclass(slots=True)
class _Copy:
    """Values on their way to main memory."""

    values: Tensor
    arrived: Any
    what: list[tuple[Noticed, list[weakref.ref[Tensor]]]]


class Reads:
    """Gathers single values of a step; `decides` where they must be known before the optimizer runs."""

    def __init__(self, decides: bool = True) -> None:
        self.decides = decides
        self.passenger: Passenger | None = None
        self._waiting: list[tuple[Noticed, list[Tensor], Tensor]] = []
        self._in_flight: deque[_Copy] = deque()

    @property
    def late(self) -> bool:
        """What is looked at now is of an earlier step."""
        return bool(self._in_flight)

    def carry(self, passenger: Passenger) -> None:
        """From now on its values are read together with these."""
        self.passenger = passenger

    def forget(self) -> None:
        """The step that these values are of never was."""
        self._waiting = []
        self._in_flight.clear()

    def add(self, noticed: Noticed, tensors: list[Tensor], size: Tensor) -> None:
        self._waiting.append((noticed, tensors, size))

    def take(self) -> list[Measured]:
        """All that waits, by one read; or, where nothing is to be decided, what was sent off in earlier steps."""
        waiting, self._waiting = self._waiting, []
        sizes = [size for *_, size in waiting]
        riding = self.passenger.collect() if self.passenger is not None else []
        if self.decides:
            numbers = read_all(riding + sizes)
            self._hand_over(numbers[: len(riding)])
            return [Measured(n, t, x) for (n, t, _), x in zip(waiting, numbers[len(riding) :], strict=True)]
        self._send(waiting, riding + sizes)
        return self._arrived()

    def _hand_over(self, numbers: list[float]) -> None:
        if self.passenger is not None and numbers:
            self.passenger.judge(numbers)

    def _send(self, waiting: list[tuple[Noticed, list[Tensor], Tensor]], values: list[Tensor]) -> None:
        home = values[-1].device
        copy = torch.stack([v.to(home, torch.float32) for v in values]).to("cpu", non_blocking=True)
        arrived = None
        if home.type != "cpu":
            arrived = torch.get_device_module(home).Event()
            arrived.record()
        # Only weakly: gradients that the program lets go must not stay for the sake of a look at their size.
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
            riding = len(numbers) - len(first.what)
            self._hand_over(numbers[:riding])
            for (noticed, refs), x in zip(first.what, numbers[riding:], strict=True):
                found.append(Measured(noticed, [t for r in refs if (t := r()) is not None], x))
        return found
