"""Copies of what training changes, to restore later: weights, buffers, optimizer state, learning-rate schedules."""

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
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.names import Slot


class StateCopy:
    """Copies of tensors and containers; `restore` brings the same objects back, bit for bit.

    The members of a container and the values of a tensor are saved. On `restore`, a member that was replaced is the
    former object again, and a member that was added is removed.
    """

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._values: list[tuple[Tensor, Tensor]] = []

    def add(self, value: Any) -> None:
        """Adds this tensor, or this container and everything in it; other objects are ignored."""
        if isinstance(value, Tensor):
            if not is_lazy(value):  # No values before the first call of its layer.
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

    def restore(self) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for tensor, copy in self._values:
                if tensor.shape == copy.shape:
                    tensor.copy_(copy)
                else:  # The program has replaced its memory since.
                    tensor.data = copy.clone()
        for container, members in self._containers.values():
            _fill(container, members)


def _fill(container: Any, members: Any) -> None:
    if isinstance(container, dict):
        for key in [k for k in container if k not in members]:
            del container[key]
        for key, member in members.items():  # Not `update`: `Counter.update` adds.
            container[key] = member
    elif isinstance(container, list):
        container[:] = members
    elif isinstance(container, deque):
        container.clear()
        container.extend(members)


def _can_be_written(t: Tensor) -> bool:
    """False for inference tensors and expanded ones, whose elements share memory. No program can write those."""
    if t.is_inference():
        return False
    return t.layout is not torch.strided or not any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))


class Snapshot:
    """Parameters, buffers and optimizer state of one moment, known to be finite.

    Gradients and optimizer settings (such as learning rates) are not included.
    """

    def __init__(self, copy: StateCopy, slots: list[tuple[Slot, Tensor | None]], states: list[tuple[Any, Any]]) -> None:
        self._copy, self._slots, self._states = copy, slots, states
        self.nbytes = copy.nbytes
        """The memory that the copies take."""

    @classmethod
    def take(cls, parameters: Iterable[Tensor], slots: Iterable[Slot], optimizers: Iterable[Any]) -> Snapshot | None:
        """Copies everything; None if something in it is non-finite, since that is not worth restoring.

        In buffers and frozen parameters only a NaN counts: an infinity may be intended there.
        """
        copy, constants = StateCopy(), StateCopy()
        for parameter in parameters:
            (copy if parameter.requires_grad else constants).add(parameter)
        buffers = [(slot, slot.tensor()) for slot in slots]
        for _, buffer in buffers:
            constants.add(buffer)
        states = [(optimizer, optimizer.state) for optimizer in optimizers]
        for _, state in states:
            copy.add(state)
        if not _all_finite(copy.tensors.values()) or _any_nan(constants.tensors.values()):
            return None
        copy.tensors |= constants.tensors
        copy.copy()
        return cls(copy, buffers, states)

    def restore(self) -> None:
        """Restores everything in the same tensors; optimizer state that was created since is dropped."""
        self._copy.restore()
        for slot, buffer in self._slots:
            module = slot.module()
            if module is not None and slot.name in module._buffers:
                module._buffers[slot.name] = buffer
        for optimizer, state in self._states:
            if "state" in vars(optimizer):  # `load_state_dict` creates a new one.
                optimizer.state = state


def _sum_of_norms(tensors: Collection[Tensor]) -> float:
    """The sum of all 2-norms: NaN if there is a NaN, infinite if there is an infinity or a norm overflows."""
    with torch.no_grad():
        values = [r for t in tensors if (r := readable(t)) is not None and r.numel()]
        return norms(values).sum().item() if values else 0.0


def _all_finite(tensors: Collection[Tensor]) -> bool:
    total = _sum_of_norms(tensors)
    return math.isfinite(total) or (total == math.inf and all(map(is_finite, tensors)))


def _any_nan(tensors: Collection[Tensor]) -> bool:
    return math.isnan(_sum_of_norms(tensors))


class Schedules:
    """A copy of the state of learning-rate schedulers, optimizer settings and gradient scalers."""

    def __init__(
        self, schedulers: list[LRScheduler], optimizers: list[Any], scalers: Iterable[GradScaler] = ()
    ) -> None:
        self.schedulers = schedulers
        self._copy = StateCopy()
        for scaler in scalers:
            for name in ("_scale", "_growth_tracker"):  # a disabled scaler has neither
                self._copy.add(vars(scaler).get(name))
        for scheduler in schedulers:
            # The functions of a LambdaLR may be objects with state.
            for holder in (scheduler, *getattr(scheduler, "lr_lambdas", ())):
                self._copy.add(getattr(holder, "__dict__", None))
        self._groups = [
            (group, {name: value for name, value in group.items() if name != "params"})
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        for _, settings in self._groups:
            self._copy.add(settings)
        self._copy.copy()

    @classmethod
    def of(cls, optimizers: Iterable[Any]) -> Schedules:
        """Copies every scheduler of these optimizers in the process, nested ones too (slow: it visits all objects)."""
        optimizers = list(optimizers)
        found = find_live_objects(LRScheduler, GradScaler)
        schedulers = [s for s in found if any(vars(s).get("optimizer") is o for o in optimizers)]
        return cls(schedulers, optimizers, [s for s in found if isinstance(s, GradScaler)])

    def restore(self) -> None:
        """Restores everything as if no scheduler had been stepped since."""
        self._copy.restore()
        for group, settings in self._groups:
            group.update(settings)
