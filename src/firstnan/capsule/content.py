"""The content of a capsule with every field checked; needs no torch, because tensors are read later."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from firstnan.capsule.file import CapsuleError, CapsuleFile
from firstnan.capsule.values import Missing, Packed, Reader, Sparse, as_count, as_dict, as_list, as_text
from firstnan.records import Report, ReportError


@dataclass(frozen=True)
class ModelState:
    kind: str
    parameters: dict[str, Any]
    buffers: dict[str, Any]


@dataclass(frozen=True)
class ParameterState:
    """One parameter of an optimizer."""

    name: tuple[int, str] | None
    """Which model it belongs to, and its name there; None for a parameter of no model."""
    value: Any
    """Stored here only if it has no name."""
    state: Any


@dataclass(frozen=True)
class GroupState:
    settings: dict[str, Any]
    parameters: tuple[ParameterState, ...]


@dataclass(frozen=True)
class OptimizerState:
    kind: str
    groups: tuple[GroupState, ...]

    @property
    def parameters(self) -> list[ParameterState]:
        return [p for group in self.groups for p in group.parameters]


@dataclass(frozen=True)
class BatchState:
    source: int
    """Which of the step's loaders, in the order in which they were read."""
    index: int
    indices: Any
    """Its dataset indices, if the sampler is known."""
    value: Any
    random: Any


@dataclass(frozen=True)
class Steps:
    current: int
    total: int
    manual: int
    done: tuple[int, ...]
    last: int | None
    follows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Capsule:
    file: CapsuleFile
    report: Report
    environment: dict[str, Any]
    sources: dict[str, str]
    left_out: tuple[str, ...]
    steps: Steps
    suppressed: int
    """How many updates of this step the weights already contain."""
    models: tuple[ModelState, ...]
    optimizers: tuple[OptimizerState, ...]
    scalers: tuple[Any, ...]
    schedulers: tuple[tuple[str, Any], ...]
    random: Any
    batches: tuple[BatchState, ...]


def load(path: str | os.PathLike[str]) -> Capsule:
    """Reads a capsule; CapsuleError says in one line what is wrong with it."""
    file = CapsuleFile(path)
    try:
        return _Manifest(file).capsule()
    except (CapsuleError, ReportError) as error:
        raise CapsuleError(f"{os.fspath(path)}: {error}") from None
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
        raise CapsuleError(f"{os.fspath(path)}: corrupt capsule: the manifest is incomplete or malformed") from None


class _Manifest:
    """Decodes the manifest; malformed fields raise one of the errors that `load` expects."""

    def __init__(self, file: CapsuleFile) -> None:
        self._file, self._reader = file, Reader(file.stored)

    def capsule(self) -> Capsule:
        data = self._file.manifest
        return Capsule(
            file=self._file,
            report=Report.from_dict(as_dict(data["report"])),
            environment={as_text(k): v for k, v in as_dict(data["environment"]).items()},
            sources={as_text(k): as_text(v) for k, v in as_dict(data["sources"]).items()},
            left_out=tuple(as_text(t) for t in as_list(data["left_out"])),
            steps=_steps(as_dict(data["steps"]), len(as_list(data["optimizers"]))),
            suppressed=as_count(data["suppressed"]),
            models=tuple(self._model(as_dict(m)) for m in as_list(data["models"])),
            optimizers=tuple(self._optimizer(as_dict(o), len(data["models"])) for o in data["optimizers"]),
            scalers=tuple(as_dict(self._reader.value(s)) for s in as_list(data["scalers"])),
            schedulers=tuple((as_text(k), as_dict(self._reader.value(s))) for k, s in as_list(data["schedulers"])),
            random=self._random(data["random"]),
            batches=tuple(self._batch(as_dict(b)) for b in as_list(data["batches"])),
        )

    def _model(self, data: dict[str, Any]) -> ModelState:
        parameters = {as_text(n): self._tensor(v) for n, v in as_list(data["parameters"])}
        return ModelState(as_text(data["kind"]), parameters, {as_text(n): self._tensor(v) for n, v in data["buffers"]})

    def _tensor(self, node: Any) -> Any:
        value = self._reader.value(node)
        if not isinstance(value, Packed | Sparse | Missing):
            raise TypeError
        return value

    def _optimizer(self, data: dict[str, Any], models: int) -> OptimizerState:
        groups = []
        for group in map(as_dict, as_list(data["groups"])):
            settings = as_dict(self._reader.value(group["settings"]))
            parameters = tuple(self._parameter(p, models) for p in as_list(group["parameters"]))
            groups.append(GroupState({as_text(k): v for k, v in settings.items()}, parameters))
        return OptimizerState(as_text(data["kind"]), tuple(groups))

    def _parameter(self, node: Any, models: int) -> ParameterState:
        where, value, state = as_list(node)
        name = None
        if where is not None:
            at, inside = as_list(where)
            name = (as_count(at, models), as_text(inside))
        known = None if state is None else self._reader.value(state)
        return ParameterState(name, None if value is None else self._tensor(value), known)

    def _batch(self, data: dict[str, Any]) -> BatchState:
        value, random = self._reader.value(data["value"]), self._random(data["random"])
        indices = self._reader.value(data["indices"])
        return BatchState(as_count(data["source"]), as_count(data["index"]), indices, value, random)

    def _random(self, node: Any) -> Any:
        if node is None:
            return None
        random = as_dict(self._reader.value(node))
        if set(random) != {"python", "numpy", "torch", "cuda"} or not isinstance(random["torch"], Packed):
            raise ValueError
        if not all(isinstance(state, Packed) for state in as_list(random["cuda"])):
            raise TypeError
        return random


def _steps(data: dict[str, Any], optimizers: int) -> Steps:
    done = tuple(as_count(n) for n in as_list(data["done"]))
    if len(done) != optimizers:
        raise ValueError
    last = None if data["last"] is None else as_count(data["last"], optimizers)
    follows = tuple(
        (as_count(a, optimizers), as_count(b, optimizers)) for a, b in map(as_list, as_list(data["follows"]))
    )
    return Steps(as_count(data["current"]), as_count(data["total"]), as_count(data["manual"]), done, last, follows)
