"""Finite in forward, infinite in backward: what torch 2.13 computes inside the derivatives.

Seen under a dispatch mode:
- SqrtBackward0: div(grad, 2 * result): x/0 is inf, 0/0 is NaN. HypotBackward0: div(grad * self, result).
- PowBackward0: pow(self, exponent - 1) is inf at 0, then mul by exponent, then mul(grad, inf): NaN if grad is 0.
- AcosBackward0, AsinBackward0: rsqrt(1 - x * x) is inf, then mul(grad, inf). AcoshBackward0 alike.
- LogBackward0: div(grad, self). XlogyBackward0: div(grad * self, other). DivBackward0: div(grad, other).
- ReciprocalBackward0: mul(-grad, result * result); ExpBackward0: mul(grad, result): 0 * inf where the result is inf.
- LogsumexpBackward0: sub(self, result), -inf - -inf. LogaddexpBackward0 and LogcumsumexpBackward0 alike.
- LinalgSvdBackward0, LinalgEighBackward0: div(.., difference of the values). LinalgQrBackward0: solve_triangular.
- LinalgVectorNormBackward0 (any order), StdBackward0, EuclideanDistBackward0 and CdistBackward0 mask their own 0/0:
  there the NaN does not reach the gradient unless the incoming gradient is itself bad.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure, counted, describe, has_zero, why_zero
from firstnan.records import OpEvent, Phase
from firstnan.records.operator_families import (
    ARCS,
    COMPARISONS,
    LIMITERS,
    LOG_SUMS,
    ROOTS_INSIDE,
    SELECTORS,
    SPECTRAL,
    XLOGS,
)
from firstnan.records.words import number

BACKWARD: frozenset[Phase] = frozenset({"backward"})


def _of_torch(failure: Failure, family: Collection[str] = ()) -> bool:
    """Whether the value was made in one of torch's own derivatives, of an operator of this family if one is given."""
    own = failure.event is not None and not failure.event.in_python_backward
    return own and (not family or failure.derivative_of(family))


def _incoming_zero(failure: Failure) -> bool | None:
    """Whether the incoming gradient at the bad element is exactly 0; None if that is not known."""
    event = failure.event
    if event is None:
        return None
    # pow and acos make the infinity first and multiply it by the gradient in a later op of the same node.
    later = [e for e in failure.same_node() if e.op == "mul" and len(e.inputs) > 1]
    answers = (_zero_factor(e) for e in (event, *later))
    return next((answer for answer in answers if answer is not None), None)


def _zero_factor(event: OpEvent) -> bool | None:
    values = dict(event.witness)
    if event.op == "div" and "self" in values:
        return values["self"] == 0
    result = values.pop("result", None)
    if event.op != "mul" or len(values) < 2 or result is None:
        return None
    infinite = [math.isinf(v) for v in values.values()]
    return 0 in values.values() if any(infinite) and not all(infinite) else None


def _at_edge(failure: Failure) -> bool:
    """Whether the derivative divides by zero here, or takes a negative power, inverse root or logarithm of zero."""
    if failure.op in ("div", "reciprocal", "rsqrt"):
        return failure.zero_at("other" if failure.op == "div" else "self")
    if failure.op == "pow":
        return failure.zero_at("self") and failure.negative_at("exponent")
    if failure.op == "log":  # x ** a, and what contains it, has a * log(x) in its derivative
        return failure.zero_at("self")
    forward = failure.origin.forward_event
    read = [i.stat for i in forward.inputs] if forward else []
    return failure.op == "mul" and bool(failure.event and failure.event.bad) and any(has_zero(s) for s in read)


def _forward_lines(failure: Failure) -> tuple[str, ...]:
    """What the forward operator read and wrote, as far as it was kept."""
    forward = failure.origin.forward_event
    if forward is None:
        return ()
    read = tuple(f"forward {describe(i.stat, i.name)}" for i in forward.inputs if i.stat is not None)
    return read[:3] + tuple(f"forward {describe(o, 'result')}" for o in forward.outputs[:1])


def _at_zero(failure: Failure) -> str:
    """Why the forward operator read a 0, and what the incoming gradient makes of it."""
    return why_zero(failure.trace, failure.origin.forward_event, "self") + _incoming(failure)


def _incoming(failure: Failure) -> str:
    return " The incoming gradient there is 0, and 0 * inf is NaN." if _incoming_zero(failure) else ""


@rule("where_grad_trap", phases=BACKWARD)
def where_grad_trap(failure: Failure) -> Finding | None:
    if not _of_torch(failure) or not _incoming_zero(failure):
        return None
    forward = failure.origin.forward_event
    hidden = forward is not None and forward.bad > 0
    selector = failure.used_by(forward, LIMITERS if hidden else SELECTORS) if forward is not None else None
    if selector is None and not hidden:
        return None
    by = "a later operator"
    if selector is not None:
        by = f"`{selector.op}`" + (f" in line {selector.site.line}" if selector.site else "")
    value = "non-finite" if hidden else "at the edge of its domain"
    why = (
        f"`{failure.code}` is {value} for an element that {by} discards, so the loss is finite. Backward still runs "
        "through it: the incoming gradient is 0, the derivative is infinite, and 0 * inf (or 0/0) is NaN."
    )
    sure = selector is not None and (hidden or selector.op in ("where", "masked_fill", "nan_to_num"))
    return Finding(why, 0.93 if sure else 0.91, _forward_lines(failure))


@rule("where_grad_trap", phases=frozenset({"forward"}))
def discarded_in_forward(failure: Failure) -> Finding | None:
    """The origin is a forward infinity that forward itself discarded: only backward can have brought it back."""
    event = failure.event
    if event is None or not event.bad or event.phase != "forward":
        return None
    selector = failure.used_by(event, LIMITERS)
    if selector is None or _survives(failure, event):
        return None
    why = (
        f"`{failure.code}` is non-finite in {counted(event.bad)}, and `{selector.op}` discards that before the loss. "
        "Backward still runs through it: a gradient of 0 times an infinite derivative is NaN."
    )
    return Finding(why, 0.97, failure.input_lines())


def _survives(failure: Failure, start: OpEvent) -> bool:
    """Whether a non-finite value that descends from this event is read by nothing else: a loss, an output."""
    tainted, used = {start.index}, set()
    for event in failure.trace.events[start.index + 1 :]:
        feeders = {i.producer for i in event.inputs if i.producer in tainted}
        if event.phase != "forward" or not feeders or not event.outputs:
            continue
        if event.op in COMPARISONS or event.op.endswith("_like"):  # backward() itself calls ones_like(loss)
            continue
        used |= feeders
        if event.bad:
            tainted.add(event.index)
    return bool(tainted - used)


@rule("sqrt_grad_at_zero", phases=BACKWARD)
def sqrt_grad_at_zero(failure: Failure) -> Finding | None:
    if not _of_torch(failure, ROOTS_INSIDE) or not _at_edge(failure):
        return None
    why = (
        f"`{failure.code}` is exactly 0 in {counted(failure.bad)}, where the slope of a square root is infinite: "
        f"backward divides by this 0.{_at_zero(failure)} The forward value is finite."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("pow_grad_at_zero", phases=BACKWARD)
def pow_grad_at_zero(failure: Failure) -> Finding | None:
    if not _of_torch(failure, {"pow"}) or not _at_edge(failure):
        return None
    power = _power(failure)
    if power is not None and power >= 1:
        return None
    shown = f"the power {number(power)}" if power is not None else "a power below 1"
    why = (
        f"`{failure.code}` raises exactly 0 to {shown}, where the slope is infinite: backward computes 0 to a negative "
        f"power.{_at_zero(failure)} The forward value is finite."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("sqrt_grad_at_zero", phases=BACKWARD)
def half_power_at_zero(failure: Failure) -> Finding | None:
    found = pow_grad_at_zero(failure) if _power(failure) == 0.5 else None
    return Finding(found.why, 0.93 if _of_squares(failure) else 0.5, found.evidence) if found else None


def _of_squares(failure: Failure) -> bool:
    """Whether the root is taken of a sum or mean of squares: a norm, a distance, a standard deviation."""
    forward = failure.origin.forward_event
    near = {e.op for e in failure.trace.feeding(forward, 3)} if forward else set()
    return "var" in near or bool(near & {"sum", "mean"} and near & {"pow", "square", "mul"})


def _power(failure: Failure) -> float | None:
    """The exponent of the forward power; the derivative's own `pow` has one less."""
    forward = failure.origin.forward_event
    given = dict(forward.scalars).get("exponent") if forward else None
    own = failure.at("exponent") if failure.op == "pow" else None
    if given is None and own is not None:
        given = own + 1
    return float(given) if isinstance(given, int | float) else None


@rule("acos_grad_at_one", phases=BACKWARD)
def acos_grad_at_one(failure: Failure) -> Finding | None:
    if not _of_torch(failure, ARCS) or not (_at_edge(failure) or failure.op in ("rsqrt", "mul")):
        return None
    why = (
        f"`{failure.code}` was evaluated at the edge of its domain (1 or -1, up to rounding), where its slope is "
        f"infinite: backward divides by 0.{_incoming(failure)} The forward value is finite."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("xlogy_grad_at_zero", phases=BACKWARD)
def xlogy_grad_at_zero(failure: Failure) -> Finding | None:
    if not failure.derivative_of(XLOGS) or failure.event is None or not failure.event.bad:
        return None
    why = (
        f"`{failure.code}` defines 0 * log(0) as 0, so the forward value is finite. Its derivative has no such "
        "exception: it divides by the argument, and 0/0 is NaN."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("logsumexp_grad_all_inf", phases=BACKWARD)
def logsumexp_grad_all_inf(failure: Failure) -> Finding | None:
    if not failure.derivative_of(LOG_SUMS) or not failure.nan:
        return None
    why = (
        f"`{failure.code}` reduces a slice in which every entry is -inf, so its value is -inf too. Backward computes "
        f"exp(x - result), and -inf - -inf is NaN: {counted(failure.nan)} became NaN."
    )
    return Finding(why, 0.93, failure.input_lines() or _forward_lines(failure))


@rule("degenerate_decomposition", phases=BACKWARD)
def degenerate_decomposition(failure: Failure) -> Finding | None:
    if not failure.derivative_of(SPECTRAL | {"qr"}) or not failure.bad:
        return None
    needs, zero = "distinct singular values or eigenvalues", "two of them are equal (or one is 0)"
    if failure.derivative_of({"qr"}):
        needs, zero = "a matrix of full rank", "the diagonal of R has a zero"
    why = (
        f"The derivative of `{failure.code}` needs {needs}. Here {zero}, so backward divides by 0: "
        f"{counted(failure.bad)} became non-finite."
    )
    return Finding(why, 0.93, failure.input_lines() + _forward_lines(failure))


@rule("custom_backward", phases=BACKWARD)
def custom_backward(failure: Failure) -> Finding | None:
    if failure.event is None or not failure.event.in_python_backward:
        return None
    why = (
        f"`{failure.code}` runs inside a backward or gradient hook of the program itself, not of torch. There, the "
        f"operator {failure.op} produced {counted(failure.bad, 'non-finite element')} from finite numbers."
    )
    return Finding(why, 0.95, failure.input_lines())


@rule("infinite_derivative", phases=BACKWARD)
def infinite_derivative(failure: Failure) -> Finding | None:
    if failure.event is None or not _of_torch(failure) or not _at_edge(failure):
        return None
    why = (
        f"The slope of `{failure.code}` is infinite at this point: backward ({failure.event.node}) computes "
        f"{failure.op} at 0. {counted(failure.bad)} became non-finite.{_incoming(failure)}"
    )
    return Finding(why, 0.4, _forward_lines(failure) + failure.input_lines())
