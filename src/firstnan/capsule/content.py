"""A capsule as it was read: every field checked, no tensor in memory yet, and no torch needed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from firstnan.capsule.file import CapsuleError, Opened
from firstnan.capsule.values import Missing, Packed, Reader, Sparse
from firstnan.records import Report, ReportError


@dataclass(frozen=True)
class ModelState:
    kind: str
    parameters: dict[str, Any]
    buffers: dict[str, Any]


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer knows of one parameter: the place of its model and its name there, or its own value."""

    name: tuple[int, str] | None
    value: Any
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
    """Which of the program's loaders, in the order in which they were asked."""
    index: int
    indices: Any
    """Which elements of the dataset it was made of, if the sampler told."""
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
    opened: Opened
    report: Report
    environment: dict[str, Any]
    sources: dict[str, str]
    left_out: tuple[str, ...]
    steps: Steps
    suppressed: int
    """Updates of this step that are in the weights already."""
    models: tuple[ModelState, ...]
    optimizers: tuple[OptimizerState, ...]
    scalers: tuple[Any, ...]
    schedulers: tuple[tuple[str, Any], ...]
    random: Any
    batches: tuple[BatchState, ...]


def load(path: str | os.PathLike[str]) -> Capsule:
    """The capsule in a file; CapsuleError says in one line why there is none."""
    opened = Opened(path)
    try:
        return _Manifest(opened).capsule()
    except (CapsuleError, ReportError) as error:
        raise CapsuleError(f"{os.fspath(path)}: {error}") from None
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
        raise CapsuleError(f"{os.fspath(path)}: damaged: its content is not that of a capsule") from None


class _Manifest:
    """Reads the JSON of a capsule; what is not as it should be raises one of the errors that `load` expects."""

    def __init__(self, opened: Opened) -> None:
        self._opened, self._reader = opened, Reader(opened.stored)

    def capsule(self) -> Capsule:
        data = self._opened.manifest
        return Capsule(
            opened=self._opened,
            report=Report.from_dict(_table(data["report"])),
            environment={_text(k): v for k, v in _table(data["environment"]).items()},
            sources={_text(k): _text(v) for k, v in _table(data["sources"]).items()},
            left_out=tuple(_text(t) for t in _list(data["left_out"])),
            steps=_steps(_table(data["steps"]), len(_list(data["optimizers"]))),
            suppressed=_count(data["suppressed"]),
            models=tuple(self._model(_table(m)) for m in _list(data["models"])),
            optimizers=tuple(self._optimizer(_table(o), len(data["models"])) for o in data["optimizers"]),
            scalers=tuple(_table(self._reader.value(s)) for s in _list(data["scalers"])),
            schedulers=tuple((_text(k), _table(self._reader.value(s))) for k, s in _list(data["schedulers"])),
            random=self._random(data["random"]),
            batches=tuple(self._batch(_table(b)) for b in _list(data["batches"])),
        )

    def _model(self, data: dict[str, Any]) -> ModelState:
        parameters = {_text(n): self._elements(v) for n, v in _list(data["parameters"])}
        return ModelState(_text(data["kind"]), parameters, {_text(n): self._elements(v) for n, v in data["buffers"]})

    def _elements(self, node: Any) -> Any:
        value = self._reader.value(node)
        if not isinstance(value, Packed | Sparse | Missing):
            raise TypeError
        return value

    def _optimizer(self, data: dict[str, Any], models: int) -> OptimizerState:
        groups = []
        for group in map(_table, _list(data["groups"])):
            settings = _table(self._reader.value(group["settings"]))
            parameters = tuple(self._parameter(p, models) for p in _list(group["parameters"]))
            groups.append(GroupState({_text(k): v for k, v in settings.items()}, parameters))
        return OptimizerState(_text(data["kind"]), tuple(groups))

    def _parameter(self, node: Any, models: int) -> ParameterState:
        where, value, state = _list(node)
        name = None
        if where is not None:
            at, inside = _list(where)
            name = (_count(at, models), _text(inside))
        known = None if state is None else self._reader.value(state)
        return ParameterState(name, None if value is None else self._elements(value), known)

    def _batch(self, data: dict[str, Any]) -> BatchState:
        value, random = self._reader.value(data["value"]), self._random(data["random"])
        indices = self._reader.value(data["indices"])
        return BatchState(_count(data["source"]), _count(data["index"]), indices, value, random)

    def _random(self, node: Any) -> Any:
        if node is None:
            return None
        random = _table(self._reader.value(node))
        if set(random) != {"python", "numpy", "torch", "cuda"} or not isinstance(random["torch"], Packed):
            raise ValueError
        if not all(isinstance(state, Packed) for state in _list(random["cuda"])):
            raise TypeError
        return random


def _steps(data: dict[str, Any], optimizers: int) -> Steps:
    done = tuple(_count(n) for n in _list(data["done"]))
    if len(done) != optimizers:
        raise ValueError
    last = None if data["last"] is None else _count(data["last"], optimizers)
    follows = tuple((_count(a, optimizers), _count(b, optimizers)) for a, b in map(_list, _list(data["follows"])))
    return Steps(_count(data["current"]), _count(data["total"]), _count(data["manual"]), done, last, follows)


def _table(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise TypeError
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError
    return value


def _count(value: Any, below: int = 1 << 62) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError
    return value
