"""Captures the state at the beginning of a step as the content of a capsule."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from firstnan.capsule.file import FORMAT, VERSION, CapsuleError, readable_size
from firstnan.capsule.packing import Packer
from firstnan.gate.gate import Gate
from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import TrainingObjects
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
