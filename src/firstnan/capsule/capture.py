"""The state at the beginning of a step, as the content of a capsule."""

from __future__ import annotations

from typing import Any

from firstnan.capsule.file import FORMAT, VERSION, CapsuleError, Part, readable_size
from firstnan.capsule.packing import Packer
from firstnan.capsule.training_objects import Living
from firstnan.gate.gate import Gate
from firstnan.tensors.batches import Handout
from firstnan.tensors.finite import is_finite
from firstnan.tensors.randomness import RandomState


class Capture:
    """What the models, optimizers and generators are like now; batches are added as they come.

    `copies` where the program goes on before the capsule is written.
    """

    def __init__(self, living: Living, gate: Gate, buffers: list[Any], *, suppressed: int = 0, copies: bool = False):
        self.step, self.turn = gate.steps.current, gate.steps.updates
        self._state, self._optimizers = Packer(copies=copies), Packer("o", copies=copies)
        weights = [p for model in living.models for p in model.parameters.values()]
        self.has_weights = bool(weights or living.optimizers)
        self.is_healthy = all(is_finite(p) for p in weights if p.requires_grad)
        self._randoms: dict[int, tuple[RandomState, Any]] = {}
        before = {(id(slot.module()), slot.name): copy for slot, _, copy in buffers}
        self.manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "steps": _steps(living, gate),
            "suppressed": suppressed,
            "models": [self._model(m, before) for m in living.models],
            "optimizers": self._all_optimizers(living),
            "scalers": [self._state.node(s.state_dict()) for s in living.scalers],
            "schedulers": [[type(s).__name__, self._state.node(s.state_dict())] for s in living.schedulers],
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

    def _all_optimizers(self, living: Living) -> list[Any]:
        names = living.names()
        return [
            {
                "kind": type(optimizer).__name__,
                "groups": [self._group(optimizer, group, names) for group in optimizer.param_groups],
            }
            for optimizer in living.optimizers
        ]

    def _group(self, optimizer: Any, group: dict[str, Any], names: dict[int, tuple[int, str]]) -> dict[str, Any]:
        settings = {name: value for name, value in group.items() if name != "params"}
        parameters = []
        for p in group["params"]:
            known = names.get(id(p))
            # A parameter of no module has no name: its value is here.
            value = None if known else self._state.node(p)
            state = self._optimizers.node(optimizer.state[p]) if p in optimizer.state else None
            parameters.append([list(known) if known else None, value, state])
        return {"settings": self._state.node(settings), "parameters": parameters}

    def add_batch(self, source: int, handout: Handout, batch: Any) -> None:
        """One more of the step's batches, as it was handed out, with the random state at that moment."""
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

    def within(self, limit: int) -> tuple[dict[str, Any], list[Part], str]:
        """What is to be written: all, or without the optimizers' state where only that fits; and what is missing."""
        manifest, parts, missing = dict(self.manifest), self._state.parts + self._optimizers.parts, ""
        size, core = self._state.nbytes + self._optimizers.nbytes, self._state.nbytes
        if size > limit >= core and self._optimizers.parts:
            parts = self._state.parts
            missing = f"the optimizers' state ({readable_size(size - core)})"
            manifest["optimizers"] = [_without_state(o) for o in manifest["optimizers"]]
        elif size > limit:
            raise CapsuleError(f"it would take {readable_size(size)}, and the limit is {readable_size(limit)}")
        kept_out = sorted(self._state.left_out | self._optimizers.left_out)
        manifest["left_out"] = ([missing] if missing else []) + kept_out
        return manifest, parts, missing


def _steps(living: Living, gate: Gate) -> dict[str, Any]:
    """How far each optimizer has come, and who takes turns with whom; optimizers by their place in the list."""
    steps = gate.steps
    places = {id(o): i for i, o in enumerate(living.optimizers)}
    last = steps.last() if steps.last else None
    follows = [(places.get(id(o)), places.get(id(f()))) for o, f in steps.follows.items()]
    return {
        "current": steps.current,
        "total": steps.total,
        "manual": steps.manual,
        "done": [steps.of(o) for o in living.optimizers],
        "last": places.get(id(last)),
        "follows": [[a, b] for a, b in follows if a is not None and b is not None],
    }


def _without_state(optimizer: dict[str, Any]) -> dict[str, Any]:
    groups = [{**g, "parameters": [[*p[:2], None] for p in g["parameters"]]} for g in optimizer["groups"]]
    return {**optimizer, "groups": groups}
