"""Copies of what training changes, to go back to: weights, buffers, optimizer state, learning-rate schedules."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from firstnan.tensors.finite import is_finite, norms, readable
from firstnan.tensors.live_objects import alive
from firstnan.tensors.names import Slot


class Kept:
    """Tensors and containers as they are now; `put_back` restores the very same objects, bit for bit.

    A container is kept by its members and a tensor by its values, so what was replaced since comes back as the object
    that it was, and what was added since is gone.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._values: list[tuple[Tensor, Tensor]] = []

    def add(self, value: Any) -> None:
        """Keeps this tensor, or this container and everything in it; other objects are left alone."""
        if isinstance(value, Tensor):
            if not is_lazy(value):  # It has no values before the first call of its layer.
                self.tensors[id(value)] = value
        elif isinstance(value, dict | list | deque | tuple) and id(value) not in self._containers:
            members = dict(value) if isinstance(value, dict) else list(value)
            self._containers[id(value)] = (value, members)
            for member in members.values() if isinstance(members, dict) else members:
                self.add(member)

    def copy(self) -> None:
        """Copies the values of all tensors added so far."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            self._values = [(t, t.detach().clone()) for t in self.tensors.values() if _can_be_written(t)]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._values)

    def put_back(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for tensor, copy in self._values:
                if tensor.shape == copy.shape:
                    tensor.copy_(copy)
                else:  # The program gave it other memory since.
                    tensor.data = copy.clone()
        for container, members in self._containers.values():
            _fill(container, members)


def _fill(container: Any, members: Any) -> None:
    if isinstance(container, dict):
        for key in [k for k in container if k not in members]:
            del container[key]
        for key, member in members.items():  # Not `update`: that of a Counter adds.
            container[key] = member
    elif isinstance(container, list):
        container[:] = members
    elif isinstance(container, deque):
        container.clear()
        container.extend(members)


def _can_be_written(t: Tensor) -> bool:
    """No: an inference tensor, or an expanded one, whose elements share memory. A program cannot write them either."""
    if t.is_inference():
        return False
    return t.layout is not torch.strided or not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


class Snapshot:
    """Parameters, buffers and optimizer state of one moment, known to be finite.

    Gradients and the settings of the optimizers (learning rates among them) are no part of it.
    """

    def __init__(self, kept: Kept, slots: list[tuple[Slot, Tensor | None]], states: list[tuple[Any, Any]]) -> None:
        self._kept, self._slots, self._states = kept, slots, states
        self.nbytes = kept.nbytes
        """What the copies take."""

    @classmethod
    def take(cls, parameters: Iterable[Tensor], slots: Iterable[Slot], optimizers: Iterable[Any]) -> Snapshot | None:
        """Copies everything; None where something in it is not finite, since that is nothing to go back to.

        In buffers and frozen parameters only a NaN counts: an infinity may be meant there.
        """
        kept, constants = Kept(), Kept()
        for parameter in parameters:
            (kept if parameter.requires_grad else constants).add(parameter)
        buffers = [(slot, slot.tensor()) for slot in slots]
        for _, buffer in buffers:
            constants.add(buffer)
        states = [(optimizer, optimizer.state) for optimizer in optimizers]
        for _, state in states:
            kept.add(state)
        if not _all_finite(kept.tensors.values()) or _any_nan(constants.tensors.values()):
            return None
        kept.tensors |= constants.tensors
        kept.copy()
        return cls(kept, buffers, states)

    def put_back(self) -> None:
        """Everything is again as it was, in the same tensors; state that the optimizers made since is forgotten."""
        self._kept.put_back()
        for slot, buffer in self._slots:
            module = slot.module()
            if module is not None and slot.name in module._buffers:
                module._buffers[slot.name] = buffer
        for optimizer, state in self._states:
            if "state" in vars(optimizer):  # `load_state_dict` makes a new one.
                optimizer.state = state


def _size(tensors: Collection[Tensor]) -> float:
    """The sum of all 2-norms: NaN where there is a NaN, infinite where there is an infinity or a norm overflows."""
    with torch.no_grad():
        values = [r for t in tensors if (r := readable(t)) is not None and r.numel()]
        return norms(values).sum().item() if values else 0.0


def _all_finite(tensors: Collection[Tensor]) -> bool:
    size = _size(tensors)
    return math.isfinite(size) or (size == math.inf and all(map(is_finite, tensors)))


def _any_nan(tensors: Collection[Tensor]) -> bool:
    return math.isnan(_size(tensors))


class Schedules:
    """Learning-rate schedulers, the numbers in their optimizers' groups, and the scales of gradient scalers, as now."""

    def __init__(
        self, schedulers: list[LRScheduler], optimizers: list[Any], scalers: Iterable[GradScaler] = ()
    ) -> None:
        self.schedulers = schedulers
        self._kept = Kept()
        for scaler in scalers:
            for name in ("_scale", "_growth_tracker"):  # one that is switched off has neither
                self._kept.add(vars(scaler).get(name))
        for scheduler in schedulers:
            # The functions of a LambdaLR may be objects that have a state.
            for holder in (scheduler, *getattr(scheduler, "lr_lambdas", ())):
                self._kept.add(getattr(holder, "__dict__", None))
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        for _, settings in self._groups:
            self._kept.add(settings)
        self._kept.copy()

    @classmethod
    def of(cls, optimizers: Iterable[Any]) -> Schedules:
        """Finds every scheduler of these optimizers in the process (slow: it looks at all objects), nested ones too."""
        optimizers = list(optimizers)
        found = alive(LRScheduler, GradScaler)
        schedulers = [s for s in found if any(vars(s).get("optimizer") is o for o in optimizers)]
        return cls(schedulers, optimizers, [s for s in found if isinstance(s, GradScaler)])

    def put_back(self) -> None:
        """Everything is as if no scheduler had been stepped since."""
        self._kept.put_back()
        for group, settings in self._groups:
            group.update(settings)
