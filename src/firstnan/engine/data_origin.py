"""Where bad data was created: fetches the samples of a batch again, one by one, and looks inside the Dataset."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from firstnan.diagnose.blame import blame
from firstnan.observe.sites import Ownership, Spot, resolve, whole_statement
from firstnan.records import Origin, Trace
from firstnan.tensors.finite import is_finite, stat, tensors_in
from firstnan.tensors.state import Handout, RandomState
from firstnan.tracing.tracer import Tracer

_MOST_SAMPLES = 512


def find_maker(iterator: Any, handout: Handout, ownership: Ownership) -> tuple[Origin, Trace] | None:
    """The line inside the Dataset that creates a non-finite value of this batch, if it is created again."""
    dataset, indices = getattr(iterator, "_dataset", None), handout.indices
    if dataset is None or not isinstance(indices, list | tuple) or not hasattr(dataset, "__getitem__"):
        return None
    state = RandomState.now()
    try:
        for index in _suspects(handout.batch, list(indices)):
            found = _fetch(dataset, index, ownership)
            if found is not None:
                return found
    finally:
        state.restore()
    return None


def bad_rows(batch: Any, size: int | None = None) -> tuple[int, ...]:
    """The samples of a batch that hold a non-finite value; only tensors with `size` rows count, if that is known."""
    rows: set[int] = set()
    for _, t in tensors_in(batch, "batch"):
        if t.dim() and size in (None, t.shape[0]) and not is_finite(t):
            dense = t if t.layout is torch.strided else t.to_dense()
            rows.update((~torch.isfinite(dense)).reshape(t.shape[0], -1).any(1).nonzero().flatten().tolist())
    return tuple(sorted(rows))


def _suspects(batch: Any, indices: list[Any]) -> list[Any]:
    rows = [r for r in bad_rows(batch) if r < len(indices)]
    return [indices[r] for r in rows[:_MOST_SAMPLES]] or indices[:_MOST_SAMPLES]


def _fetch(dataset: Any, index: Any, ownership: Ownership) -> tuple[Origin, Trace] | None:
    tracer, lines = Tracer(ownership), LineWatch(ownership)
    tracer.at(region="data")
    try:
        with tracer, lines.watching():
            sample = dataset[index]
    except Exception:  # Fetching again is not part of the program, so its errors must not reach the program.
        return None
    events = [e for _, t in tensors_in(sample) if (e := tracer.last_bad(t)) is not None]
    trace = tracer.trace()
    verdict = blame(trace, events)
    origin = verdict.origin
    if origin is not None and origin.event is not None and origin.event.born and "lift_fresh" not in origin.aten:
        return origin, trace
    if lines.first is not None:
        spot, name, value = lines.first
        s = stat(name, value)
        return Origin(
            "input", "", "", site=whole_statement(resolve(spot)), inputs=(s,), produced=s, role="input", label=name
        ), trace
    return None


class LineWatch:
    """Checks the variables of user code after each line and keeps the first line that makes one non-finite."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self._found: tuple[Spot, str, Tensor] | None = None
        self._infinite: tuple[Spot, str, Tensor] | None = None
        """A Python number that is infinite; often only the start of a minimum, so any other finding is preferred."""
        self._before: dict[int, tuple[Spot, set[str]]] = {}

    @property
    def first(self) -> tuple[Spot, str, Tensor] | None:
        return self._found or self._infinite

    @contextmanager
    def watching(self) -> Iterator[None]:
        previous = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(previous)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._found is not None or not self.ownership.owns(frame.f_code):
            return None
        self._before[id(frame)] = ((frame.f_code, frame.f_lasti), self._bad(frame))
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._found is None and event in ("line", "return"):
            spot, known = self._before.get(id(frame), ((frame.f_code, frame.f_lasti), set()))
            bad = self._bad(frame)
            for name in sorted(bad - known):
                value = frame.f_locals[name]
                if not (isinstance(value, float) and math.isinf(value)):
                    self._found = (spot, name, _as_tensor(value))
                    break
                self._infinite = self._infinite or (spot, name, _as_tensor(value))
            self._before[id(frame)] = ((frame.f_code, frame.f_lasti), bad)
        return self._line

    def _bad(self, frame: FrameType) -> set[str]:
        return {name for name, value in frame.f_locals.items() if _is_bad(value)}


def _is_bad(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Tensor):
        return not is_finite(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind != "f" or not hasattr(value, "__array__"):
        return False
    numpy = sys.modules["numpy"]
    return not bool(numpy.isfinite(value).all())


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, float):
        return torch.tensor(value)
    return torch.as_tensor(sys.modules["numpy"].asarray(value))
