"""Checks without a detector: of any value, of a model's gradients, of its weights."""

from __future__ import annotations

import ast
import math
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from numbers import Real
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from firstnan.observe.sites import Spot, ends_at_origin, resolve
from firstnan.records import NaNEvent, Noticed, Report, TensorStat
from firstnan.tensors.finite import dtype_name, extremes, is_finite, readable, stat, tensors_in
from firstnan.tensors.models import readable_path

T = TypeVar("T")
Problem = Literal["nonfinite", "extreme", "all_zero", "constant", "never_updated", "missing", "dead_units"]

# Above these, squares and products of two such numbers overflow (in float16, products with an ordinary number).
_EXTREME = {torch.float16: 1e4, torch.float64: 1e150}
_EXTREME_USUAL = 1e15
_OUTLIER = 1000.0
"""How many times the root mean square of the others a single element may be."""
_SMALL = 1e-2
"""Smaller weights count as this much, since those that start near zero grow by any factor."""
_FEW_UNITS, _DEAD = 8, 0.9
"""More dead units than this share are a problem; with a batch of one, half of the units of a ReLU have no gradient."""
_SIBLINGS = 3
# Layers whose units are all the same if the elements of their weight are equal.
_DENSE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,
)
_UNITS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weight has one row per unit."""


def check(x: T, name: str = "") -> T:
    """Returns `x` unchanged, or raises NonFiniteError if there is a NaN or Inf in it.

    `x` is a tensor, a number, a numpy array, or a container of them: tuple, list, dict, dataclass. Anything without
    values to read passes: None, tensors inside `vmap` or similar, and everything that `torch.compile` or `torch.fx`
    traces. A string or a module raises TypeError, since it is surely a mistake.
    """
    __tracebackhide__ = True
    if torch.compiler.is_compiling() or isinstance(x, torch.fx.Proxy):
        return x
    if isinstance(x, nn.Module):
        raise TypeError(f"x must hold values, got the module {type(x).__name__}; check_weights(x) reads its weights")
    if isinstance(x, str | bytes):
        raise TypeError(f"x must be a tensor, a number, an array or a container of them, got {_short(x)}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {_short(name)}")
    bad = _first_bad(x)
    if bad is not None:
        caller = sys._getframe(1)
        from firstnan.report import nonfinite_error

        raise ends_at_origin(nonfinite_error(_report_of(bad, name, (caller.f_code, caller.f_lasti))))
    return x


def _short(given: Any) -> str:
    return repr(given) if isinstance(given, str | bytes | int | float | None) else type(given).__name__


def _model(given: Any) -> nn.Module:
    if not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_short(given)}")
    return given


def _first_bad(x: Any) -> TensorStat | None:
    try:
        bad = next((stat(place, t) for place, t in tensors_in(x) if not is_finite(t)), None)
        return bad or next((found for place, value in _numbers_in(x) if (found := _bad_numbers(place, value))), None)
    except Exception:  # A proxy, a fake tensor, a container of the user's: no reason to stop the program.
        return None


_DEPTH = 8


def _numbers_in(x: Any, place: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    """The numbers, lists of numbers and arrays in a value, other than tensors, each with its place."""
    array = hasattr(x, "__array__") and not isinstance(x, Tensor | nn.Module | type)
    plain_list = isinstance(x, list | tuple) and len(x) > 1 and all(type(member) is float for member in x)
    if isinstance(x, float | complex) or array or plain_list:
        yield place, x
    elif depth and isinstance(x, list | tuple | set | frozenset):
        for at, member in enumerate(x):
            yield from _numbers_in(member, f"{place}[{at}]", depth - 1)
    elif depth and isinstance(x, Mapping):
        for key, member in x.items():
            yield from _numbers_in(member, f"{place}[{key!r}]", depth - 1)
    elif depth and is_dataclass(x) and not isinstance(x, type):
        for field in fields(x):
            yield from _numbers_in(getattr(x, field.name, None), f"{place}.{field.name}", depth - 1)


def _bad_numbers(place: str, value: Any) -> TensorStat | None:
    """What is known of numbers that are not all finite."""
    if isinstance(value, list | tuple):
        if all(map(math.isfinite, value)):
            return None
        return replace(stat(place, torch.tensor(value, dtype=torch.float64)), dtype="float")
    if isinstance(value, float | complex) and not hasattr(value, "__array__"):
        finite = math.isfinite(value.real) and math.isfinite(value.imag)
        return None if finite else replace(stat(place, torch.tensor(value)), dtype=type(value).__name__)
    array = value.__array__()
    if array.dtype.kind not in "fc" or not array.size:
        return None
    known = array.astype("float64" if array.dtype.kind == "f" else "complex128")  # a copy: torch warns of others
    tensor = torch.from_numpy(known)
    return None if is_finite(tensor) else replace(stat(place, tensor), dtype=str(array.dtype))


def _report_of(bad: TensorStat, name: str, spot: Spot) -> Report:
    from firstnan.records.words import place

    site = resolve(spot)
    label = (name or _argument(site.code) or "a value") + bad.name
    message = f"{label} at {place(site)}: {_facts(bad)}"
    event = NaNEvent(
        "nonfinite", message, tensor=bad, rank=_rank(), thread=threading.current_thread().name, time=time.time()
    )
    return Report("nonfinite", noticed=Noticed("value", label), events=(event,), rank=event.rank, notes=(message,))


def _argument(code: str) -> str:
    """What was checked, as the program calls it: `x` of `firstnan.check(x)`."""
    try:
        call = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError):
        return code
    given = [*call.args, *(k.value for k in call.keywords if k.arg == "x")] if isinstance(call, ast.Call) else []
    return (ast.get_source_segment(code, given[0]) if given else None) or code


def _facts(tensor: TensorStat) -> str:
    """`NaN 3, Inf 1 of 4096, first at [0, 17], the rest -3.2 … 8.1, [8, 512] float32`."""
    from firstnan.report.text import tensor_facts

    return ", ".join([*tensor_facts(replace(tensor, binary=False)), f"{list(tensor.shape)} {tensor.dtype}"])


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem with a parameter; `text` describes it in one line."""

    name: str
    problem: Problem
    tensor: TensorStat
    """The weight or buffer, or the gradient if that is the problem."""
    text: str
    parameter: TensorStat | None = None
    """The weight beside a gradient that is the problem."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Finding {self.problem}: {self.text}>"


def check_gradients(model: nn.Module, *, max_abs: float | None = None) -> list[Finding]:
    """Problems with the current gradients of a model; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN or Inf. extreme: above `max_abs`, or without it so large that squares overflow, or entirely
    subnormal. missing: no gradient, although other parameters have one. dead_units: more than nine in ten units of a
    layer never fire in this batch. all_zero: the gradient of a weight of two or more dimensions is exactly zero
    although others are not; not reported while a weight that starts at zero (LoRA, ReZero, the last layer of a
    residual block) still blocks gradients but is about to change. Each text ends with the range of the parameter.
    """
    _bound("max_abs", max_abs)
    weights = [w for w in _weights(_model(model)) if w.tensor.requires_grad]
    given = any(w.tensor.grad is not None for w in weights)
    stuck = _is_stuck(weights)
    findings = []
    for w in weights:
        gradient, values = w.tensor.grad, w.gradient
        if gradient is None:
            if given:
                findings.append(_finding(w.name, "missing", w.tensor, "has no gradient, but other parameters do"))
        elif values.problem or (w.is_matrix and values.is_subnormal):
            text = f"the gradient {values.description}"
            findings.append(_beside(w, values.problem or "extreme", gradient, text))
        elif max_abs is not None and values.size > max_abs:
            findings.append(_beside(w, "extreme", gradient, f"the gradient exceeds max_abs={max_abs:g}"))
        elif w.is_matrix and values.is_zero and stuck:
            findings.append(_beside(w, "all_zero", gradient, "the gradient is exactly zero, but others are not"))
        elif (dead := _dead_units(w, weights)) is not None:
            findings.append(_beside(w, "dead_units", gradient, dead))
    return findings


def check_weights(
    model: nn.Module,
    *optimizers: Any,
    since: Mapping[str, Any] | None = None,
    max_abs: float | None = None,
    max_gain: float = 100.0,
    max_ratio: float = 100.0,
    max_growth: float = 10.0,
) -> list[Finding]:
    """Problems with the parameters and buffers of a model; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN, or an Inf in a trained parameter or in the statistics of a norm layer (elsewhere it may be
    intended). extreme: so large that squares overflow, entirely subnormal, or unusual for this tensor: an element above
    `max_abs`, or a thousand times the others; a layer that makes its input more than `max_gain` times larger (the root
    mean square of its weight times the root of the fan-in; initialisers give about 1); a weight more than `max_ratio`
    times as large as those of the same shape; more than `max_growth` times as large as in `since`, an earlier
    `model.state_dict()` (which shares its tensors with the model: keep a copy). dead_units: as in `check_gradients`.
    constant: all elements of a dense layer's weight are equal. all_zero: a weight and its gradient are exactly zero and
    nothing is about to change that; biases and layers that start at zero are fine. never_updated, if optimizers are
    given: a parameter that requires gradients is in none of them, or its optimizer has state for other parameters but
    not for this one, because it never had a gradient.
    """
    weights = _weights(_model(model))
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizers must be torch.optim.Optimizer objects, got {_short(optimizer)}")
    for name, bound in (("max_gain", max_gain), ("max_ratio", max_ratio), ("max_growth", max_growth)):
        _bound(name, bound, needed=True)
    _bound("max_abs", max_abs)
    if since is not None and not isinstance(since, Mapping):
        raise TypeError(f"since must be a state dict, got {_short(since)}")
    if since and {w.name for w in weights}.isdisjoint(readable_path(str(name)) for name in since):
        raise ValueError("since must be an earlier state dict of this model, got one without any of its parameters")
    never = _never_updated(weights, optimizers)
    stuck = _is_stuck(weights)
    unusual = _Unusual(weights, since or {}, max_abs, max_gain, max_ratio, max_growth)
    findings = []
    for w in weights:
        values, trains = w.values, w.tensor.requires_grad
        if values.problem and (trains or values.problem == "extreme" or values.has_nan):
            findings.append(_finding(w.name, values.problem, w.tensor, values.description))
        elif trains and (odd := unusual.about(w)) is not None:
            findings.append(_finding(w.name, "extreme", w.tensor, odd))
        elif trains and w.is_matrix:
            # In float16 the first updates of a weight that starts at zero are subnormal.
            if values.is_subnormal and w.tensor.dtype is not torch.float16:
                findings.append(_finding(w.name, "extreme", w.tensor, values.description))
            elif values.is_zero and w.gradient.is_zero and stuck:
                findings.append(_finding(w.name, "all_zero", w.tensor, "is exactly zero, and so is its gradient"))
            elif values.is_constant and not values.is_zero and w.is_dense:
                text = "has equal elements, so all units of the layer are identical"
                findings.append(_finding(w.name, "constant", w.tensor, text))
            elif (dead := _dead_units(w, weights)) is not None:
                findings.append(_finding(w.name, "dead_units", w.tensor, dead))
        if w.name in never:
            findings.append(_finding(w.name, "never_updated", w.tensor, never[w.name]))
    return [*findings, *_bad_buffers(model)]


def _bound(name: str, value: Any, *, needed: bool = False) -> None:
    if value is None and not needed:
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive number, got {_short(value)}")
    if not float(value) > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


_NORM_LAYERS = (nn.modules.batchnorm._NormBase,)


def _bad_buffers(model: nn.Module) -> Iterator[Finding]:
    """Buffers with a NaN, and statistics of norm layers that no batch of finite numbers has."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name, values = readable_path(f"{path}.{key}" if path else key), _Values(buffer)
            if values.has_nan:
                yield _finding(name, "nonfinite", buffer, "this buffer is non-finite")
            elif isinstance(module, _NORM_LAYERS) and buffer.is_floating_point():
                if values.problem:
                    yield _finding(name, values.problem, buffer, f"this buffer {values.description}")
                elif key == "running_var" and values.low < 0:
                    yield _finding(name, "extreme", buffer, "a variance is negative")


class _Unusual:
    """What is extreme for one tensor: compared with its fan-in, its own elements, its siblings and its past."""

    def __init__(
        self,
        weights: list[_Weight],
        since: Mapping[str, Any],
        max_abs: float | None,
        max_gain: float,
        max_ratio: float,
        max_growth: float,
    ) -> None:
        self._max_abs, self._max_gain, self._max_ratio, self._max_growth = max_abs, max_gain, max_ratio, max_growth
        self._before = {readable_path(str(name)): value for name, value in since.items() if isinstance(value, Tensor)}
        self._siblings: dict[Any, list[float]] = defaultdict(list)
        for w in weights:
            self._siblings[self._kind(w)].append(w.values.mean_square)

    def _kind(self, w: _Weight) -> Any:
        return tuple(w.tensor.shape), w.name.rpartition(".")[2], w.layer

    def about(self, w: _Weight) -> str | None:
        """Why the tensor is unusual; None if it is not."""
        size, usual = w.values.size, w.values.mean_square
        if self._max_abs is not None and size > self._max_abs:
            return f"exceeds max_abs={self._max_abs:g}"
        if size > _OUTLIER * (others := max(w.values.without_largest, _SMALL)):
            return f"one element is {size / others:.3g} times as large as the others"
        if w.fan_in is not None and usual * math.sqrt(w.fan_in) > self._max_gain:
            gain = usual * math.sqrt(w.fan_in)
            return f"makes its input about {gain:.3g} times larger (fan-in {w.fan_in}; initialisers give about 1)"
        siblings = self._siblings[self._kind(w)]
        if len(siblings) > _SIBLINGS and usual > self._max_ratio * (others := max(median(siblings), _SMALL)):
            return f"is {usual / others:.3g} times as large as the others of its kind"
        before = self._before.get(w.name)
        if before is not None and before.shape == w.tensor.shape:
            then = max(_Values(before).mean_square, _SMALL)
            if usual > self._max_growth * then:
                return f"is {usual / then:.3g} times as large as it was"
        return None


def _finding(name: str, problem: Problem, tensor: Tensor, text: str) -> Finding:
    # These two problems do not depend on the values.
    unread = problem in ("missing", "never_updated")
    facts = TensorStat(name, tuple(tensor.shape), dtype_name(tensor)) if unread else stat(name, tensor)
    return Finding(name, problem, facts, f"{name}: {text}: {_facts(facts)}")


def _beside(w: _Weight, problem: Problem, gradient: Tensor, text: str) -> Finding:
    """A problem with a gradient, with the range of its parameter."""
    from firstnan.report.text import tensor_facts

    found, parameter = _finding(w.name, problem, gradient, text), stat(w.name, w.tensor)
    facts = ", ".join(tensor_facts(replace(parameter, binary=False))[:2])
    return replace(found, text=f"{found.text}; the parameter: {facts}", parameter=parameter)


class _Values:
    """What the minimum and maximum say about a tensor; no problem if there is no tensor or it cannot be read."""

    def __init__(self, t: Tensor | None) -> None:
        self.low = self.high = 0.0
        self._dtype = torch.float32
        self._whole = self._known = False
        self._plain: Tensor | None = None
        try:
            plain = readable(t)
            ends = extremes(plain) if plain is not None else None
        except Exception:  # a tensor subclass of the user's
            return
        if t is not None and plain is not None and ends is not None:
            self.low, self.high = ends
            self._dtype, self._known = plain.dtype, True
            self._whole = plain.numel() >= t.numel()  # The local part of a sharded tensor may well be zero.
            self._plain = plain

    @property
    def problem(self) -> Literal["nonfinite", "extreme"] | None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "nonfinite"
        return "extreme" if self.size > _EXTREME.get(self._dtype, _EXTREME_USUAL) else None

    @property
    def description(self) -> str:
        if self.problem == "nonfinite":
            return "is non-finite"
        return "is so large that its squares overflow" if self.problem else "is almost too small for its dtype"

    @property
    def size(self) -> float:
        return max(-self.low, self.high)

    @cached_property
    def _squares(self) -> float:
        if self._plain is None or not self._plain.is_floating_point() or not math.isfinite(self.size):
            return 0.0
        return float(torch.linalg.vector_norm(self._plain.detach(), dtype=torch.float64)) ** 2

    @property
    def mean_square(self) -> float:
        """The root mean square of the elements."""
        count = self._plain.numel() if self._plain is not None else 0
        return math.sqrt(self._squares / count) if count else 0.0

    @property
    def without_largest(self) -> float:
        """The same without the largest element; infinite if there are too few to compare."""
        count = self._plain.numel() if self._plain is not None else 0
        return math.sqrt(max(self._squares - self.size**2, 0.0) / (count - 1)) if count > _FEW_UNITS else math.inf

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.low)

    @property
    def is_constant(self) -> bool:
        return self._whole and self.low == self.high

    @property
    def is_zero(self) -> bool:
        return self.is_constant and self.low == 0

    @property
    def is_nonzero(self) -> bool:
        return self._known and not self.low == self.high == 0

    @property
    def is_subnormal(self) -> bool:
        return self._whole and 0 < self.size < torch.finfo(self._dtype).smallest_normal


@dataclass
class _Weight:
    """A parameter with its readable name."""

    name: str
    tensor: Tensor
    layer: type[nn.Module]

    @property
    def is_dense(self) -> bool:
        return issubclass(self.layer, _DENSE_LAYERS)

    @property
    def fan_in(self) -> int | None:
        """How many inputs each unit sums up; None unless inputs are multiplied with the tensor."""
        if not self.is_dense or issubclass(self.layer, nn.Embedding) or self.tensor.dim() < 2:
            return None
        return self.tensor[0].numel()

    @cached_property
    def values(self) -> _Values:
        return _Values(self.tensor)

    @cached_property
    def gradient(self) -> _Values:
        return _Values(self.tensor.grad)

    @property
    def is_matrix(self) -> bool:
        """False for scales and biases, with any dimensions of size one: those are often zero or constant by design."""
        return sum(n > 1 for n in self.tensor.shape) > 1

    @property
    def starts_at_zero(self) -> bool:
        """Zero before its first update; until then no gradient gets through it."""
        bias = "bias" in self.name.rpartition(".")[2]
        return self.tensor.requires_grad and not bias and self.values.is_zero and self.gradient.is_nonzero


def _weights(model: nn.Module) -> list[_Weight]:
    """Every parameter of the model, each once."""
    weights: dict[int, _Weight] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                full = readable_path(f"{path}.{name}" if path else name)
                weights.setdefault(id(parameter), _Weight(full, parameter, type(module)))
    return list(weights.values())


def _dead_units(w: _Weight, weights: list[_Weight]) -> str | None:
    """How many units of a layer never fire, if nearly all of them: neither they nor what they feed have a gradient.

    A unit without a gradient alone may be an output that this batch does not train.
    """
    gradient = w.tensor.grad
    if gradient is None or w.fan_in is None or not issubclass(w.layer, _UNITS) or not w.gradient.is_nonzero:
        return None
    units = len(gradient)
    if units < _FEW_UNITS or gradient.layout is not torch.strided:
        return None
    dead = (gradient.detach().flatten(1) == 0).all(1)
    count = int(dead.sum())
    if count <= _DEAD * units:
        return None
    for other in weights:
        after = other.tensor.grad
        if after is None or other is w or other.fan_in is None or other.fan_in % units or not other.gradient.is_nonzero:
            continue
        unused = (after.detach().reshape(len(after), units, -1) == 0).all(2).all(0)
        if bool(unused[dead].all()):
            return f"{count} of {units} units are dead: neither they nor what they feed have a gradient"
    return None


def _is_stuck(weights: list[_Weight]) -> bool:
    """Whether a zero gradient stays zero: others are not zero, and no weight that starts at zero blocks it."""
    return any(w.gradient.is_nonzero for w in weights) and not any(w.starts_at_zero for w in weights)


def _never_updated(weights: list[_Weight], optimizers: tuple[Any, ...]) -> dict[str, str]:
    """Name of each parameter that no optimizer has updated -> why."""
    names = {id(w.tensor): w.name for w in weights if w.tensor.requires_grad}
    held = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    left = names.keys() - {id(p) for parameters in held for p in parameters}
    if left == names.keys():  # The optimizers hold other tensors, such as copies in full precision.
        return {}
    never = {names[key]: "requires gradients but is in no optimizer" for key in left}
    for optimizer, parameters in zip(optimizers, held, strict=True):
        idle = [p for p in parameters if not _was_updated(optimizer.state.get(p))]
        # LBFGS keeps all its state under the first parameter.
        if len(idle) < len(parameters) and [id(p) for p in idle] != [id(p) for p in parameters[1:]]:
            never |= {names[id(p)]: "was never updated, but others were" for p in idle if id(p) in names}
    return never


def _was_updated(state: Any) -> bool:
    if not isinstance(state, dict):
        return state is not None
    if (step := state.get("step")) is not None:  # Adagrad creates its state before the first step.
        return float(step) > 0
    return any(value is not None for value in state.values())
