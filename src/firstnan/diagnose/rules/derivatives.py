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

from firstnan.diagnose.rules import provenance
from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import COMPARISONS, Failure, describe, has_zero, number, words
from firstnan.records import OpEvent, Phase

BACKWARD: frozenset[Phase] = frozenset({"backward"})
SQRTS = words(
    "sqrt rsqrt norm vectornorm cdist euclideandist std stdmean hypot pdist renorm weightnorm weightnorminterface"
)
ARCS = words("acos asin acosh atanh")
LOGSUMS = words("logsumexp logaddexp logaddexp2 logcumsumexp")
DECOMPOSITIONS = words("svd eigh eig eigvalsh qr")
SELECTORS = words(
    "where masked_fill nan_to_num index index_put masked_select masked_scatter select_scatter nansum nanmean"
)
"""Operators that throw elements away by a condition; they hand gradient 0 to what they threw away."""
LIMITERS = SELECTORS | words(
    "clamp clamp_min clamp_max maximum minimum max min amax amin relu threshold hardtanh topk sort gather index_select"
)
"""These also hide a non-finite value, by order instead of by a condition."""


def _incoming_zero(failure: Failure) -> bool | None:
    """Whether the gradient that arrives at the bad element is exactly 0; None if that cannot be told."""
    event = failure.event
    if event is None:
        return None
    first = _zero_factor(event)
    if first is not None:
        return first
    # pow and acos make the infinity first and multiply it by the gradient in a later op of the same node
    for later in failure.same_node():
        answer = _zero_factor(later) if later.op == "mul" and len(later.inputs) > 1 else None
        if answer is not None:
            return answer
    return None


def _zero_factor(event: OpEvent) -> bool | None:
    values = dict(event.witness)
    if event.op == "div" and "self" in values:
        return values["self"] == 0
    result = values.pop("result", None)
    if event.op != "mul" or len(values) < 2 or result is None:
        return None
    infinite = [math.isinf(v) for v in values.values()]
    return 0 in values.values() if any(infinite) and not all(infinite) else None


def _forward(failure: Failure) -> OpEvent | None:
    return failure.origin.forward_event


def _discarded(failure: Failure) -> OpEvent | None:
    """The operator that later threw the guilty element away, if there is one."""
    forward = _forward(failure)
    if forward is None:
        return None
    return failure.used_by(forward, LIMITERS if forward.bad else SELECTORS)


def _at_edge(failure: Failure) -> bool:
    """The derivative divides by zero here, or takes a negative power or an inverse root of zero."""
    if failure.op in ("div", "reciprocal", "rsqrt"):
        return failure.zero_at("other" if failure.op == "div" else "self")
    if failure.op == "pow":
        return failure.zero_at("self") and failure.negative_at("exponent")
    if failure.op == "log":  # x ** a, and what contains it, has a * log(x) in its derivative
        return failure.zero_at("self")
    forward = _forward(failure)
    read = [i.stat for i in forward.inputs] if forward else []
    return failure.op in ("mul", "pow") and bool(failure.event and failure.event.bad) and any(has_zero(s) for s in read)


def _forward_lines(failure: Failure) -> tuple[str, ...]:
    """What the forward operator read and wrote, as far as it was kept."""
    forward = _forward(failure)
    if forward is None:
        return ()
    read = tuple(f"forward {describe(i.stat, i.name)}" for i in forward.inputs if i.stat is not None)
    return read[:3] + tuple(f"forward {describe(o, 'result')}" for o in forward.outputs[:1])


def _why_zero(failure: Failure) -> str:
    return provenance.zero(failure.trace, _forward(failure), "self")


def _arriving(failure: Failure) -> str:
    zero = _incoming_zero(failure)
    if zero is None:
        return ""
    return " The gradient that arrives there is 0, and 0 times infinity is NaN." if zero else ""


@rule("where_grad_trap", phases=BACKWARD)
def where_grad_trap(failure: Failure) -> Finding | None:
    if failure.event is None or failure.event.in_python_backward or _incoming_zero(failure) is not True:
        return None
    forward, selector = _forward(failure), _discarded(failure)
    hidden = forward is not None and forward.bad > 0
    if selector is None and not hidden:
        return None
    by = (
        f"`{selector.op}`" + (f" in line {selector.site.line}" if selector.site else "")
        if selector
        else "a later operator"
    )
    value = "non-finite there" if hidden else "at the edge of its domain there"
    why = (
        f"The value of `{failure.code}` is {value}, and {by} throws it away, so the loss is finite. Backward "
        "still runs through it: the gradient 0 of the discarded element meets an infinite derivative, and 0 "
        "* inf or 0/0 is NaN."
    )
    sure = 0.93 if selector and (hidden or selector.op in ("where", "masked_fill", "nan_to_num")) else 0.91
    return Finding(why, sure, _forward_lines(failure))


@rule("where_grad_trap", phases=frozenset({"forward"}))
def discarded_in_forward(failure: Failure) -> Finding | None:
    """The origin is a forward infinity that forward itself threw away: only backward can have brought it back."""
    event = failure.event
    if event is None or not event.bad or event.phase != "forward":
        return None
    selector = failure.used_by(event, LIMITERS)
    if selector is None or _survives(failure, event):
        return None
    why = (
        f"`{failure.code}` is non-finite in {event.bad} element(s), and `{selector.op}` throws them away before "
        "the loss. Backward still runs through them: gradient 0 times an infinite derivative is NaN."
    )
    return Finding(why, 0.97, failure.input_lines())


def _survives(failure: Failure, start: OpEvent) -> bool:
    """True if a non-finite value that descends from this event is the end of its line: a loss, an output."""
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
    if not failure.family & SQRTS or failure.event is None or failure.event.in_python_backward or not _at_edge(failure):
        return None
    bad = failure.made.bad if failure.made else 0
    why = (
        f"`{failure.code}` is exactly 0 in {bad} element(s), where the slope of a square root is infinite: "
        f"backward divides by 2 * sqrt(0).{_why_zero(failure)}{_arriving(failure)} The forward value, 0, looks healthy."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("pow_grad_at_zero", phases=BACKWARD)
def pow_grad_at_zero(failure: Failure) -> Finding | None:
    if (
        "pow" not in failure.family
        or failure.event is None
        or failure.event.in_python_backward
        or not _at_edge(failure)
    ):
        return None
    power = _power(failure)
    if power is not None and power >= 1:
        return None
    shown = f"the power {number(power)}" if power is not None else "a power below 1"
    why = (
        f"`{failure.code}` raises exactly 0 to {shown}, and the slope of that is infinite at 0: backward "
        f"computes 0 to a negative power.{_why_zero(failure)}{_arriving(failure)} The forward value, 0, looks healthy."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("sqrt_grad_at_zero", title="The derivative of a square root at zero", phases=BACKWARD)
def half_power_at_zero(failure: Failure) -> Finding | None:
    found = pow_grad_at_zero(failure) if _power(failure) == 0.5 else None
    return Finding(found.why, 0.93 if _of_squares(failure) else 0.5, found.evidence) if found else None


def _of_squares(failure: Failure) -> bool:
    """The root is taken of a sum or mean of squares: a norm, a distance, a standard deviation."""
    forward = _forward(failure)
    near = [e.op for e in failure.trace.feeding(forward, 3)] if forward else []
    return (bool({"sum", "mean"} & {*near}) and bool({"pow", "square", "mul"} & {*near})) or "var" in near


def _power(failure: Failure) -> float | None:
    """The exponent of the forward power; the derivative's own `pow` has one less."""
    forward = _forward(failure)
    given = dict(forward.scalars).get("exponent") if forward else None
    if given is None and failure.op == "pow" and failure.at("exponent") is not None:
        given = (failure.at("exponent") or 0.0) + 1
    return float(given) if isinstance(given, int | float) else None


@rule("acos_grad_at_one", phases=BACKWARD)
def acos_grad_at_one(failure: Failure) -> Finding | None:
    if not failure.family & ARCS or failure.event is None or failure.event.in_python_backward:
        return None
    if not _at_edge(failure) and failure.op not in ("rsqrt", "mul"):
        return None
    why = (
        f"`{failure.code}` was given exactly 1 or -1 (to rounding), where its slope is infinite: backward "
        f"divides by sqrt(1 - x * x) = 0.{_arriving(failure)} The forward value looks healthy."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("xlogy_grad_at_zero", phases=BACKWARD)
def xlogy_grad_at_zero(failure: Failure) -> Finding | None:
    if not failure.family & {"xlogy", "xlog1py", "entr", "kldiv"} or failure.event is None or not failure.event.bad:
        return None
    why = (
        f"`{failure.code}` defines 0 * log(0) as 0, so the forward value is finite. Its derivative has no such "
        "exception: it divides x by y, and 0/0 is NaN."
    )
    return Finding(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("logsumexp_grad_all_inf", phases=BACKWARD)
def logsumexp_grad_all_inf(failure: Failure) -> Finding | None:
    if not failure.family & LOGSUMS or not failure.nan:
        return None
    why = (
        f"`{failure.code}` reduces a slice in which every entry is -inf; its value there is -inf as well. "
        f"Backward computes exp(x - result), and -inf - -inf is NaN ({failure.nan} element(s))."
    )
    return Finding(why, 0.93, failure.input_lines() or _forward_lines(failure))


@rule("degenerate_decomposition", phases=BACKWARD)
def degenerate_decomposition(failure: Failure) -> Finding | None:
    if not failure.family & DECOMPOSITIONS or not (failure.nan or failure.inf):
        return None
    if "qr" in failure.family:
        what = "the matrix does not have full rank, and backward divides by the zeros on the diagonal of R"
    else:
        what = "two singular values or eigenvalues are equal (or one is 0), and backward divides by their difference"
    why = (
        f"The derivative of `{failure.code}` exists only for a matrix without repeated values. Here {what}: "
        f"{failure.nan + failure.inf} non-finite element(s)."
    )
    return Finding(why, 0.93, failure.input_lines() + _forward_lines(failure))


@rule("custom_backward", phases=BACKWARD)
def custom_backward(failure: Failure) -> Finding | None:
    if failure.event is None or not failure.event.in_python_backward:
        return None
    why = (
        f"`{failure.code}` runs inside a backward (or gradient hook) of your own code, not in torch's. There "
        f"the operator {failure.op} wrote {failure.nan + failure.inf} non-finite element(s) out of finite numbers."
    )
    return Finding(why, 0.95, failure.input_lines())


@rule("infinite_derivative", phases=BACKWARD)
def infinite_derivative(failure: Failure) -> Finding | None:
    if failure.event is None or failure.event.in_python_backward or not _at_edge(failure):
        return None
    why = (
        f"The slope of `{failure.code}` is infinite at the value it was given: backward ({failure.event.node}) "
        f"computes {failure.op} at 0. That gives {failure.nan + failure.inf} non-finite element(s).{_arriving(failure)}"
    )
    return Finding(why, 0.4, _forward_lines(failure) + failure.input_lines())
