"""Follows the user's code line by line, to find the first line that makes a variable non-finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from firstnan.observe.sites import Ownership, Spot
from firstnan.tensors.finite import is_finite


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
