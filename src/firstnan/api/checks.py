"""Checks that stand alone: a value in the middle of any code, the gradients of a model, its weights."""

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
from firstnan.tensors.names import readable_path

T = TypeVar("T")
Problem = Literal["nonfinite", "extreme", "all_zero", "constant", "never_updated", "missing"]

# Beyond these, squares and products of two such numbers overflow (in float16 those with an ordinary number do).
_EXTREME = {torch.float16: 1e4, torch.float64: 1e150}
_EXTREME_USUAL = 1e15
# Layers that map all inputs to all outputs: a weight with equal elements makes all their units the same one.
_MAPS = (
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.modules.conv._ConvNd,
)


def check(x: T, name: str = "") -> T:
    """Returns `x` unchanged, or raises NonFiniteError where a tensor in it holds a NaN or Inf.

    `x` is a tensor or anything that holds tensors: tuples, lists, dicts, dataclasses. What has no values to read
    passes: integers, None, tensors inside `vmap` and the like, and all that `torch.compile` or `torch.fx` traces.
    A text is refused as a mistake.
    """
    if torch.compiler.is_compiling() or isinstance(x, torch.fx.Proxy):
        return x
    if isinstance(x, str | bytes):
        raise TypeError(f"check reads a tensor, or what holds tensors, not {_short(x)}")
    if not isinstance(name, str):
        raise TypeError(f"the name that check is given is a text, not {_short(name)}")
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
        raise TypeError(f"what is checked is a model, a torch.nn.Module, not {_short(given)}")
    return given


def _first_bad(x: Any) -> TensorStat | None:
    try:
        return next((stat(place, t) for place, t in tensors_in(x) if not is_finite(t)), None)
    except Exception:  # A proxy, a fake, somebody's own container: no reason to stop the program.
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
    from firstnan.report.tensors import tensor_facts

    return ", ".join([*tensor_facts(replace(tensor, binary=False)), f"{list(tensor.shape)} {tensor.dtype}"])


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing about a parameter that is worth a look; `text` says it in a line."""

    name: str
    problem: Problem
    tensor: TensorStat
    """The weight, or the gradient where that is what is wrong."""
    text: str


def check_gradients(model: nn.Module) -> list[Finding]:
    """What is wrong with the gradients that a model has now; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN or Inf. extreme: so large that squares overflow, or all of it subnormal. missing: no gradient,
    although other parameters have one. all_zero: the gradient of a weight of two or more dimensions is exactly zero
    although others are not, as behind dead units; not told while a weight that begins at zero (LoRA, ReZero, the last
    layer of a residual block) is about to let gradients through.
    """
    weights = [w for w in _weights(_model(model)) if w.tensor.requires_grad]
    given = any(w.tensor.grad is not None for w in weights)
    stuck = _is_stuck(weights)
    findings = []
    for w in weights:
        gradient, values = w.tensor.grad, w.gradient
        if gradient is None:
            if given:
                findings.append(_finding(w.name, "missing", w.tensor, "has no gradient, other parameters have one"))
        elif values.problem or (w.is_matrix and values.is_subnormal):
            findings.append(_finding(w.name, values.problem or "extreme", gradient, f"the gradient {values.words}"))
        elif w.is_matrix and values.is_zero and stuck:
            findings.append(_finding(w.name, "all_zero", gradient, "the gradient is exactly zero, others are not"))
    return findings


def check_weights(model: nn.Module, *optimizers: Any) -> list[Finding]:
    """What is wrong with the parameters and buffers of a model; raises nothing, and a healthy model has no findings.

    nonfinite: a NaN, or an Inf in what trains (elsewhere it may be meant). extreme: so large that squares overflow, or
    all of it subnormal. constant: all elements of the weight of a linear map are equal. all_zero: a weight and its
    gradient are exactly zero and nothing is about to change that; biases and layers that begin at zero are fine.
    never_updated, where the optimizers are given: a parameter that requires gradients is in none of them, or its
    optimizer has kept no state for it although it has for others, since it never had a gradient.
    """
    weights = _weights(_model(model))
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"an optimizer is a torch.optim.Optimizer, not {_short(optimizer)}")
    never = _never_updated(weights, optimizers)
    stuck = _is_stuck(weights)
    findings = []
    for w in weights:
        values, trains = w.values, w.tensor.requires_grad
        if values.problem and (trains or values.problem == "extreme" or values.has_nan):
            findings.append(_finding(w.name, values.problem, w.tensor, values.words))
        elif trains and w.is_matrix:
            # In float16 the first updates of a weight that begins at zero are subnormal.
            if values.is_subnormal and w.tensor.dtype is not torch.float16:
                findings.append(_finding(w.name, "extreme", w.tensor, values.words))
            elif values.is_zero and w.gradient.is_zero and stuck:
                findings.append(_finding(w.name, "all_zero", w.tensor, "is exactly zero, and so is its gradient"))
            elif values.is_constant and not values.is_zero and w.is_map:
                findings.append(_finding(w.name, "constant", w.tensor, "has equal elements, so its units are alike"))
        if w.name in never:
            findings.append(_finding(w.name, "never_updated", w.tensor, never[w.name]))
    for name, buffer in model.named_buffers():
        if _Values(buffer).has_nan:
            findings.append(_finding(readable_path(name), "nonfinite", buffer, "(a buffer) is not finite"))
    return findings


def _finding(name: str, problem: Problem, tensor: Tensor, says: str) -> Finding:
    # Those two say nothing of its values.
    unread = problem in ("missing", "never_updated")
    facts = TensorStat(name, tuple(tensor.shape), dtype_name(tensor)) if unread else stat(name, tensor)
    return Finding(name, problem, facts, f"{name}: {says}: {_facts(facts)}")


class _Values:
    """What least and greatest value say of a tensor; nothing, where there is none or it cannot be read."""

    def __init__(self, t: Tensor | None) -> None:
        self.low = self.high = 0.0
        self._dtype = torch.float32
        self._whole = self._known = False
        try:
            plain = readable(t)
            ends = extremes(plain) if plain is not None else None
        except Exception:  # somebody's own kind of tensor
            return
        if t is not None and plain is not None and ends is not None:
            self.low, self.high = ends
            self._dtype, self._known = plain.dtype, True
            self._whole = plain.numel() >= t.numel()  # A part of a sharded tensor may well be zero.

    @property
    def problem(self) -> Literal["nonfinite", "extreme"] | None:
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return "nonfinite"
        return "extreme" if self._size > _EXTREME.get(self._dtype, _EXTREME_USUAL) else None

    @property
    def words(self) -> str:
        if self.problem == "nonfinite":
            return "is not finite"
        return "is so large that its squares overflow" if self.problem else "is almost too small for its type"

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
    def moves(self) -> bool:
        return self._known and not self.low == self.high == 0

    @property
    def is_subnormal(self) -> bool:
        return self._whole and 0 < self._size < torch.finfo(self._dtype).smallest_normal


@dataclass
class _Weight:
    """A parameter under the name people know."""

    name: str
    tensor: Tensor
    is_map: bool

    @cached_property
    def values(self) -> _Values:
        return _Values(self.tensor)

    @cached_property
    def gradient(self) -> _Values:
        return _Values(self.tensor.grad)

    @property
    def is_matrix(self) -> bool:
        """Scales and biases are often zero or constant by design, whatever dimensions of size one they have."""
        return sum(n > 1 for n in self.tensor.shape) > 1

    @property
    def is_opening(self) -> bool:
        """Still zero, but not for long: what feeds it gets no gradient before its first update."""
        bias = "bias" in self.name.rpartition(".")[2]
        return self.tensor.requires_grad and not bias and self.values.is_zero and self.gradient.moves


def _weights(model: nn.Module) -> list[_Weight]:
    """Every parameter once."""
    weights: dict[int, _Weight] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                full = readable_path(f"{path}.{name}" if path else name)
                weights.setdefault(id(parameter), _Weight(full, parameter, isinstance(module, _MAPS)))
    return list(weights.values())


def _is_stuck(weights: list[_Weight]) -> bool:
    """Whether a zero gradient stays zero: others are not zero, and no weight is about to let it through."""
    return any(w.gradient.moves for w in weights) and not any(w.is_opening for w in weights)


def _never_updated(weights: list[_Weight], optimizers: tuple[Any, ...]) -> dict[str, str]:
    """Name -> what an optimizer says of the parameter."""
    names = {id(w.tensor): w.name for w in weights if w.tensor.requires_grad}
    held = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
    left = names.keys() - {id(p) for parameters in held for p in parameters}
    if left == names.keys():  # Other parameters than the model's, such as copies in full precision.
        return {}
    never = {names[key]: "requires gradients but is in no optimizer" for key in left}
    for optimizer, parameters in zip(optimizers, held, strict=True):
        idle = [p for p in parameters if not _was_updated(optimizer.state.get(p))]
        # LBFGS keeps all its state at the first parameter.
        if len(idle) < len(parameters) and [id(p) for p in idle] != [id(p) for p in parameters[1:]]:
            never |= {names[id(p)]: "was never updated, others were" for p in idle if id(p) in names}
    return never


def _was_updated(state: Any) -> bool:
    if not isinstance(state, dict):
        return state is not None
    if (step := state.get("step")) is not None:  # Adagrad makes its state before the first step.
        return float(step) > 0
    return any(value is not None for value in state.values())
