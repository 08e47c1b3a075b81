"""What a search may change, put back bit for bit; and saved states, put into the model and its optimizers."""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.bad_batch.found import Seen
from firstnan.detector.snapshot import Kept, Schedules, Snapshot
from firstnan.finite import is_finite, stat, tensors_in
from firstnan.gate import parameters_of
from firstnan.names import Models
from firstnan.randomness import RandomState
from firstnan.records import Noticed

# Under which names people save them.
_MODEL = ("model", "model_state_dict", "state_dict")
_OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizers", "optimizer_states")


def helpers() -> list[Any]:
    """Every optimizer, schedule and gradient scaler in the process (slow: it looks at all objects)."""
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer | LRScheduler | torch.amp.GradScaler)]


def optimizers_of(models: Models, alive: Sequence[Any]) -> list[Any]:
    """Those that train a parameter of these models."""
    found = [o for o in alive if isinstance(o, Optimizer) and "param_groups" in vars(o)]
    return [o for o in found if any(id(p) in models.parameters for p in parameters_of(o))]


class Everything:
    """The model, its optimizers with schedules and scalers, gradients and random generators, as they are now."""

    def __init__(
        self, model: Module, models: Models, optimizers: Sequence[Any], alive: Sequence[Any], loader: Any
    ) -> None:
        self._parameters = {id(p): p for p, _ in models.parameters.values()}
        self._parameters |= {id(p): p for o in optimizers for p in parameters_of(o)}
        self._state, self._gradients = Kept(), Kept()
        scalers = [o for o in alive if isinstance(o, torch.amp.GradScaler)]
        schedulers = [o for o in alive if isinstance(o, LRScheduler) and vars(o).get("optimizer") in optimizers]
        for owner in (*model.modules(), *optimizers, *scalers):
            self._state.add(vars(owner))
        self._own = [(p, p.grad) for p in self._parameters.values()]
        for _, gradient in self._own:
            self._gradients.add(gradient)
        self._schedules = Schedules(schedulers, list(optimizers))
        self._state.copy()
        self._gradients.copy()
        self._random = RandomState.now()
        self._generators = [(g, g.get_state()) for g in _generators(loader)]

    def put_back(self) -> None:
        """Weights, buffers, optimizers and schedules; there are no gradients."""
        self._state.put_back()
        self._schedules.put_back()
        for parameter in self._parameters.values():
            parameter.grad = None

    def put_back_random(self) -> None:
        self._random.put_back()
        for generator, state in self._generators:
            generator.set_state(state)

    def __enter__(self) -> Everything:
        return self

    def __exit__(self, *error: object) -> None:
        """Everything is as it was, the gradients and random generators too."""
        self.put_back()
        self._gradients.put_back()
        for parameter, gradient in self._own:
            parameter.grad = gradient
        self.put_back_random()


def _generators(loader: Any) -> list[torch.Generator]:
    """Those that a DataLoader draws its order from."""
    owners = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    found = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())


def bad_state(models: Models, optimizers: Sequence[Any] = ()) -> Seen | None:
    """The first weight, buffer or optimizer state that is not finite."""
    for what, name, tensor, infinity_is_meant in _state_tensors(models, optimizers):
        if not is_finite(tensor) and not (infinity_is_meant and not bool(torch.isnan(tensor).any())):
            return Seen(Noticed(what, name), stat(name, tensor))
    return None


def _state_tensors(models: Models, optimizers: Sequence[Any]) -> Iterator[tuple[str, str, Tensor, bool]]:
    for parameter, name in models.parameters.values():
        yield "parameter", name, parameter, not parameter.requires_grad
    for buffer, name in models.buffers.values():
        yield "buffer", name, buffer, True
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for place, tensor in tensors_in(state):
                yield "optimizer state", f"{models.name(parameter)}{place}", tensor, False


class SavedState:
    """One saved state of a run: the one after `step` updates."""

    def __init__(self, step: int, state: Any) -> None:
        if not isinstance(step, int):
            raise TypeError(f"checkpoints are pairs (step number, state), not ({step!r}, …)")
        self.step, self._state = step, state
        self._label = f"the saved state of step {step}"
        if isinstance(state, str | os.PathLike):
            self._label += f" ({os.fspath(state)})"
            if not os.path.isfile(state):
                raise FileNotFoundError(f"{self._label} does not exist")
        elif not isinstance(state, dict | Snapshot):
            raise TypeError(f"{self._label} is a path or a dict of state dicts, not {type(state).__name__}")

    def put(self, model: Module, optimizers: Sequence[Any]) -> str:
        """Makes this the state of the model and its optimizers; returns what is missing in it, in words."""
        if isinstance(self._state, Snapshot):
            self._state.put_back()
            return ""
        saved = self._state if isinstance(self._state, dict) else self._read()
        weights = next((saved[k] for k in _MODEL if isinstance(saved.get(k), dict)), saved)
        settings = next((saved[k] for k in _OPTIMIZER if saved.get(k)), None) if weights is not saved else None
        try:
            model.load_state_dict(weights)
            for optimizer, one in zip(optimizers, _one_each(settings, optimizers), strict=True):
                if one is None:
                    optimizer.state = defaultdict(dict)
                else:
                    optimizer.load_state_dict(one)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self._label} does not fit: {error}") from error
        missing = settings is None and optimizers
        return "The saved states hold no optimizer state: replays began with a fresh one." if missing else ""

    def _read(self) -> dict[str, Any]:
        """Tensors and plain values only: a file may come from anywhere, and reading it must not run code."""
        try:
            saved = torch.load(self._state, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever the broken part makes it raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(f"{self._label} cannot be read: {reason}") from error
        if not isinstance(saved, dict):
            raise ValueError(f"{self._label} holds no dict of state dicts but {type(saved).__name__}")
        return saved


def _one_each(settings: Any, optimizers: Sequence[Any]) -> list[Any]:
    """The state dict of each optimizer; None where there is none."""
    if settings is None:
        return [None] * len(optimizers)
    several = settings if isinstance(settings, list | tuple) else [settings]
    if len(several) != len(optimizers):
        raise ValueError(f"it is of {len(several)} optimizers, here are {len(optimizers)}")
    return list(several)
