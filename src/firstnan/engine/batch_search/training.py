"""A model, and everything in the process that trains it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.engine.batch_search.result import Seen
from firstnan.records import Noticed
from firstnan.tensors.finite import is_finite, stat, tensors_in
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import Models, parameters_of, readable_path
from firstnan.tensors.state import RandomState, Schedules, Snapshot, StateCopy


class Training:
    """The model, its parameters by name, and the optimizers, schedules and scalers that belong to it."""

    def __init__(self, model: Module, optimizer: Any) -> None:
        if not isinstance(model, Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if any(is_lazy(p) for p in model.parameters()):
            raise ValueError("the model has lazy parameters: call it once first, to initialise them")
        self.model, self.models = model, Models({"": model})
        there = find_live_objects(Optimizer, LRScheduler, torch.amp.GradScaler)
        found = [o for o in there if isinstance(o, Optimizer) and self._is_trained_by(o)]
        self.optimizers = _given(optimizer) or found
        self.all_optimizers = list({id(o): o for o in (*self.optimizers, *found)}.values())
        """All optimizers of the model, including those inside a wrapper and those that were not passed."""
        self.scalers = [o for o in there if isinstance(o, torch.amp.GradScaler)]
        self.schedulers = [
            o for o in there if isinstance(o, LRScheduler) and vars(o).get("optimizer") in self.all_optimizers
        ]

    def _is_trained_by(self, optimizer: Any) -> bool:
        return "param_groups" in vars(optimizer) and any(
            id(p) in self.models.parameters for p in parameters_of(optimizer)
        )

    @property
    def parameters(self) -> list[Tensor]:
        return [p for p, _ in self.models.parameters.values()]

    @property
    def outer_schedulers(self) -> list[Any]:
        """The schedulers that are not inside another one."""
        inner = {id(part) for s in self.schedulers for part in getattr(s, "_schedulers", ())}
        return [s for s in self.schedulers if id(s) not in inner]

    def bad_state(self, *, optimizers: bool) -> Seen | None:
        """The first non-finite weight or buffer, or optimizer state if `optimizers`."""
        for what, name, tensor, infinity_is_meant in self._tensors(optimizers):
            if not is_finite(tensor) and not (infinity_is_meant and not bool(torch.isnan(tensor).any())):
                return Seen(Noticed(what, name), stat(name, tensor))
        return None

    def _tensors(self, optimizers: bool) -> Iterator[tuple[str, str, Tensor, bool]]:
        for parameter, name in self.models.parameters.values():
            yield "parameter", name, parameter, not parameter.requires_grad
        for buffer, name in self.models.buffers.values():
            yield "buffer", name, buffer, True
        for optimizer in self.optimizers if optimizers else ():
            for parameter, state in optimizer.state.items():
                for place, tensor in tensors_in(state):
                    yield "optimizer state", f"{self.models.name(parameter)}{place}", tensor, False


def _given(optimizer: Any) -> list[Any]:
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for one in given:
        if not hasattr(one, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(one).__name__}")
    return given


# The keys under which people save them.
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizers", "optimizer_states")
_SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers")
_SCALER = ("scaler", "grad_scaler", "scaler_state_dict")


class Everything:
    """A copy of everything a search may change: model, optimizers, schedules, scalers, gradients, random generators."""

    def __init__(self, training: Training, loader: Any) -> None:
        optimizers = training.all_optimizers
        self._parameters = {id(p): p for p in training.parameters}
        self._parameters |= {id(p): p for o in optimizers for p in parameters_of(o)}
        self._state = StateCopy()
        for owner in (*training.model.modules(), *optimizers, *training.scalers):
            self._state.add(vars(owner))
        # No copies: they are removed before anything runs, so nothing is written to them.
        self._gradients = [(p, p.grad) for p in self._parameters.values()]
        self._schedules = Schedules(training.schedulers, optimizers)
        self._state.copy()
        self._random = RandomState.now()
        self._generators = [(g, g.get_state()) for g in _generators(loader)]

    def restore(self) -> None:
        """Restores weights, buffers, optimizers and schedules, and removes all gradients."""
        self._state.restore()
        self._schedules.restore()
        for parameter in self._parameters.values():
            parameter.grad = None

    def restore_random(self) -> None:
        self._random.restore()
        for generator, state in self._generators:
            generator.set_state(state)

    def __enter__(self) -> Everything:
        return self

    def __exit__(self, *error: object) -> None:
        """Restores everything, including gradients and random generators."""
        self.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self.restore_random()


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators that a DataLoader draws its order from."""
    owners = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    found = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())


class SavedState:
    """A checkpoint: the state after `step` updates."""

    def __init__(self, step: int, state: Any) -> None:
        if not isinstance(step, int):
            raise TypeError(f"checkpoints must be pairs (step number, state), got ({step!r}, …)")
        self.step, self._state = step, state
        self._label = f"the checkpoint of step {step}"
        if isinstance(state, str | os.PathLike):
            self._label += f" ({os.fspath(state)})"
            if not os.path.isfile(state):
                raise FileNotFoundError(f"{self._label} does not exist")
        elif not isinstance(state, dict | Snapshot):
            raise TypeError(f"{self._label} must be a path or a dict of state dicts, got {type(state).__name__}")

    def put(self, training: Training) -> list[str]:
        """Loads this state into the training; returns notes on what it does not contain."""
        if isinstance(self._state, Snapshot):
            self._state.restore()
            return []
        saved = self._state if isinstance(self._state, dict) else self._read()
        weights = _first(saved, _MODEL)
        if not isinstance(weights, dict):
            saved, weights = {}, saved
        missing = []
        try:
            training.model.load_state_dict(_named_as_in(training.model, weights))
            if not _load(training.optimizers, _first(saved, _OPTIMIZER)):
                missing.append("no optimizer state, so replays started with a fresh one")
                for optimizer in training.optimizers:
                    optimizer.state = defaultdict(dict)
            if not _load(training.outer_schedulers, _first(saved, _SCHEDULER)):
                missing.append("no learning-rate scheduler state, so replays started with its current state")
            if not _load(training.scalers, _first(saved, _SCALER)):
                missing.append("no gradient scaler state, so replays started with its current scale")
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._label} does not fit: {error}") from error
        return [f"The checkpoints hold {what}." for what in missing]

    def _read(self) -> dict[str, Any]:
        """Reads tensors and plain values only: a file may come from anywhere, and reading it must not run code."""
        try:
            saved = torch.load(self._state, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever the broken part makes it raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{self._label} cannot be read: {reason}") from error
        if not isinstance(saved, dict):
            raise ValueError(f"{self._label} must hold a dict of state dicts, got {type(saved).__name__}")
        return saved


def _named_as_in(model: Module, weights: dict[str, Any]) -> dict[str, Any]:
    """The weights under the names of this model, which may be wrapped differently now (compiled, parallel)."""
    names = {readable_path(name): name for name in model.state_dict()}
    renamed = {names.get(readable_path(name), name): value for name, value in weights.items()}
    return renamed if len(renamed) == len(weights) else weights


def _first(saved: dict[str, Any], names: Sequence[str]) -> Any:
    return next((saved[name] for name in names if saved.get(name)), None)


def _load(owners: Sequence[Any], saved: Any) -> bool:
    """Loads each saved state dict into its owner; False if there is none."""
    several = saved if isinstance(saved, list | tuple) else [saved] if saved else []
    if not several:
        return not owners
    if len(several) != len(owners):
        return False
    for owner, state in zip(owners, several, strict=True):
        owner.load_state_dict(deepcopy(state))  # an optimizer goes on with the very tensors it is given
    return True
