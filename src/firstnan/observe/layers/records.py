"""Records of layer calls and of the tensors between layers, and the functions that read a tensor."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from firstnan.observe.layers.choose_layers import Layer
from firstnan.observe.layers.finding import LayerFinding, Phase, What
from firstnan.tensors import finite

# States of a tensor's values, the worst last. Negative infinity alone is often an intended mask.
UNKNOWN: Final = 0
WAITING: Final = 1
FINITE: Final = 2
ONLY_NEGATIVE_INF: Final = 3
BAD: Final = 4

_REMEMBERED = 4096
_MOST_PENDING = 8192

Size = tuple[float, ...]
"""Norm, minimum and maximum; then, if they were counted, the shares of zeros and of subnormal numbers."""
Continuation = Callable[[int, Size | None], None]
Source = Tensor | tuple[tuple[int, ...], torch.dtype]
"""A tensor, or its shape and dtype if it must not be kept alive."""
SeenTensor = tuple[str, "TensorRecord", Tensor, Any]
"""An input or output of a layer: its place in the container, its record, the tensor, its graph node at that time."""
LayerNote = tuple[Layer, Tensor, int, Any, Tensor, int, Any]
"""A layer with one input and one output: both tensors, each with its version and its graph node at that time."""


class ModelCall:
    """One call of a model: what was reported in its forward pass."""

    __slots__ = ("first", "layers")

    def __init__(self) -> None:
        self.first: LayerFinding | None = None
        self.layers: list[str] = []

    def add(self, found: LayerFinding) -> None:
        self.first = self.first or found
        self.layers.append(found.layer)

    def is_inside(self, layer: Layer) -> bool:
        """Whether something inside this container was reported."""
        if layer.paths == (layer.kind,):  # the model itself
            return bool(self.layers)
        return any(name.startswith(path + ".") for name in self.layers for path in layer.paths)


class LayerCall:
    """One call of a layer. It refers to no tensor, so keeping it keeps no tensor alive."""

    __slots__ = ("given", "in_step", "layer", "model_call", "number", "thread")

    def __init__(self, layer: Layer, number: int, in_step: bool, thread: str, model_call: ModelCall) -> None:
        self.layer, self.number, self.in_step, self.thread = layer, number, in_step, thread
        self.model_call = model_call
        self.given: dict[str, int] = {}
        """Place of an output -> the state of the gradient that arrived for it."""

    def finding(self, phase: Phase, what: What, place: str, source: Source) -> LayerFinding:
        tensor = source if isinstance(source, Tensor) else None
        about = shape_and_dtype(source) if isinstance(source, Tensor) else source
        who = (self.layer.name, self.layer.paths, self.layer.kind, self.number)
        return LayerFinding(*who, phase, what, place, tensor, *about, self.thread, self.in_step)


class TensorUse:
    """A call of a layer that has read the tensor."""

    __slots__ = ("call", "held", "output", "part", "place")

    def __init__(self, call: LayerCall, place: str) -> None:
        self.call, self.place = call, place
        self.part = UNKNOWN
        """The state of this layer's own contribution to the tensor's gradient, if it was read."""
        self.output: tuple[TensorRecord, int] | None = None
        """The layer's output and its number among the outputs of its graph node, if its gradient is held."""
        self.held: list[tuple[Tensor | None, ...]] = []
        """The gradients that arrived at that node, held until the gradient of this tensor arrives."""


class TensorRecord:
    """One version of a tensor that a layer has read or made; a write in place starts a new record."""

    __slots__ = ("held_count", "hooked", "producers", "ref", "reported", "size", "state", "uses", "version")

    def __init__(self, t: Tensor, version: int) -> None:
        self.ref, self.version, self.state = weakref.ref(t), version, UNKNOWN
        self.size: Size | None = None
        self.reported = self.hooked = False
        self.held_count = 0
        """The number of gradients held, this one included, until the gradient of an earlier tensor is read for all."""
        self.producers: list[tuple[LayerCall, str]] = []
        self.uses: list[TensorUse] = []


class ThreadState(threading.local):
    """The state of one thread: how often each layer ran in this step, and records of recent tensors."""

    def __init__(self) -> None:
        self.ident, self.name = threading.get_ident(), threading.current_thread().name
        self.depth = 0
        """The number of nested model calls."""
        self.entered = -1
        """The step in which the outermost of them began."""
        self.recording = False
        """Whether gradients were enabled when it began."""
        self.recomputing = self.unreadable = False
        """Whether backward is recomputing it; whether its tensors have no values to read."""
        self.chain: list[tuple[LayerCall, list[SeenTensor], list[SeenTensor]]] = []
        """Consecutive calls that will be judged by the output of the last one."""
        self.notes: list[Any] | None = None
        """Inside an ordinary model call: what its layers did, not processed yet."""
        self.notes_only = False
        """Whether this model call only takes notes, and reads no tensor."""
        self.deferred: list[list[Any]] = []
        """The notes of such calls."""
        self.model_call = ModelCall()
        """The call of a model that is running, or was the last."""
        self.reading_notes = False
        """Whether deferred notes are being read, after their call."""
        self._step = -1
        self._calls: dict[Layer, int] = {}
        self._repeats: dict[Layer, int] = {}
        self._seen: dict[int, TensorRecord] = {}

    def number(self, layer: Layer, step: int, recomputing: bool) -> int:
        """The number of this call of the layer; a recomputed call has the number of the last one not yet recomputed."""
        if step != self._step:
            self._step = step
            self._calls.clear()
            self._repeats.clear()
        if recomputing:
            self._repeats[layer] = self._repeats.get(layer, 0) + 1
            return max(0, self._calls.get(layer, 0) - self._repeats[layer])
        number = self._calls.get(layer, 0)
        self._calls[layer] = number + 1
        return number

    def count_anew(self) -> None:
        """The calls of each layer are counted from 0 again."""
        self._step = -1

    def record(self, t: Tensor, version: int) -> TensorRecord:
        """The record of this version of the tensor, a new one if there is none."""
        record = self._seen.get(id(t))
        if record is not None:
            if record.version == version >= 0 and record.ref() is t:
                return record
            del self._seen[id(t)]
        elif len(self._seen) >= _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        record = self._seen[id(t)] = TensorRecord(t, version)
        return record

    def last_record(self, t: Tensor) -> TensorRecord | None:
        """The record of the version of this tensor that a layer last read or made."""
        record = self._seen.get(id(t))
        return record if record is not None and record.ref() is t else None


class PendingReads:
    """Scalars on devices where reading waits for the device: they are read together, once a step."""

    def __init__(self) -> None:
        self._pending: list[tuple[tuple[Tensor, ...], Continuation]] = []
        self._collected: deque[list[tuple[tuple[Tensor, ...], Continuation]]] = deque()

    def add(self, values: tuple[Tensor, ...], then: Continuation) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append((values, then))

    def collect(self) -> list[Tensor]:
        items, self._pending = self._pending, []
        if items:
            self._collected.append(items)
        return [value for values, _ in items for value in values]

    def judge(self, numbers: list[float]) -> None:
        """Calls the continuations of the oldest collected scalars with these numbers, their values."""
        rest = iter(numbers)
        for values, then in self._collected.popleft() if self._collected else ():
            low, high, *norm = (next(rest) for _ in values)
            then(_state(low, high), (norm[0], low, high) if norm else None)

    def clear(self) -> None:
        self._pending.clear()
        self._collected.clear()


def version_of(t: Tensor) -> int:
    """How often the tensor was written in place; -1 if it does not count writes."""
    try:
        return t._version
    except RuntimeError:  # made in inference mode
        return -1


def shape_and_dtype(t: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.dtype


def floating_tensors(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor in `value` that can hold a NaN, with its place."""
    if type(value) is Tensor:
        return [(path, value)] if value.is_floating_point() or value.is_complex() else []
    return [(p, t) for p, t in finite.tensors_in(value, path) if t.is_floating_point() or t.is_complex()]


def examine(plain: Tensor, sized: bool, counted: bool = False) -> tuple[int, Size | None]:
    """Reads a tensor now: its state, and its size if `sized`; with `counted`, its zeros and subnormal numbers too."""
    if not sized and finite.surely_finite(plain):
        return FINITE, None
    low, high = finite.extremes(plain) or (0.0, 0.0)
    if not sized:
        return _state(low, high), None
    norm = finite.norms([plain]).item()
    if math.isinf(norm) and math.isfinite(low) and math.isfinite(high):
        norm = finite.norms([plain.double()]).item()
    return _state(low, high), (norm, low, high, *(finite.shares(plain) if counted else ()))


def values_of(plain: Tensor, sized: bool) -> tuple[Tensor, ...]:
    """The scalars that `examine` would read, left on the device."""
    low, high = torch.aminmax(plain)
    return (low, high, finite.norms([plain])[0]) if sized else (low, high)


def _state(low: float, high: float) -> int:
    """The state of values with this minimum and maximum; a NaN makes both NaN, and every comparison false."""
    if high < math.inf:
        return FINITE if low > -math.inf else ONLY_NEGATIVE_INF
    return BAD
