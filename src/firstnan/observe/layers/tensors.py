"""What is remembered of a layer's call and of the tensors between layers, and how a tensor is looked at."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from firstnan.observe.layers.choose import Layer
from firstnan.observe.layers.found import Found, Phase, What
from firstnan.tensors import finite

# What is known of the values of a tensor, the worst last. Negative infinity alone is often a mask, made on purpose.
UNKNOWN: Final = 0
WAITING: Final = 1
FINITE: Final = 2
ONLY_NEGATIVE_INF: Final = 3
BAD: Final = 4

_REMEMBERED = 4096
_MOST_PENDING = 8192

Size = tuple[float, float, float]
"""Norm, least and greatest value."""
Then = Callable[[int, Size | None], None]
Source = Tensor | tuple[tuple[int, ...], torch.dtype]
"""A tensor, or its shape and dtype where it must not be kept."""
Seen = tuple[str, "Known", Tensor, Any]
"""A tensor that a layer read or made: its place, what is known of it, itself, and its graph node at that moment."""
Passed = tuple[Layer, Tensor, int, Any, Tensor, int, Any]
"""A layer that made one tensor of one: each with its version and its graph node at that moment."""


class Call:
    """One call of a layer. It knows no tensor, so whoever keeps it keeps no memory of the model alive."""

    __slots__ = ("given", "in_step", "layer", "number", "thread")

    def __init__(self, layer: Layer, number: int, in_step: bool, thread: str) -> None:
        self.layer, self.number, self.in_step, self.thread = layer, number, in_step, thread
        self.given: dict[str, int] = {}
        """Place of an output -> the state of the gradient that arrived there."""

    def found(self, phase: Phase, what: What, place: str, source: Source) -> Found:
        tensor = source if isinstance(source, Tensor) else None
        about = outline(source) if isinstance(source, Tensor) else source
        who = (self.layer.name, self.layer.paths, self.layer.kind, self.number)
        return Found(*who, phase, what, place, tensor, *about, self.thread, self.in_step)


class Use:
    """One layer read the tensor."""

    __slots__ = ("call", "held", "made", "part", "place")

    def __init__(self, call: Call, place: str) -> None:
        self.call, self.place = call, place
        self.part = UNKNOWN
        """The state of what this layer alone added to the tensor's gradient, where that was looked at."""
        self.made: tuple[Known, int] | None = None
        """What the layer made of it, and its number among the outputs of its graph node, if that gradient is held."""
        self.held: list[tuple[Tensor | None, ...]] = []
        """The gradients that came to that node, until the gradient of the tensor itself comes."""


class Known:
    """One tensor as it was when a layer made it or read it: a write in place makes another of it."""

    __slots__ = ("hooked", "makers", "ref", "row", "size", "state", "told", "uses", "version")

    def __init__(self, t: Tensor, version: int) -> None:
        self.ref, self.version, self.state = weakref.ref(t), version, UNKNOWN
        self.size: Size | None = None
        self.told = self.hooked = False
        self.row = 0
        """How many gradients are held, this one included, until one of an earlier tensor speaks for them."""
        self.makers: list[tuple[Call, str]] = []
        self.uses: list[Use] = []


class Here(threading.local):
    """What one thread knows: how often each layer ran in this step, and the tensors that were seen last."""

    def __init__(self) -> None:
        self.thread, self.name = threading.get_ident(), threading.current_thread().name
        self.depth = 0
        """How many calls of a whole model are under way."""
        self.entered = -1
        """The step in which the outermost of them began."""
        self.recording = False
        """It was made with gradients."""
        self.again = self.blind = False
        """It is one that backward makes again; its tensors have no values."""
        self.chain: list[tuple[Call, list[Seen], list[Seen]]] = []
        """Calls in a row that the last one will speak for."""
        self.passed: list[Any] | None = None
        """Inside an ordinary call of a whole model: what its layers did and nobody thought about yet."""
        self.light = False
        """That call only takes notes."""
        self.put_off: list[list[Any]] = []
        """The notes of such calls."""
        self.looks_back = False
        """These notes are being looked at, after the call."""
        self._step = -1
        self._calls: dict[Layer, int] = {}
        self._repeats: dict[Layer, int] = {}
        self._seen: dict[int, Known] = {}

    def number(self, layer: Layer, step: int, again: bool) -> int:
        """Which call of the layer this is; a repeated one is the last that was not yet repeated."""
        if step != self._step:
            self._step = step
            self._calls.clear()
            self._repeats.clear()
        if again:
            self._repeats[layer] = self._repeats.get(layer, 0) + 1
            return max(0, self._calls.get(layer, 0) - self._repeats[layer])
        number = self._calls.get(layer, 0)
        self._calls[layer] = number + 1
        return number

    def known(self, t: Tensor, version: int) -> Known:
        """What is known of this tensor in this version."""
        known = self._seen.get(id(t))
        if known is not None:
            if known.version == version >= 0 and known.ref() is t:
                return known
            del self._seen[id(t)]
        elif len(self._seen) >= _REMEMBERED:
            del self._seen[next(iter(self._seen))]
        known = self._seen[id(t)] = Known(t, version)
        return known

    def before(self, t: Tensor) -> Known | None:
        """What is known of this tensor as it was when a layer last had it."""
        known = self._seen.get(id(t))
        return known if known is not None and known.ref() is t else None


class Waiting:
    """Values on devices where a read waits for the device: they are read together, once a step."""

    def __init__(self) -> None:
        self._pending: list[tuple[tuple[Tensor, ...], Then]] = []
        self._collected: deque[list[tuple[tuple[Tensor, ...], Then]]] = deque()

    def add(self, values: tuple[Tensor, ...], then: Then) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append((values, then))

    def collect(self) -> list[Tensor]:
        items, self._pending = self._pending, []
        if items:
            self._collected.append(items)
        return [value for values, _ in items for value in values]

    def judge(self, numbers: list[float]) -> None:
        """Goes on with the oldest that were collected, now that these are their numbers."""
        rest = iter(numbers)
        for values, then in self._collected.popleft() if self._collected else ():
            low, high, *norm = (next(rest) for _ in values)
            then(_state(low, high), (norm[0], low, high) if norm else None)

    def clear(self) -> None:
        self._pending.clear()
        self._collected.clear()


def version_of(t: Tensor) -> int:
    """How often it was written in place; -1 for a tensor that does not count."""
    try:
        return t._version
    except RuntimeError:  # made in inference mode
        return -1


def outline(t: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(t.shape), t.dtype


def floating(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor in it that can hold a NaN, with its place."""
    if type(value) is Tensor:
        return [(path, value)] if value.is_floating_point() or value.is_complex() else []
    return [(p, t) for p, t in finite.tensors_in(value, path) if t.is_floating_point() or t.is_complex()]


def examine(plain: Tensor, sized: bool) -> tuple[int, Size | None]:
    """Reads a tensor now: its state, and its size if that is wanted."""
    if not sized and finite.surely_finite(plain):
        return FINITE, None
    low, high = finite.extremes(plain) or (0.0, 0.0)
    if not sized:
        return _state(low, high), None
    norm = finite.norms([plain]).item()
    if math.isinf(norm) and math.isfinite(low) and math.isfinite(high):
        norm = finite.norms([plain.double()]).item()
    return _state(low, high), (norm, low, high)


def values_of(plain: Tensor, sized: bool) -> tuple[Tensor, ...]:
    """What `examine` would read, left where it is."""
    low, high = torch.aminmax(plain)
    return (low, high, finite.norms([plain])[0]) if sized else (low, high)


def _state(low: float, high: float) -> int:
    """A NaN among the values makes both of these NaN, and every comparison false."""
    if high < math.inf:
        return FINITE if low > -math.inf else ONLY_NEGATIVE_INF
    return BAD
