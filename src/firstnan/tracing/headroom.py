"""How near risky operators come to where their result is no longer finite: the arguments they read in a few steps."""

from __future__ import annotations

import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from firstnan.observe.higher_order import accept, call_chosen_branch
from firstnan.observe.patches import Patches
from firstnan.observe.sites import Ownership, Spot, resolve
from firstnan.records import Headroom
from firstnan.records.operator_families import MATRIX_PRODUCTS
from firstnan.tensors.finite import read_all, readable
from firstnan.tracing.operators import plain_name

_MOST_PLACES = 4096
_SHOWN = 16

Ends = Literal["min", "max"]


class _Risk(NamedTuple):
    position: int
    """Which argument may go wrong."""
    ends: Ends
    magnitude: bool
    """Whether its sign does not matter."""
    limit: Callable[[torch.dtype], float]


def _zero(dtype: torch.dtype) -> float:
    return 0.0


def _largest_exponent(base: float) -> Callable[[torch.dtype], float]:
    return lambda dtype: math.log(torch.finfo(dtype).max, base)


_RISKS = {
    **dict.fromkeys(("log", "log2", "log10"), _Risk(0, "min", False, _zero)),
    "log1p": _Risk(0, "min", False, lambda dtype: -1.0),
    **dict.fromkeys(("sqrt", "rsqrt"), _Risk(0, "min", False, _zero)),
    "reciprocal": _Risk(0, "min", True, _zero),
    "div": _Risk(1, "min", True, _zero),
    **dict.fromkeys(("exp", "expm1"), _Risk(0, "max", False, _largest_exponent(math.e))),
    "exp2": _Risk(0, "max", False, _largest_exponent(2.0)),
}
_Place = tuple[str, int, int]
"""An operator, and the code and instruction that calls it, by identity."""


class _Seen(NamedTuple):
    op: str
    ends: Ends
    value: float
    step: int
    limit: float
    tiny: float
    spot: Spot

    @property
    def room(self) -> float:
        """How often the distance to the limit, or the result, may still double: 0 at the limit."""
        if self.ends == "max":
            exponent = self.op in _RISKS
            return (self.limit - self.value) / math.log(2) if exponent else math.log2(self.limit / max(self.value, 1.0))
        return math.log2(max(self.value - self.limit, self.tiny) / self.tiny)


class RiskyOperators:
    """What the risky operators of the sampled steps have read; `start` and `stop` enclose the forward pass of one."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._seen: dict[_Place, _Seen] = {}
        """The nearest miss of each operator at each place."""
        self._mode: _Sample | None = None
        self._waiting: list[tuple[str, Ends, float, float, Spot, Tensor]] = []
        self._patches = Patches()

    def start(self) -> None:
        """Looks at every operator of this thread from now on."""
        accept(_Sample)
        call_chosen_branch(self._patches, _Sample)
        self._mode = _Sample(self._ran)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    @property
    def running(self) -> bool:
        return self._mode is not None

    def stop(self, step: int) -> None:
        """The forward pass of this step is over: reads what was found, all at once."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.on = False
        self._patches.remove()
        if mode.thread == threading.get_ident() and _get_current_dispatch_mode() is mode:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with torch.no_grad():
            numbers = read_all([value for *_, value in waiting])
        for (op, ends, limit, tiny, spot, _), number in zip(waiting, numbers, strict=True):
            seen = _Seen(op, ends, number, step, limit, tiny, spot)
            key = (op, id(spot[0]), spot[1])
            before = self._seen.get(key)
            nearer = before is None or seen.room < before.room
            if math.isfinite(number) and nearer and (before is not None or len(self._seen) < _MOST_PLACES):
                self._seen[key] = seen

    def nearest(self) -> tuple[Headroom, ...]:
        """The nearest misses, the nearest first."""
        found = sorted(self._seen.values(), key=lambda seen: seen.room)[:_SHOWN]
        sites = [(seen, resolve(seen.spot)) for seen in found]
        return tuple(
            Headroom(s.op, site.file, site.line, site.code, s.ends, s.value, s.step, s.limit) for s, site in sites
        )

    def _ran(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if not torch.is_grad_enabled():
            return
        risk = _RISKS.get(name)
        if risk is not None:
            value = readable(args[risk.position]) if len(args) > risk.position else None
            ends, limit = risk.ends, risk.limit
        elif name in MATRIX_PRODUCTS and isinstance(result, Tensor) and result.dtype is torch.float16:
            value, ends, limit = readable(result), "max", lambda dtype: torch.finfo(dtype).max
        else:
            return
        if value is None or not value.numel():
            return
        spot = self._ownership.spots(sys._getframe(2))[0]
        if spot is None:
            return
        low, high = torch.aminmax(value.abs() if risk is None or risk.magnitude else value)
        about = torch.finfo(value.dtype)
        self._waiting.append((name, ends, limit(value.dtype), about.tiny, spot, low if ends == "min" else high))


class _Sample(TorchDispatchMode):
    """Tells which operators run."""

    supports_higher_order_operators = True

    def __init__(self, ran: Callable[[str, tuple[Any, ...], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._ran = ran
        self.on = True
        self.thread = threading.get_ident()
        self._names: dict[int, str] = {}
        _running.add(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.on:
            name = self._names.get(id(func))
            if name is None:
                name = self._names[id(func)] = plain_name(getattr(func, "__name__", str(func)))
            try:
                self._ran(name, args, result)
            except Exception:  # one operator less in a sample
                self.on = False
        return result


_running: weakref.WeakSet[_Sample] = weakref.WeakSet()


def _stop_in_child() -> None:
    for mode in _running:
        mode.on = False


os.register_at_fork(after_in_child=_stop_in_child)
