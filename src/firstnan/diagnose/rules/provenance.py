"""Where a number came from, read off the operators before it."""

from __future__ import annotations

from firstnan.diagnose.rules.failure import largest
from firstnan.records import Operand, OpEvent, Trace
from firstnan.records.operator_families import (
    CARRIERS,
    EXTREMES,
    FLOORS,
    MATRIX_PRODUCTS,
    NORMS,
    RANDOM,
    SPREADS,
    SUMS,
)
from firstnan.records.words import number

COUNTED = SUMS | {"count_nonzero"}


def producer_of(trace: Trace, event: OpEvent, name: str, depth: int = 8) -> tuple[OpEvent | None, Operand | None]:
    """The event that computed an argument, before views and copies; None and the operand if it came from outside."""
    operand = next((i for i in event.inputs if i.name == name), None)
    for _ in range(depth):
        if operand is None or operand.producer is None or operand.role in ("input", "parameter"):
            return None, operand
        event = trace.events[operand.producer]
        source = next((i for i in event.inputs if i.name in ("self", "input", "src")), None)
        if event.op not in CARRIERS | {"neg"} or source is None:
            return event, operand
        operand = source
    return None, operand


def why_zero(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument is exactly 0, as a sentence with a space before it; "" if that is not known."""
    if event is None:
        return ""
    made_by, operand = producer_of(trace, event, name)
    told = _outside(operand) if made_by is None else _zero_of(trace, made_by)
    return f" The 0 {told}." if told else ""


def why_large(trace: Trace, event: OpEvent | None, name: str) -> str:
    """Why an argument could become so large, as a sentence with a space before it; "" if that is not known."""
    if event is None:
        return ""
    made_by, operand = producer_of(trace, event, name)
    if made_by is None:
        return ""
    if made_by.op in MATRIX_PRODUCTS:
        where = f"{made_by.module} ({made_by.op})" if made_by.module else made_by.op
        return f" The argument is the output of {where}, which is unbounded."
    before = largest(made_by.inputs[0].stat) if made_by.op == "div" and made_by.inputs else None
    after = largest(operand.stat) if operand else None
    if before is None or after is None or after < 2 * before:
        return ""
    return f" A division made the argument large: before it, the numbers reached only {number(before)}."


def _outside(operand: Operand | None) -> str:
    if operand is None or not operand.label:
        return ""
    if operand.role == "input":
        return f"is in the data ({operand.label})"
    return f"is in the parameter {operand.label}" if operand.role == "parameter" else ""


def _zero_of(trace: Trace, event: OpEvent) -> str:
    op, makers = event.op, {e.op for e in trace.producers(event)}
    if op == "softmax":
        return f"is a softmax probability that underflowed{_given(event, 'logits')}"
    if op in ("sigmoid", "exp", "exp2"):
        return f"is {'an' if op[0] == 'e' else 'a'} {op} that underflowed{_given(event, 'arguments')}"
    if op in ("rsub", "sub"):
        return _difference(trace, event)
    if op in ("prod", "cumprod"):
        return f"is a product that underflowed or has a factor of 0{_given(event, 'factors')}"
    if op in FLOORS:
        return f"comes from {op}{_given(event, 'inputs')}"
    if op in NORMS:
        return "is the distance between equal points" if "dist" in op else "is the norm of a zero vector"
    if op == "mul" and makers & NORMS:
        return "is a product with the norm of a zero vector"
    if op in SPREADS:
        return f"is the {'standard deviation' if op.startswith('std') else 'variance'} of equal numbers"
    if op in COUNTED:
        return _sum(trace, event)
    if op == "add" and makers & COUNTED:
        return "is a sum whose terms cancel or are all 0"
    if op == "mse_loss":
        return "is the mean squared error of equal numbers"
    if op in EXTREMES:
        return f"is the result of {op}"
    return f"is a random number drawn by {op}" if op in RANDOM else ""


def _difference(trace: Trace, event: OpEvent) -> str:
    """1 - p where p has reached 1, a range, or a difference of equal numbers."""
    near = trace.feeding(event, 3)
    p = next((e for e in near if e.op in ("sigmoid", "softmax")), None) if event.op == "rsub" else None
    if p is not None:
        return f"is 1 - p, where p is a {p.op} that reached exactly 1{_given(p, 'arguments')}"
    names = {e.op.removeprefix("a") for e in near}
    if {"max", "min"} <= names or "minmax" in names:
        return "is the range (maximum minus minimum) of equal numbers"
    return "is the difference of two equal numbers"


def _sum(trace: Trace, event: OpEvent) -> str:
    summed = next((i.stat for i in event.inputs if i.stat is not None), None)
    if event.op == "count_nonzero" or (summed is not None and (summed.binary or summed.dtype == "bool")):
        return "is a count, and there was nothing to count"
    near = [e.op for e in trace.feeding(event, 2)]
    if "exp" in near:
        return f"is a {event.op} of exponentials that underflowed"
    if near[:1] and near[0] in ("pow", "square"):
        of = "differences, and every difference is 0" if near[1:2] == ["sub"] else "numbers that are all 0"
        return f"is a {event.op} of powers of {of}"
    return f"is a {event.op} of terms that cancel or are all 0"


def _given(event: OpEvent, what: str) -> str:
    """The range of what an event read, if it is known."""
    stat = next((i.stat for i in event.inputs if i.stat is not None and i.stat.min is not None), None)
    if stat is None:
        return ""
    if stat.min == stat.max:
        return f" (its {what} are all {number(stat.min)})"
    return f" (its {what} range from {number(stat.min)} to {number(stat.max)})"
