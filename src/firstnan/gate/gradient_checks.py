"""Cheap ways to know that gradients are finite: known norms, values read together, quick checks."""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from firstnan.records import Noticed
from firstnan.tensors.finite import TensorVersion, is_plain, read_all, reads_are_free

_LARGE = 1 << 18
"""Elements: for a smaller model, reading the gradients again is cheaper than remembering their versions."""
_LAST = 4


class Clipping:
    """Remembers the norm of clipped gradients, as long as nobody has written to them since.

    A norm is finite only if every element is, and clipping makes no element larger, so the gate need not read them.
    """

    def __init__(self) -> None:
        self._norm: TensorVersion | None = None
        """The 2-norm that torch computed last."""
        self._normed: list[int] = []
        """The ids of its gradients."""
        self._clipped: deque[tuple[dict[int, TensorVersion], float]] = deque(maxlen=_LAST)

    def norm_computed(self, gradients: list[Tensor], norm: Tensor) -> None:
        """`norm` is the 2-norm of all these gradients."""
        # Reading a norm on a device would wait for the device.
        self._norm, self._normed = TensorVersion(norm) if is_plain(norm) else None, list(map(id, gradients))

    def gradients_clipped(self, parameters: list[Tensor], max_norm: float | Tensor, norm: Tensor) -> None:
        """The gradients of these parameters had this norm and were scaled down to at most `max_norm`."""
        if self._norm is None or not self._norm.is_unchanged(norm):
            return
        gradients = [g for p in parameters if (g := p.grad) is not None]
        size, limit = norm.item(), float(max_norm)
        if list(map(id, gradients)) != self._normed or not math.isfinite(size) or not limit >= 0:
            return
        if sum(map(Tensor.numel, gradients)) >= _LARGE and all(map(is_plain, gradients)):
            self._clipped.append(({id(g): TensorVersion(g) for g in gradients}, size * min(1.0, limit / (size + 1e-6))))

    def norm_of(self, parameters: list[Tensor]) -> float | None:
        """The norm of the gradients of all these parameters, if it is known from clipping."""
        if not self._clipped:
            return None
        gradients = [g for p in parameters if (g := p.grad) is not None]
        for known, norm in reversed(self._clipped):
            if len(known) == len(gradients) and all(id(g) in known and known[id(g)].is_unchanged(g) for g in gradients):
                return norm
        return None


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


_FEW = 32
_SMALL_STEP = 1 << 18
_EVERY = 64
_LEARNING = 64
_JUMP = 4.0
_RISE = 1.5


class QuickCheck:
    """Checks only the sum of the gradients: it is finite only if every element is, and it jumps when they do.

    A sum costs half as much as a norm. The full check runs in the first steps, in every 64th step, and whenever the
    sum or the loss rises or the learning rate changes.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sum = 0.0
        """The largest recent sum, by magnitude, of the fully checked steps."""
        self._loss = 0.0
        self._rate: Any = None
        self.applies = False

    def passes(self, optimizer: Any, loss: float | None) -> bool:
        """Whether everything is finite and this step needs no full check."""
        self._steps += 1
        if not self.applies or self._steps % _EVERY == 0 or loss is None or not abs(loss) <= _RISE * self._loss:
            return False
        for group in optimizer.param_groups:
            if group.get("lr") is not self._rate:
                return False
        return abs(self._total(optimizer)) <= _JUMP * self._sum  # False for a NaN

    def learn(self, optimizer: Any, gradients: list[Tensor], loss: float | None) -> None:
        """After a full check that found nothing: remembers the usual sum, loss and learning rate."""
        if not _are_few_and_small(gradients):
            self.applies = False
            return
        # The usual values change slowly as the model learns.
        self._sum = max(0.95 * self._sum, abs(self._total(optimizer)))
        self._loss = max(0.95 * self._loss, abs(loss)) if loss is not None else self._loss
        self._rate = optimizer.param_groups[0].get("lr")
        self.applies = self._steps >= _LEARNING

    def _total(self, optimizer: Any) -> float:
        total = 0.0
        vectors: list[Tensor] = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.dim() == 1:
                    vectors.append(gradient)
                else:
                    total += gradient.sum().item()
        for vector in [torch.cat(vectors)] if len(vectors) > 3 else vectors:
            total += vector.sum().item()
        return total


def _are_few_and_small(gradients: list[Tensor]) -> bool:
    return (
        0 < len(gradients) <= _FEW
        and all(map(is_plain, gradients))
        and reads_are_free(gradients[0])
        and sum(map(Tensor.numel, gradients)) <= _SMALL_STEP
    )
