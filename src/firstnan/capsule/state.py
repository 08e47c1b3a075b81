"""The state at the beginning of a step: captured for a capsule, and restored from one where this process matches it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from firstnan.capsule.content import Capsule, GroupState, Missing, ModelState, OptimizerState, Packed, ParameterState
from firstnan.capsule.file import FORMAT, VERSION, CapsuleError, readable_size
from firstnan.capsule.packing import Packer, Unpacker
from firstnan.gate.gate import Gate
from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import Model, TrainingObjects, parameters_of
from firstnan.tensors.state import Handout, RandomState


class Capture:
    """The state of models, optimizers and random generators now; batches are added as they come.

    `copies` it if the program goes on before the capsule is written.
    """

    def __init__(
        self, objects: TrainingObjects, gate: Gate, buffers: list[Any], *, suppressed: int = 0, copies: bool = False
    ) -> None:
        self.step, self.turn = gate.steps.current, gate.steps.updates
        self._state, self._optimizer_state = Packer(copies=copies), Packer("o", copies=copies)
        weights = [p for model in objects.models for p in model.parameters.values()]
        self.has_weights = bool(weights or objects.optimizers)
        self.is_healthy = all(is_finite(p) for p in weights if p.requires_grad)
        self._randoms: dict[int, tuple[RandomState, Any]] = {}
        before = {(id(slot.module()), slot.name): copy for slot, _, copy in buffers}
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "steps": _steps(objects, gate),
            "suppressed": suppressed,
            "models": [self._model(m, before) for m in objects.models],
            "optimizers": self._optimizers(objects),
            "scalers": [self._state.node(s.state_dict()) for s in objects.scalers],
            "schedulers": [[type(s).__name__, self._state.node(s.state_dict())] for s in objects.schedulers],
            "random": None,
            "batches": [],
        }

    def _model(self, model: Any, before: dict[tuple[int, str], Any]) -> dict[str, Any]:
        buffers = []
        for name, slot in model.slots.items():
            buffer = before.get((id(slot.module()), slot.name), slot.tensor())
            if buffer is not None:
                buffers.append([name, self._state.node(buffer)])
        parameters = [[name, self._state.node(p)] for name, p in model.parameters.items()]
        return {"kind": model.kind, "parameters": parameters, "buffers": buffers}

    def _optimizers(self, objects: TrainingObjects) -> list[Any]:
        names = objects.names()
        return [
            {
                "kind": type(optimizer).__name__,
                "groups": [self._group(optimizer, group, names) for group in optimizer.param_groups],
            }
            for optimizer in objects.optimizers
        ]

    def _group(self, optimizer: Any, group: dict[str, Any], names: dict[int, tuple[int, str]]) -> dict[str, Any]:
        settings = {name: value for name, value in group.items() if name != "params"}
        parameters = []
        for p in group["params"]:
            known = names.get(id(p))
            # A parameter of no module has no name, so its value is stored here.
            value = None if known else self._state.node(p)
            state = self._optimizer_state.node(optimizer.state[p]) if p in optimizer.state else None
            parameters.append([list(known) if known else None, value, state])
        return {"settings": self._state.node(settings), "parameters": parameters}

    def add_batch(self, source: int, handout: Handout, batch: Any) -> None:
        """Adds one of the step's batches with the random state in which the loader returned it."""
        node = {"source": source, "index": handout.index, "indices": self._state.node(handout.indices)}
        node |= {"value": self._state.node(batch), "random": self._random(handout.random)}
        self.manifest["batches"].append(node)

    def set_random(self, random: RandomState) -> None:
        self.manifest["random"] = self._random(random)

    def _random(self, random: RandomState) -> Any:
        if id(random) not in self._randoms:
            states = {"python": random.python, "numpy": random.numpy, "torch": random.cpu, "cuda": random.cuda}
            self._randoms[id(random)] = (random, self._state.node(states))
        return self._randoms[id(random)][1]

    def within(self, limit: int) -> tuple[dict[str, Any], dict[str, Tensor], str]:
        """Manifest and tensors to write, and what was left out: the optimizer state, if only the rest fits."""
        manifest, tensors, missing = dict(self.manifest), self._state.tensors | self._optimizer_state.tensors, ""
        core, extra = self._state.nbytes, self._optimizer_state.nbytes
        if core + extra > limit >= core:
            tensors, missing = self._state.tensors, f"the optimizer state ({readable_size(extra)})"
            manifest["optimizers"] = [_without_state(o) for o in manifest["optimizers"]]
        elif core + extra > limit:
            raise CapsuleError(f"it would need {readable_size(core + extra)}, and the limit is {readable_size(limit)}")
        unsupported = sorted(self._state.left_out | self._optimizer_state.left_out)
        manifest["left_out"] = ([missing] if missing else []) + unsupported
        return manifest, tensors, missing


def _steps(objects: TrainingObjects, gate: Gate) -> dict[str, Any]:
    """How many steps each optimizer has done and which one follows which; optimizers by their index."""
    steps = gate.steps
    places = {id(o): i for i, o in enumerate(objects.optimizers)}
    last = steps.last() if steps.last else None
    follows = [(places.get(id(o)), places.get(id(f()))) for o, f in steps.follows.items()]
    return {
        "current": steps.current,
        "total": steps.total,
        "manual": steps.manual,
        "done": [steps.of(o) for o in objects.optimizers],
        "last": places.get(id(last)),
        "follows": [[a, b] for a, b in follows if a is not None and b is not None],
    }


def _without_state(optimizer: dict[str, Any]) -> dict[str, Any]:
    groups = [{**g, "parameters": [[*p[:2], None] for p in g["parameters"]]} for g in optimizer["groups"]]
    return {**optimizer, "groups": groups}


# --- restoring ---------------------------------------------------------------------------------------------------

_NAMED = 3


class Restorer:
    """Restores a capsule into the training objects of this process; `notes` says what did not match."""

    def __init__(self, capsule: Capsule, objects: TrainingObjects) -> None:
        self.capsule, self.objects = capsule, objects
        self.unpacker = Unpacker(capsule.file)
        self.notes: list[str] = []
        self.mismatch = ""
        """Why the weights here are not the captured ones; empty if they are."""
        self._models = self._matched_models()
        self.optimizers = self._matched_optimizers()
        """For each captured optimizer the one of this process, or None."""

    # Which objects of this process correspond to the captured ones.

    def _matched_models(self) -> list[Model | None]:
        """For each captured model the one that shares most names and shapes; of equals the first of its class."""
        free = list(self.objects.models)
        found: list[Model | None] = []
        for state in self.capsule.models:
            best = max(free, key=lambda m, s=state: (_similarity(s, m), m.kind == s.kind), default=None)  # type: ignore[misc]
            if best is None or not _similarity(state, best):
                found.append(None)
                if state.parameters or state.buffers:
                    self.mismatch = f"no model of this program matches the captured {state.kind}"
                    self.notes.append(self.mismatch)
                continue
            # By identity, because two models may compare equal.
            free = [m for m in free if m is not best]
            found.append(best)
        return found

    def _matched_optimizers(self) -> list[Any]:
        free = list(self.objects.optimizers)
        found: list[Any] = []
        for state in self.capsule.optimizers:
            fitting = [o for o in free if self._fits(state, o)]
            best = next((o for o in fitting if type(o).__name__ == state.kind), fitting[0] if fitting else None)
            free = [o for o in free if o is not best]
            found.append(best)
            if best is None:
                self.notes.append(f"no optimizer of this program matches the captured {state.kind}")
        return found

    def _fits(self, state: OptimizerState, optimizer: Any) -> bool:
        """Whether it trains a parameter of the captured optimizer."""
        own = {id(p) for p in parameters_of(optimizer)}
        return any(p is not None and id(p) in own for _, p in self._parameters(state, optimizer))

    def _parameters(self, state: OptimizerState, optimizer: Any) -> Iterable[tuple[ParameterState, Tensor | None]]:
        """Each captured parameter with the one of this process: by name, or (if it belongs to no model) by index."""
        mine = parameters_of(optimizer)
        for i, captured in enumerate(state.parameters):
            if captured.name is None:
                own = mine[i] if i < len(mine) else None
                shape = getattr(captured.value, "shape", None)
                yield captured, own if own is not None and tuple(_local(own).shape) == shape else None
            else:
                model = self._models[captured.name[0]]
                yield captured, model.parameters.get(captured.name[1]) if model is not None else None

    # Restoring.

    def weights(self) -> None:
        """Restores parameters and buffers."""
        changed: list[str] = []
        missing: list[str] = []
        extra: list[str] = []
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for state, model in zip(self.capsule.models, self._models, strict=True):
                if model is None:
                    continue
                buffers = {n: b for n, slot in model.slots.items() if (b := slot.tensor()) is not None}
                for captured, here in ((state.parameters, model.parameters), (state.buffers, buffers)):
                    missing += [name for name in captured if name not in here]
                    changed += [n for n in captured if n in here and not self._copy(here[n], captured[n])]
                extra += [name for name in model.parameters if name not in state.parameters]
        for text, names in (
            ("not restored, because the shape differs or the value was not stored", changed),
            ("not in the program's model", missing),
            ("parameters not in the capsule", extra),
        ):
            if names:
                self.notes.append(f"{text}: {_some(names)}")
                stored = names is not changed or not self.capsule.left_out
                if names is not extra and stored:
                    self.mismatch = self.mismatch or self.notes[-1]

    def _copy(self, target: Tensor, value: Any) -> bool:
        """Copies a captured value into a tensor of this process; False if that is not possible."""
        if isinstance(value, Missing):
            return False
        t = self.unpacker.fresh(value) if isinstance(value, Packed) else self.unpacker.value(value)
        here = _local(target)
        if t.shape != here.shape:
            return False
        here.detach().copy_(t)
        return True

    def training(self) -> None:
        """Restores state and settings of optimizers, gradient scalers and learning-rate schedulers."""
        for state, optimizer in zip(self.capsule.optimizers, self.optimizers, strict=True):
            if optimizer is not None:
                self._optimizer(state, optimizer)
        for captured, scaler in zip(self.capsule.scalers, self.objects.scalers, strict=False):
            self._try("a gradient scaler", lambda c=captured, s=scaler: self._load(c, s))
        free = list(self.objects.schedulers)
        for kind, captured in self.capsule.schedulers:
            scheduler = next((s for s in free if type(s).__name__ == kind), None)
            free = [s for s in free if s is not scheduler]
            if scheduler is not None:
                self._try(f"a {kind}", lambda c=captured, s=scheduler: self._load(c, s))

    def _load(self, captured: Any, holder: Any) -> None:
        own = holder.state_dict()
        if own and set(own) == set(captured):
            holder.load_state_dict(self.unpacker.value(captured, own))

    def _optimizer(self, state: OptimizerState, optimizer: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for captured, p in self._parameters(state, optimizer):
                if p is None:
                    continue
                if captured.value is not None and not self._copy(p, captured.value):
                    self.notes.append(f"a parameter of {state.kind} has a different shape here")
                elif isinstance(captured.state, dict):
                    optimizer.state[p] = self.unpacker.value(captured.state, parameter=_local(p))
        for captured_group, group in zip(state.groups, optimizer.param_groups, strict=False):
            self._settings(captured_group, group)

    def _settings(self, state: GroupState, group: dict[str, Any]) -> None:
        for name, value in state.settings.items():
            if name != "params" and not isinstance(value, Missing):
                group[name] = self.unpacker.value(value, group.get(name))

    def _try(self, what: str, act: Any) -> None:
        try:
            act()
        except Exception as error:
            self.notes.append(f"the captured state could not be loaded into {what} ({type(error).__name__})")

    def random(self, state: Any) -> None:
        """Restores the random generators."""
        if state is not None:
            self._try("Python's random generator", lambda: random.setstate(state["python"]))
            self._try("torch's random generator", lambda: torch.set_rng_state(self.unpacker.tensor(state["torch"])))
            if state["numpy"] is not None and "numpy" in sys.modules:
                numbers = self.unpacker.value(state["numpy"])
                self._try("numpy's random generator", lambda: sys.modules["numpy"].random.set_state(numbers))
            self._try("the GPU's random generator", lambda: self._cuda(state["cuda"]))

    def _cuda(self, states: Sequence[Packed]) -> None:
        if torch.cuda.is_available():
            for i, state in enumerate(states[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(self.unpacker.tensor(state), i)


def _similarity(state: ModelState, model: Model) -> int:
    buffers = {n: b for n, slot in model.slots.items() if (b := slot.tensor()) is not None}
    pairs = [(state.parameters, model.parameters), (state.buffers, buffers)]
    both = [(v, _local(here[name])) for captured, here in pairs for name, v in captured.items() if name in here]
    return sum(2 if tuple(t.shape) == getattr(v, "shape", None) else 1 for v, t in both)


def _local(t: Tensor) -> Tensor:
    """The local part of a sharded tensor."""
    local: Tensor = getattr(t, "_local_tensor", t)
    return local


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
