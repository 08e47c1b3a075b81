"""How near risky operators come to where their result is no longer finite: the arguments they read in a few steps."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from firstnan.gate.forecast import Course, Fall
from firstnan.observe.higher_order import accept, call_chosen_branch
from firstnan.observe.patches import Patches
from firstnan.observe.sites import Ownership, Spot, resolve
from firstnan.records import Forecast, Headroom
from firstnan.records.operator_families import (
    ATTENTION,
    CARRIERS,
    EXTREMES,
    FLOORS,
    MATRIX_PRODUCTS,
    NORMS,
    PRODUCTS,
    SOFTMAXES,
    SPREADS,
    SUMS,
    words,
)
from firstnan.tensors.finite import read_all, readable
from firstnan.tracing.operators import plain_name

_MOST_PLACES = 4096
_SHOWN = 16
_ATTENTION = "attention"
_MOST_SAMPLES, _LAST_QUERIES, _MOST_ROWS = 4, 16, 4096
"""Of attention only so much is read: samples, queries, rows of weights."""

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
_POWER = _Risk(0, "min", False, _zero)
"""A power with an exponent between 0 and 1: its derivative at 0 is infinite, as that of a root."""
_Place = tuple[str, int, int]
"""An operator, and the code and instruction that calls it, by identity."""

_POSITIVE = (SOFTMAXES | SPREADS | NORMS | words("abs exp exp2 relu sigmoid softplus sqrt square")) - {"log_softmax"}
"""Operators whose result cannot be negative, and those whose result is not if nothing that they read is:"""
_SHARES = (SOFTMAXES | words("sigmoid")) - {"log_softmax"}
_STAYS_POSITIVE = (CARRIERS | SUMS | EXTREMES) | words("add cat cumsum div mul")
_NEAR_EXPONENT = 0.25
"""An exponent is followed from this share of the largest on, a float16 result if it may still double so often:"""
_NEAR_LARGEST = 6.0
_WIDE_HORIZON = 3.0
_NEAR_ZERO = 0.2
"""And what sinks to zero when it has sunk by this share of all halvings from 1 to the smallest number."""
_WIDE = 1e30
_LARGE = 2.0**40
"""In types with the range of float32 a result is followed from this size on."""
_GROWING = PRODUCTS | words("cumsum pow square sum")
"""Operators whose results are measured, and in float16 also:"""
_GROWING_HALF = _GROWING | words("add to")
_NEAR_ONE_HOT, _ONE_HOT = 10.0, 1e9
"""Attention is followed when its entropy is this many times below the largest; far below that its gradients vanish."""


class _Seen(NamedTuple):
    op: str
    ends: Ends
    value: float
    step: int
    limit: float
    tiny: float
    spot: Spot
    is_positive: bool
    """Whether what it reads cannot pass zero, however it was computed."""
    is_tensor: bool
    """Whether it is not a plain number."""

    @property
    def room(self) -> float:
        """How often the distance to the limit, or the result, may still double: 0 at the limit."""
        if self.ends == "max":
            exponent = self.op in _RISKS
            size = max(self.value, self.tiny)
            return (self.limit - self.value) / math.log(2) if exponent else math.log2(self.limit / size)
        return math.log2(max(self.value - self.limit, self.tiny) / self.tiny)

    @property
    def is_wide_result(self) -> bool:
        """Whether this is a result in a wide type, which is only followed: it is hardly ever near its limit."""
        return self.ends == "max" and self.op not in _RISKS and self.limit > _WIDE

    def add_to(self, course: Course) -> Forecast | None:
        """Adds this to the course of its place, as a number that rises towards a limit."""
        if self.op == _ATTENTION:
            value, what = 1.0 / max(self.value, self.tiny), self._place
            return course.add("attention", "entropy", what, self.step, value, _ONE_HOT, near=_NEAR_ONE_HOT)
        if self.ends == "min":
            value, limit = 1.0 / max(self.value - self.limit, self.tiny), 1.0 / self.tiny
            near = limit**_NEAR_ZERO
            if self.is_tensor and self._risk.magnitude and limit > _WIDE:  # the gradient divides by the square
                limit = math.sqrt(limit)
            return course.add("operator", "min", self._named, self.step, value, limit, near=near)
        if self.op in _RISKS:
            near, value = _NEAR_EXPONENT * self.limit, self.value
            return course.add(
                "operator", "max", self._named, self.step, value, self.limit,
                near=near, risen=2.0, doubles=False,
            )  # fmt: skip
        if self.is_wide_result:
            kind = "float32" if self.limit < _WIDE**2 else "float64"
            return course.add(
                "operator", kind, self._named, self.step, self.value, self.limit, near=_LARGE, horizon=_WIDE_HORIZON
            )
        near = self.limit / 2.0**_NEAR_LARGEST
        return course.add("operator", "float16", self._named, self.step, self.value, self.limit, near=near)

    def add_to_fall(self, fall: Fall) -> Forecast | None:
        """Adds this to the fall of its place, if what it reads may pass its limit."""
        if self.is_positive or self.ends == "max" or self.op == _ATTENTION or self._risk.magnitude:
            return None
        return fall.add(self._named, self.step, self.value - self.limit, self.tiny)

    @property
    def _risk(self) -> _Risk:
        return _RISKS.get(self.op, _POWER)

    def _place(self) -> str:
        site = resolve(self.spot)
        return f"{os.path.basename(site.file)}:{site.line}"

    def _named(self) -> str:
        return f"{self.op} at {self._place()}"


class RiskyOperators:
    """What the risky operators of the sampled steps have read; `start` and `stop` enclose the forward pass of one."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._seen: dict[_Place, _Seen] = {}
        """The nearest miss of each operator at each place."""
        self._courses: dict[_Place, tuple[Course, Fall]] = {}
        self._divisors: dict[_Place, float] = {}
        """The last divisor that is a plain number, of each place."""
        self._differences: dict[int, tuple[Tensor, float]] = {}
        """By address, what was subtracted from a number in this pass, and the smallest difference there can be."""
        self._positive: dict[int, Tensor] = {}
        """By address, what cannot be negative in this pass."""
        self._shares: dict[int, Tensor] = {}
        """By address, what is between 0 and 1 in this pass: 1 minus it cannot be negative."""
        self._told: dict[str, _Place] = {}
        """Whose forecast holds, by the line that it names."""
        self._mode: _Sample | None = None
        self._waiting: list[tuple[str, Ends, float, float, Spot, bool, bool, Tensor]] = []
        self._weights: list[tuple[Tensor, Spot]] = []
        """The results of softmax in this pass: those that are multiplied with something are attention."""
        self._patches = Patches()
        self.approaching = False
        """Whether something that is near its limit came nearer in the last sample."""

    def start(self) -> None:
        """Looks at every operator of this thread from now on."""
        accept(_Sample)
        call_chosen_branch(self._patches, _Sample)
        self._mode = _Sample(self._ran)
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own

    @property
    def running(self) -> bool:
        return self._mode is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operators that run meanwhile are our own."""
        mode = self._mode
        on = mode is not None and mode.on
        if mode is not None:
            mode.on = False
        try:
            yield
        finally:
            if mode is not None:
                mode.on = on

    def stop(self, step: int) -> list[Forecast]:
        """The forward pass of this step is over: reads what was found, all at once, and says what is to be expected."""
        mode, self._mode = self._mode, None
        if mode is None:
            return []
        mode.on = False
        self._patches.remove()
        if mode.thread == threading.get_ident() and _get_current_dispatch_mode() is mode:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
        waiting, self._waiting, self._weights = self._waiting, [], []
        self._differences, self._positive, self._shares = {}, {}, {}
        self.approaching = False
        if not waiting:
            return []
        with torch.no_grad():
            numbers = read_all([value for *_, value in waiting])
        nearest: dict[_Place, _Seen] = {}
        for (op, ends, limit, tiny, spot, *is_what, _), number in zip(waiting, numbers, strict=True):
            seen = _Seen(op, ends, number, step, limit, tiny, spot, *is_what)
            key = (op, id(spot[0]), spot[1])
            if math.isfinite(number) and (key not in nearest or seen.room < nearest[key].room):
                nearest[key] = seen
        return [forecast for key, seen in nearest.items() for forecast in self._noted(key, seen)]

    def _noted(self, key: _Place, seen: _Seen) -> list[Forecast]:
        """Keeps the nearest miss of one place in this sample."""
        before = self._seen.get(key)
        if key not in self._courses and len(self._courses) >= _MOST_PLACES:
            return []
        if (before is None or seen.room < before.room) and not seen.is_wide_result:
            self._seen[key] = seen
        course = self._courses.get(key)
        if course is None:
            course = self._courses[key] = Course(), Fall()
        news = seen.add_to(course[0]), seen.add_to_fall(course[1])
        self.approaching = self.approaching or any(c.nearer for c in course)
        return [forecast for forecast in news if forecast is not None and self._is_new(key, forecast)]

    def _is_new(self, key: _Place, forecast: Forecast) -> bool:
        """Whether no other call on the same line has told one: its result, and what reads it, get there together."""
        line = forecast.name.rpartition(" ")[2]
        if self._told.setdefault(line, key) != key:
            return False
        if forecast.withdrawn is not None:
            del self._told[line]
        return True

    def nearest(self) -> tuple[Headroom, ...]:
        """The nearest misses, the nearest first."""
        risky = [seen for seen in self._seen.values() if seen.op != _ATTENTION]
        found = sorted(risky, key=lambda seen: seen.room)[:_SHOWN]
        sites = [(seen, resolve(seen.spot)) for seen in found]
        return tuple(
            Headroom(s.op, site.file, site.line, site.code, s.ends, s.value, s.step, s.limit) for s, site in sites
        )

    def _ran(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if isinstance(result, Tensor) and self._is_positive(name, args):
            self._positive[_address(result)] = result
        if isinstance(result, Tensor) and name in _SHARES:
            self._shares[_address(result)] = result
        exponent = args[1] if name == "pow" and len(args) > 1 else None
        if isinstance(exponent, float | int) and exponent < 0:
            name = "reciprocal"
        is_root = isinstance(exponent, float | int) and 0 < exponent < 1
        risk = _POWER if is_root else _RISKS.get(name)
        if risk is not None:
            given = args[risk.position] if len(args) > risk.position else None
            value = readable(given) if isinstance(given, Tensor) else self._changed(name, given, result)
            ends, limit = risk.ends, risk.limit
        elif name == "rsub":
            if len(args) > 1 and isinstance(args[1], int | float) and isinstance(result, Tensor):
                self._differences[_address(result)] = result, abs(args[1]) * torch.finfo(result.dtype).eps / 2
            return
        elif name in ATTENTION:
            self._fused(args, kwargs)
            return
        elif name in SOFTMAXES:
            self._softmax(name, result)
            return
        elif name in _GROWING_HALF and isinstance(result, Tensor) and result.is_floating_point():
            if self._weights and name in MATRIX_PRODUCTS:
                self._multiplied(args)
            if name not in _GROWING and result.dtype is not torch.float16:
                return
            if name == "to":  # float16, but not of weights or data
                if args[0].is_leaf or args[0].dtype is torch.float16:
                    return
                name = "cast"
            value, ends, limit = readable(result), "max", lambda dtype: torch.finfo(dtype).max
        else:
            return
        if value is None or not value.numel():
            return
        spot = self._ownership.spots(sys._getframe(2))[0]
        if spot is None:
            return
        if risk is None:
            low = high = torch.linalg.vector_norm(value, math.inf)
        else:
            low, high = torch.aminmax(value.abs() if risk.magnitude else value)
        tiny = torch.finfo(value.dtype).tiny
        address = _address(value)
        if ends == "min" and address in self._differences:
            tiny = max(tiny, self._differences[address][1])
        number, positive = low if ends == "min" else high, address in self._positive
        is_tensor = risk is None or isinstance(args[risk.position], Tensor)
        self._waiting.append((name, ends, limit(value.dtype), tiny, spot, positive, is_tensor, number))

    def _is_positive(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether the result of an operator cannot be negative, whatever the weights become."""
        if name == "pow":
            return len(args) > 1 and isinstance(args[1], int | float) and args[1] % 2 == 0
        if name == "rsub":
            return len(args) > 1 and _address(args[0]) in self._shares and not args[1] < 1
        if name in FLOORS and len(args) > 1 and isinstance(args[1], int | float) and args[1] >= 0:
            return True
        if name not in _STAYS_POSITIVE or not args:
            return name in _POSITIVE
        given = args[0] if isinstance(args[0], list | tuple) else args
        if name == "mul" and given[0] is given[1]:
            return True
        return all(
            _address(a) in self._positive if isinstance(a, Tensor) and a.is_floating_point() else _not_negative(a)
            for a in given
        )

    def _changed(self, name: str, number: Any, result: Any) -> Tensor | None:
        """A divisor that is a plain number and another one than in the sample before: a constant is no risk."""
        spot = self._ownership.spots(sys._getframe(3))[0]
        if not isinstance(number, int | float) or not isinstance(result, Tensor) or spot is None:
            return None
        key = (name, id(spot[0]), spot[1])
        before, self._divisors[key] = self._divisors.get(key, number), number
        return torch.tensor(number, dtype=result.dtype) if before != number else None

    def _softmax(self, name: str, result: Any) -> None:
        """A softmax is attention if a product reads it."""
        plain = readable(result) if name != "log_softmax" and isinstance(result, Tensor) else None
        spot = self._ownership.spots(sys._getframe(3))[0] if plain is not None and plain.dim() > 1 else None
        if plain is not None and spot is not None and plain.size(-1) > 1:
            self._weights.append((plain, spot))

    def _multiplied(self, args: tuple[Any, ...]) -> None:
        """A product: of attention weights, if its first factor shares their memory."""
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is None:
            return
        pointer = _address(first)
        for i, (weights, spot) in enumerate(self._weights):
            if _address(weights) == pointer:
                del self._weights[i]
                self._attends(weights, spot)
                return

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Fused attention keeps no weights: those of the last queries are computed again, without dropout.

        The last ones see all keys, also in causal attention. Attention with a mask is left out: without the mask the
        weights would be others.
        """
        query, key = (readable(a) for a in args[:2])
        masked = any(isinstance(a, Tensor) for a in args[3:]) or kwargs.get("attn_mask") is not None
        if query is None or key is None or masked or query.dim() != 4 or key.size(-2) < 2:
            return
        if query.size(1) != key.size(1) or query.size(-2) > key.size(-2):
            return
        spot = self._ownership.spots(sys._getframe(3))[0]
        if spot is None:
            return
        scale = kwargs.get("scale") or query.size(-1) ** -0.5
        some = query[:_MOST_SAMPLES, :, -_LAST_QUERIES:].float() * scale
        self._attends((some @ key[:_MOST_SAMPLES].float().transpose(-1, -2)).softmax(-1), spot)

    def _attends(self, weights: Tensor, spot: Spot) -> None:
        """Notes the entropy of attention weights, as a share of the largest: 1 if all are equal, 0 if one has all.

        It is the median of all rows: with logits that grow, it falls exponentially, and the mean would not.
        """
        some = weights.detach().reshape(-1, weights.size(-1))[-_MOST_ROWS:].float()
        entropy = torch.special.entr(some).sum(-1).median() / math.log(weights.size(-1))
        self._waiting.append((_ATTENTION, "min", 0.0, 1e-30, spot, True, True, entropy))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _not_negative(argument: Any) -> bool:
    return not isinstance(argument, float) or argument >= 0


_OURS = ("firstnan.gate.", "firstnan.observe.layers.", "firstnan.tensors.")
"""Where tensors of the program are measured: the operators called there are not the program's."""


class _Sample(TorchDispatchMode):
    """Tells which operators run."""

    supports_higher_order_operators = True

    def __init__(self, ran: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]) -> None:
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
        if self.on and not sys._getframe(1).f_globals.get("__name__", "").startswith(_OURS):
            name = self._names.get(id(func))
            if name is None:
                name = self._names[id(func)] = plain_name(getattr(func, "__name__", str(func)))
            try:
                with torch._C.DisableTorchFunction():  # a function mode of the program sees nothing of this
                    self._ran(name, args, kwargs or {}, result)
            except Exception:  # one operator less in a sample
                self.on = False
        return result


_running: weakref.WeakSet[_Sample] = weakref.WeakSet()


def _stop_in_child() -> None:
    for mode in _running:
        mode.on = False


os.register_at_fork(after_in_child=_stop_in_child)
