"""Checks without a detector: of any value, of a model's gradients, of its weights."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from firstnan.observe.sites import Spot, resolve
from firstnan.records import NaNEvent, Noticed, Report, TensorStat
from firstnan.tensors.finite import dtype_name, extremes, is_finite, readable, stat, tensors_in
from firstnan.tensors.models import readable_path

T = TypeVar("T")
Problem = Literal["nonfinite", "extreme", "all_zero", "constant", "never_updated", "missing"]

# Above these, squares and products of two such numbers overflow (in float16, products with an ordinary number).
_EXTREME = {torch.float16: 1e4, torch.float64: 1e150}
_EXTREME_USUAL = 1e15
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


def check(x: T, name: str = "") -> T:
    """Returns `x` unchanged, or raises NonFiniteError if a tensor in it holds a NaN or Inf.

    `x` is a tensor or a container of tensors: tuple, list, dict, dataclass. Anything without values to read passes:
    integers, None, tensors inside `vmap` or similar, and everything that `torch.compile` or `torch.fx` traces.
    A string raises TypeError, since it is surely a mistake.
    """
    if torch.compiler.is_compiling() or isinstance(x, torch.fx.Proxy):
        return x
    if isinstance(x, str | bytes):
        raise TypeError(f"x must be a tensor or a container of tensors, got {_short(x)}")
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {_short(name)}")
    bad = _first_bad(x)
    if bad is not None:
        caller = sys._getframe(1)
        from firstnan.report import nonfinite_error

        raise nonfinite_error(_report_of(bad, name, (caller.f_code, caller.f_lasti)))
    return x


def _short(given: Any) -> str:
    return repr(given) if isinstance(given, str | bytes | int | float | None) else type(given).__name__


def _model(given: Any) -> nn.Module:
    if not isinstance(given, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {_short(given)}")
    return given


def _first_bad(x: Any) -> TensorStat | None:
    try:
        return next((stat(place, t) for place, t in tensors_in(x) if not is_finite(t)), None)
    except Exception:  # A proxy, a fake tensor, a container of the user's: no reason to stop the program.
        return None


def _report_of(bad: TensorStat, name: str, spot: Spot) -> Report:
    from firstnan.records.words import place

    site = resolve(spot)
    label = (name or site.code or "a value") + bad.name
    message = f"{label} at {place(site)}: {_facts(bad)}"
    event = NaNEvent(
        "nonfinite", message, tensor=bad, rank=_rank(), thread=threading.current_thread().name, time=time.time()
    )
    return Report("nonfinite", noticed=Noticed("value", label), events=(event,), rank=event.rank, notes=(message,))


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
    """The weight, or the gradient if that is the problem."""
    text: str


def check_gradients(model: nn.Module) -> list[Finding]:
    """Problems with the current gradients of a model; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN or Inf. extreme: so large that squares overflow, or entirely subnormal. missing: no gradient,
    although other parameters have one. all_zero: the gradient of a weight of two or more dimensions is exactly zero
    although others are not, for example because of dead units; not reported while a weight that starts at zero (LoRA,
    ReZero, the last layer of a residual block) still blocks gradients but is about to change.
    """
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
            findings.append(_finding(w.name, values.problem or "extreme", gradient, text))
        elif w.is_matrix and values.is_zero and stuck:
            findings.append(_finding(w.name, "all_zero", gradient, "the gradient is exactly zero, but others are not"))
    return findings


def check_weights(model: nn.Module, *optimizers: Any) -> list[Finding]:
    """Problems with the parameters and buffers of a model; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN, or an Inf in a trained parameter (elsewhere it may be intended). extreme: so large that squares
    overflow, or entirely subnormal. constant: all elements of a dense layer's weight are equal. all_zero: a weight and
    its gradient are exactly zero and nothing is about to change that; biases and layers that start at zero are fine.
    never_updated, if optimizers are given: a parameter that requires gradients is in none of them, or its optimizer
    has state for other parameters but not for this one, because it never had a gradient.
    """
    weights = _weights(_model(model))
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizers must be torch.optim.Optimizer objects, got {_short(optimizer)}")
    never = _never_updated(weights, optimizers)
    stuck = _is_stuck(weights)
    findings = []
    for w in weights:
        values, trains = w.values, w.tensor.requires_grad
        if values.problem and (trains or values.problem == "extreme" or values.has_nan):
            findings.append(_finding(w.name, values.problem, w.tensor, values.description))
        elif trains and w.is_matrix:
            # In float16 the first updates of a weight that starts at zero are subnormal.
            if values.is_subnormal and w.tensor.dtype is not torch.float16:
                findings.append(_finding(w.name, "extreme", w.tensor, values.description))
            elif values.is_zero and w.gradient.is_zero and stuck:
                findings.append(_finding(w.name, "all_zero", w.tensor, "is exactly zero, and so is its gradient"))
            elif values.is_constant and not values.is_zero and w.is_dense:
                text = "has equal elements, so all units of the layer are the same"
                findings.append(_finding(w.name, "constant", w.tensor, text))
        if w.name in never:
            findings.append(_finding(w.name, "never_updated", w.tensor, never[w.name]))
    for name, buffer in model.named_buffers():
        if _Values(buffer).has_nan:
            findings.append(_finding(readable_path(name), "nonfinite", buffer, "this buffer is non-finite"))
    return findings


def _finding(name: str, problem: Problem, tensor: Tensor, text: str) -> Finding:
    # These two problems do not depend on the values.
    unread = problem in ("missing", "never_updated")
    facts = TensorStat(name, tuple(tensor.shape), dtype_name(tensor)) if unread else stat(name, tensor)
    return Finding(name, problem, facts, f"{name}: {text}: {_facts(facts)}")


class _Values:
    """What the minimum and maximum say about a tensor; no problem if there is no tensor or it cannot be read."""

    def __init__(self, t: Tensor | None) -> None:
        self.low = self.high = 0.0
        self._dtype = torch.float32
        self._whole = self._known = False
        try:
            plain = readable(t)
            ends = extremes(plain) if plain is not None else None
        except Exception:  # a tensor subclass of the user's
            return
        if t is not None and plain is not None and ends is not None:
            self.low, self.high = ends
            self._dtype, self._known = plain.dtype, True
            self._whole = plain.numel() >= t.numel()  # The local part of a sharded tensor may well be zero.

    @property
    def problem(self) -> Literal["nonfinite", "extreme"] | None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "nonfinite"
        return "extreme" if self._size > _EXTREME.get(self._dtype, _EXTREME_USUAL) else None

    @property
    def description(self) -> str:
        if self.problem == "nonfinite":
            return "is non-finite"
        return "is so large that its squares overflow" if self.problem else "is almost too small for its dtype"

    @property
    def _size(self) -> float:
        return max(-self.low, self.high)

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
        return self._whole and 0 < self._size < torch.finfo(self._dtype).smallest_normal


@dataclass
class _Weight:
    """A parameter with its readable name."""

    name: str
    tensor: Tensor
    is_dense: bool

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
                weights.setdefault(id(parameter), _Weight(full, parameter, isinstance(module, _DENSE_LAYERS)))
    return list(weights.values())


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
