"""Where a number came from, told from the operators several steps back."""

from __future__ import annotations

from firstnan.diagnose.rules.failure import largest, number, words
from firstnan.records import Operand, OpEvent, Trace

CARRIERS = words(
    "view reshape select slice index gather squeeze unsqueeze expand transpose permute t clone detach contiguous to "
    "neg alias split chunk unbind index_select take flatten masked_select as_strided copy lift_fresh unsafe_view "
    "narrow diagonal T mT movedim repeat"
)
"""Operators behind which an element is still the same number."""
FLOORS = words("relu clamp clamp_min maximum threshold hardtanh hardsigmoid relu6")
LAYERS = words("addmm mm linear bmm baddbmm convolution matmul addmv mv native_layer_norm")
SPREADS = words("std var std_mean var_mean")
LENGTHS = words("norm linalg_vector_norm cdist")
SUMS = words("sum mean count_nonzero nansum")


def maker(trace: Trace, event: OpEvent, name: str, depth: int = 8) -> tuple[OpEvent | None, Operand | None]:
    """The event that computed an argument, behind views and the like; without one, what came from outside."""
    operand = next((i for i in event.inputs if i.name == name), None)
    for _ in range(depth):
        if operand is None or operand.producer is None or operand.role in ("input", "parameter"):
            return None, operand
        event = trace.events[operand.producer]
        source = next((i for i in event.inputs if i.name in ("self", "input", "src")), None)
        if event.op not in CARRIERS or source is None:
            return event, operand
        operand = source
    return None, operand


def zero(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument is exactly 0, as a sentence with a space before it; "" where nothing is known."""
    if event is None:
        return ""
    made_by, operand = maker(trace, event, name)
    told = _outside(operand) if made_by is None else _zero_of(trace, made_by)
    return f" {told}" if told else ""


def large(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument could become so large, as a sentence with a space before it; "" where nothing is known."""
    if event is None:
        return ""
    made_by, operand = maker(trace, event, name)
    if made_by is not None and made_by.op in LAYERS:
        where = f" {made_by.module}" if made_by.module else ""
        return f" It is the output of the layer{where} ({made_by.op}), which has no bound."
    if made_by is None or made_by.op != "div" or not made_by.inputs:
        return ""
    before, after = largest(made_by.inputs[0].stat), largest(operand.stat) if operand else None
    if before is None or after is None or after < 2 * before:
        return ""
    return f" A division made it large: before that it reached {number(before)} only."


def _outside(operand: Operand | None) -> str:
    if operand is None or not operand.label:
        return ""
    if operand.role == "input":
        return f"The 0 stands in the data ({operand.label})."
    return f"It is the parameter {operand.label}." if operand.role == "parameter" else ""


def _zero_of(trace: Trace, event: OpEvent) -> str:
    op, makers = event.op, {e.op for e in trace.producers(event)}
    if op == "softmax":
        return f"The 0 is a softmax probability that underflowed{_given(event, 'logits')}."
    if op in ("sigmoid", "exp", "exp2"):
        return f"The 0 is {'an' if op[0] == 'e' else 'a'} {op} that underflowed{_given(event, 'arguments')}."
    if op in ("rsub", "sub"):
        return _difference(trace, event)
    if op in ("prod", "cumprod"):
        return f"It is a product: a factor is 0, or it underflowed{_given(event, 'factors')}."
    if op in FLOORS:
        return f"The 0 comes out of {op}, which cuts off what is below{_given(event, 'numbers it read')}."
    if op in LENGTHS or (op == "mul" and makers & LENGTHS):
        return "It is the length of a vector that is all 0."
    if op in SPREADS:
        return "It is the spread of numbers that are all equal."
    if op in SUMS:
        return _sum(trace, event)
    if op == "add" and makers & SUMS:
        return "It is a sum that came out as 0."
    if op == "mse_loss":
        return "It is a mean of squared differences, and the two sides are equal."
    if op in ("amax", "max", "amin", "min", "aminmax"):
        return "It is a maximum or minimum, and that is 0."
    if op in ("rand", "rand_like", "uniform", "bernoulli", "random"):
        return "It is a random number; those of `torch.rand` can be exactly 0."
    return ""


def _difference(trace: Trace, event: OpEvent) -> str:
    """1 - p where p has reached 1, a range, or a difference of equal numbers."""
    near = trace.feeding(event, 3)
    p = next((e for e in near if e.op in ("sigmoid", "softmax")), None) if event.op == "rsub" else None
    if p is not None:
        return f"There 1 - p is 0, because a {p.op} has reached exactly 1{_given(p, 'arguments')}."
    names = {e.op.removeprefix("a") for e in near}
    if {"max", "min"} <= names or "minmax" in names:
        return "It is the range (maximum minus minimum) of numbers that are all equal."
    return "It is the difference of two equal numbers."


def _sum(trace: Trace, event: OpEvent) -> str:
    summed = next((i.stat for i in event.inputs if i.stat is not None), None)
    if event.op == "count_nonzero" or (summed is not None and (summed.binary or summed.dtype == "bool")):
        return "It is a count, and there was nothing to count."
    near = [e.op for e in trace.feeding(event, 2)]
    if "exp" in near:
        return f"It is a {event.op} of exponentials that underflowed."
    if near[:1] and near[0] in ("pow", "square"):
        same = "differences of equal numbers" if near[1:2] == ["sub"] else "numbers that are all 0"
        return f"It is a {event.op} of powers of {same}."
    return f"It is a {event.op} that came out as 0."


def _given(event: OpEvent, what: str) -> str:
    """The range of what an event read, if it is known."""
    stat = next((i.stat for i in event.inputs if i.stat is not None and i.stat.min is not None), None)
    if stat is None or stat.min is None:
        return ""
    same = stat.min == stat.max
    return f"; the {what} are " + (number(stat.min) if same else f"from {number(stat.min)} to {number(stat.max)}")
