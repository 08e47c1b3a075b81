"""Operators that turn finite numbers into non-finite ones, themselves or in their derivatives.

What torch 2.13 computes inside the derivatives, seen under a dispatch mode:
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
import re
from collections.abc import Collection

from firstnan.diagnose.rules.base import (
    ANY,
    ELSEWHERE,
    Explanation,
    Failure,
    counted,
    describe,
    has_zero,
    rule,
    why_zero,
)
from firstnan.records import OpEvent, Phase, TensorStat
from firstnan.records.operator_families import (
    ADDITIONS,
    ARCS,
    ATTENTION,
    CHOLESKY,
    COMPARISONS,
    DETERMINANTS,
    DIVISIONS,
    INVERSE_FUNCTIONS,
    JOINS,
    LABEL_PICKS,
    LIMITERS,
    LOG_SUMS,
    LOGS,
    MATRIX_ALGORITHMS,
    MEANS,
    MIXING,
    NEGATIVE_LIKELIHOODS,
    NORMALISERS,
    POLES,
    POWERS,
    PRODUCTS,
    ROOTS,
    ROOTS_INSIDE,
    SELECTORS,
    SOFTMAXES,
    SOLVERS,
    SPECTRAL,
    SPREADS,
    SUMS,
    WEIGHT_NORMS,
    XLOGS,
    words,
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
    # hypot divides the product of the gradient and what forward read, and either may be the 0.
    made = [failure.trace.events[i.producer] for i in event.inputs if i.name == "self" and i.producer is not None]
    product = event.op == "div" and any(
        m.op == "mul" and (m.node, m.forward) == (event.node, event.forward) for m in made
    )
    answers = (_zero_factor(e) for e in (later if product else (event, *later)))
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
    if forward is not None and forward.bad:
        return False  # not an edge of the derivative alone
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
def where_grad_trap(failure: Failure) -> Explanation | None:
    if not _of_torch(failure) or not _incoming_zero(failure):
        return None
    forward = failure.origin.forward_event
    hidden = forward is not None and forward.bad > 0
    selector = failure.used_by(forward, SELECTORS) if forward is not None and not hidden else None
    if forward is not None and hidden:
        selector = _unaffected_sum(failure, forward) or failure.used_by(forward, LIMITERS)
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
    return Explanation(why, 0.93 if sure else 0.91, _forward_lines(failure))


@rule("where_grad_trap", phases=frozenset({"forward"}))
def discarded_in_forward(failure: Failure) -> Explanation | None:
    """The origin is a forward infinity that forward itself discarded: only backward can have brought it back."""
    event = failure.event
    if event is None or not event.bad or event.phase != "forward":
        return None
    selector = failure.used_by(event, LIMITERS)
    if selector is None or _survives(failure, event):
        return None
    selector = _unaffected_sum(failure, event) or selector
    why = (
        f"`{failure.code}` is non-finite in {counted(event.bad)}, and `{selector.op}` discards that before the loss. "
        "Backward still runs through it: a gradient of 0 times an infinite derivative is NaN."
    )
    return Explanation(why, 0.97, failure.input_lines())


def _unaffected_sum(failure: Failure, start: OpEvent) -> OpEvent | None:
    """A finite sum over non-finite values that descend from this event: a product with a sparse matrix skips them."""
    tainted = {start.index}
    for event in failure.trace.events[start.index + 1 :]:
        if event.phase == "forward" and event.outputs and any(i.producer in tainted for i in event.inputs):
            if event.bad:
                tainted.add(event.index)
            elif event.op in MIXING and event.op not in LIMITERS:
                return event
    return None


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
def sqrt_grad_at_zero(failure: Failure) -> Explanation | None:
    if not _of_torch(failure, ROOTS_INSIDE) or not _at_edge(failure):
        return None
    why = (
        f"`{failure.code}` is exactly 0 in {counted(failure.bad)}, where the slope of a square root is infinite: "
        f"backward divides by this 0.{_at_zero(failure)} The forward value is finite."
    )
    return Explanation(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("pow_grad_at_zero", phases=BACKWARD)
def pow_grad_at_zero(failure: Failure) -> Explanation | None:
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
    return Explanation(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("sqrt_grad_at_zero", phases=BACKWARD)
def half_power_at_zero(failure: Failure) -> Explanation | None:
    found = pow_grad_at_zero(failure) if _power(failure) == 0.5 else None
    return Explanation(found.why, 0.93 if _of_squares(failure) else 0.5, found.evidence) if found else None


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
def acos_grad_at_one(failure: Failure) -> Explanation | None:
    if not _of_torch(failure, ARCS) or not (_at_edge(failure) or failure.op in ("rsqrt", "mul")):
        return None
    why = (
        f"`{failure.code}` was evaluated at the edge of its domain (1 or -1, up to rounding), where its slope is "
        f"infinite: backward divides by 0.{_incoming(failure)} The forward value is finite."
    )
    return Explanation(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("xlogy_grad_at_zero", phases=BACKWARD)
def xlogy_grad_at_zero(failure: Failure) -> Explanation | None:
    if not failure.derivative_of(XLOGS) or failure.event is None or not failure.event.bad:
        return None
    why = (
        f"`{failure.code}` defines 0 * log(0) as 0, so the forward value is finite. Its derivative has no such "
        "exception: it divides by the argument, and 0/0 is NaN."
    )
    return Explanation(why, 0.9, _forward_lines(failure) or failure.input_lines())


@rule("logsumexp_grad_all_inf", phases=BACKWARD)
def logsumexp_grad_all_inf(failure: Failure) -> Explanation | None:
    if not failure.derivative_of(LOG_SUMS) or not failure.nan:
        return None
    why = (
        f"`{failure.code}` reduces a slice in which every entry is -inf, so its value is -inf too. Backward computes "
        f"exp(x - result), and -inf - -inf is NaN: {counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.93, failure.input_lines() or _forward_lines(failure))


@rule("degenerate_decomposition", phases=BACKWARD)
def degenerate_decomposition(failure: Failure) -> Explanation | None:
    if not failure.derivative_of(SPECTRAL | {"qr"}) or not failure.bad:
        return None
    needs, zero = "distinct singular values or eigenvalues", "two of them are equal (or one is 0)"
    if failure.derivative_of({"qr"}):
        needs, zero = "a matrix of full rank", "the diagonal of R has a zero"
    why = (
        f"The derivative of `{failure.code}` needs {needs}. Here {zero}, so backward divides by 0: "
        f"{counted(failure.bad)} became non-finite."
    )
    return Explanation(why, 0.93, failure.input_lines() + _forward_lines(failure))


@rule("custom_backward", phases=BACKWARD)
def custom_backward(failure: Failure) -> Explanation | None:
    if failure.event is None or not failure.event.in_python_backward:
        return None
    why = (
        f"`{failure.code}` runs inside a backward or gradient hook of the program itself, not of torch. There, the "
        f"operator `{failure.op}` produced {counted(failure.bad, 'non-finite element')} from finite numbers."
    )
    # A conversion to a narrow type, as where gradients are compressed, fails by the type alone.
    return Explanation(why, 0.8 if failure.op == "to" and failure.narrow else 0.95, failure.input_lines())


@rule("infinite_derivative", phases=BACKWARD)
def infinite_derivative(failure: Failure) -> Explanation | None:
    if failure.event is None or not _of_torch(failure) or not _at_edge(failure):
        return None
    why = (
        f"The slope of `{failure.code}` is infinite at this point: backward ({failure.event.node}) computes "
        f"{failure.op} at 0. {counted(failure.bad)} became non-finite.{_incoming(failure)}"
    )
    return Explanation(why, 0.4, _forward_lines(failure) + failure.input_lines())


ELEMENTWISE = ADDITIONS | {"div"}


@rule("zero_over_zero", elsewhere=ELSEWHERE)
def zero_over_zero(failure: Failure) -> Explanation | None:
    if failure.op not in DIVISIONS or not failure.nan:
        return None
    top, bottom = DIVISIONS[failure.op]
    if not top or not failure.zero_at(bottom) or not failure.zero_at(top):
        return None
    reason = why_zero(failure.trace, failure.event, bottom) or " Nothing keeps the denominator away from 0."
    why = f"`{failure.code}` divides 0 by 0 in {counted(failure.nan)}, and 0/0 is NaN.{reason}"
    return Explanation(why, 0.95, failure.input_lines(top, bottom))


@rule("zero_over_zero", title="Normalising equal values")
def normalise_constant(failure: Failure) -> Explanation | None:
    if failure.op not in NORMALISERS or not failure.nan or failure.fed_by_nonfinite:
        return None
    eps = failure.scalar("eps")
    if eps is None or eps > 1e-30:
        return None
    why = (
        f"`{failure.code}` divides by a spread or norm of 0, with eps = {number(eps)}. Equal values then give "
        f"0/0: {counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.9, failure.input_lines())


NORMALISATIONS = ("nn/utils/spectral_norm.py", "nn/utils/weight_norm.py", "nn/utils/parametrizations.py")


@rule("zero_over_zero", title="Weight or spectral norm of a weight of zeros")
def norm_of_zero_weight(failure: Failure) -> Explanation | None:
    site = failure.event.library_site if failure.event is not None else None
    within = site is not None and site.file.replace("\\", "/").endswith(NORMALISATIONS)
    if not (failure.op in WEIGHT_NORMS or (within and failure.op == "div")) or not failure.nan:
        return None
    name = "v" if failure.op in WEIGHT_NORMS else "self"
    stat = failure.stat(name)
    if failure.fed_by_nonfinite or stat is None or not stat.zeros:
        return None
    label = next((i.label for i in failure.operands(name) if i.label), "")
    kind = "norm" if failure.op in WEIGHT_NORMS else "spectral norm"
    rows = "all zeros" if stat.zeros == stat.numel else "zeros in at least one row"
    module = (failure.event.module if failure.event is not None else "").partition(".parametrizations.")[0]
    layer = f" of layer {module}" if module else ""
    why = (
        f"The weight{layer}{f' ({label})' if label else ''} is {rows}, and `{failure.code}` divides it by its {kind}: "
        f"0/0 in {counted(failure.nan)}. Such a weight was initialised, or set, to zero."
    )
    return Explanation(why, 0.97, failure.input_lines())


@rule("div_by_zero", elsewhere=ELSEWHERE)
def div_by_zero(failure: Failure) -> Explanation | None:
    made = failure.origin.produced
    # torch 2.6 divides complex numbers by 0 to NaN, later versions to an infinity.
    gives_nan = failure.op in ("fmod", "remainder") or (made is not None and made.dtype.startswith("complex"))
    if failure.op not in DIVISIONS or not (failure.inf or gives_nan):
        return None
    top, bottom = DIVISIONS[failure.op]
    if not failure.zero_at(bottom):
        return None
    numerator = f"{number(failure.at(top))} " if top and failure.at(top) is not None else ""
    became = f"{counted(failure.inf)} became infinite" if failure.inf else f"{counted(failure.nan)} became NaN"
    reason = why_zero(failure.trace, failure.event, bottom)
    why = f"`{failure.code}` divides {numerator}by exactly 0: {became}.{reason}"
    return Explanation(why, 0.94, failure.input_lines(*(n for n in (top, bottom) if n)))


@rule("zero_times_inf", elsewhere=ELSEWHERE)
def zero_times_inf(failure: Failure) -> Explanation | None:
    if failure.op not in PRODUCTS or not failure.nan or failure.event is None or failure.reads_nan:
        return None
    constant, seen = failure.scalar("other", "value"), failure.read_at.values()
    infinite = constant in (math.inf, -math.inf) or any(t.inf for t in failure.tensors)
    zero = constant == 0 or (0 in seen if seen else any(has_zero(t) for t in failure.tensors))
    if not infinite or not zero:
        return None
    why = (
        f"`{failure.code}` multiplies infinity by 0 in {counted(failure.nan)}, and 0 * inf is NaN. An infinity, as "
        "from a mask, can be added or selected, but not multiplied by 0."
    )
    return Explanation(why, 0.92, failure.input_lines())


@rule("inf_minus_inf")
def inf_minus_inf(failure: Failure) -> Explanation | None:
    infinite, seen = sum(t.inf for t in failure.tensors), failure.read_at.values()
    if failure.op not in ELEMENTWISE | SUMS | SPREADS | {"cumsum"} or not failure.nan:
        return None
    if not infinite or failure.reads_nan:
        return None
    if seen and failure.op in ELEMENTWISE and not any(math.isinf(v) for v in seen):
        return None  # the infinities are at other elements
    kind = "divides one infinity by another" if failure.op == "div" else "subtracts one infinity from another"
    why = (
        f"`{failure.code}` reads {counted(infinite, 'infinite element')} and {kind}. The result is undefined: "
        f"{counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.6, failure.input_lines())


@rule("inf_minus_inf", title="Operator undefined for infinity")
def undefined_for_infinity(failure: Failure) -> Explanation | None:
    if failure.event is None or not failure.event.nan_from_inf or failure.reads_nan:
        return None
    infinite = counted(sum(t.inf for t in failure.tensors), "infinite element")
    why = (
        f"`{failure.code}` reads {infinite}, and {failure.op} is undefined for infinity: {counted(failure.nan)} became "
        "NaN. The infinity itself looks intentional, as in a mask."
    )
    return Explanation(why, 0.2, failure.input_lines())


def _logarithm(failure: Failure, edge: float) -> str:
    return "takes the logarithm of" if edge == 0 else f"evaluates {failure.op} at"


@rule("log_of_zero", elsewhere=ELSEWHERE)
def log_of_zero(failure: Failure) -> Explanation | None:
    if failure.op not in LOGS or not failure.inf:
        return None
    name, edge = LOGS[failure.op]
    value, stats = failure.at(name), failure.stats(name)
    touched = any(edge in (s.min, s.max) or (edge == 0 and s.zeros) for s in stats) if value is None else value == edge
    if not touched and stats:
        return None
    count = sum(s.zeros for s in stats) if edge == 0 else 0
    reason = why_zero(failure.trace, failure.event, name) if edge == 0 else ""
    why = (
        f"`{failure.code}` {_logarithm(failure, edge)} exactly {number(edge)} in {counted(count or failure.inf)}, "
        f"which gives -inf.{reason} The infinity spreads from there."
    )
    return Explanation(why, 0.95 if touched else 0.7, failure.input_lines(name))


@rule("log_of_negative", elsewhere=ELSEWHERE)
def log_of_negative(failure: Failure) -> Explanation | None:
    if failure.op not in LOGS or not failure.nan:
        return None
    name, edge = LOGS[failure.op]
    if not failure.negative_at(name, edge):
        return None
    why = (
        f"`{failure.code}` {_logarithm(failure, edge)} numbers down to {number(failure.lowest(name))}, but it is "
        f"only defined above {number(edge)}. {counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.95, failure.input_lines(name))


@rule("log_of_negative", title="Log-determinant of a negative determinant")
def logdet_of_negative(failure: Failure) -> Explanation | None:
    # logdet is slogdet, eq(sign, -1), scalar_tensor(nan), where: the NaN is a constant that torch itself selects.
    if failure.op != "where" or not failure.nan or not any(e.op in DETERMINANTS for e in failure.feeding(3)):
        return None
    why = (
        f"The determinant in `{failure.code}` is negative for {counted(failure.nan, 'matrix', 'matrices')}. A negative "
        "number has no real logarithm, so torch returns NaN."
    )
    return Explanation(why, 0.97)


@rule("log_of_zero", title="Log-determinant of a singular matrix")
def logdet_of_singular(failure: Failure) -> Explanation | None:
    if failure.op != "slogdet" or not failure.inf or failure.fed_by_nonfinite:
        return None
    why = (
        f"The determinant in `{failure.code}` is exactly 0 for {counted(failure.inf, 'matrix', 'matrices')}, and its "
        "logarithm is -inf. The matrix is singular: a row or column is zero or a combination of others."
    )
    return Explanation(why, 0.8, failure.input_lines())


@rule("sqrt_of_negative", elsewhere=ELSEWHERE)
def sqrt_of_negative(failure: Failure) -> Explanation | None:
    name = "running_var" if failure.op in NORMALISERS else "self"
    if failure.op not in ROOTS | NORMALISERS or not failure.nan or not failure.negative_at(name):
        return None
    lowest = failure.lowest(name)
    small = lowest is not None and lowest > -1e-3
    tail = (
        " Such a small negative number is usually a rounding error in a difference that should be 0." if small else ""
    )
    kept = next((i for i in failure.event.inputs if i.role == "state"), None) if failure.event is not None else None
    if kept is not None:
        tail = f" The optimizer keeps it ({kept.label or name}): check where its state is loaded or written."
    why = (
        f"`{failure.code}` takes the square root of {number(lowest)}. A negative number has no real root: "
        f"{counted(failure.nan)} became NaN.{tail}"
    )
    return Explanation(why, 0.95, failure.input_lines(name))


@rule("pow_of_zero", elsewhere=ELSEWHERE)
def pow_of_zero(failure: Failure) -> Explanation | None:
    if (
        failure.op not in POWERS
        or not failure.inf
        or not failure.negative_at("exponent")
        or not failure.zero_at("self")
    ):
        return None
    why = (
        f"`{failure.code}` raises 0 to the power {number(failure.at('exponent'))}. A negative power divides by "
        f"its base: {counted(failure.inf)} became infinite.{why_zero(failure.trace, failure.event, 'self')}"
    )
    return Explanation(why, 0.95, failure.input_lines("self"))


@rule("pow_of_negative", elsewhere=ELSEWHERE)
def pow_of_negative(failure: Failure) -> Explanation | None:
    if failure.op not in POWERS or not failure.nan or not failure.negative_at("self"):
        return None
    exponent, base = failure.at("exponent"), failure.at("self")
    if exponent is not None and exponent.is_integer():
        return None
    shown = number(base if base is not None else failure.lowest("self"))
    power = "a fractional power" if exponent is None else f"the power {number(exponent)}"
    why = (
        f"`{failure.code}` raises {shown} to {power}. A negative base has no real fractional power: "
        f"{counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.95, failure.input_lines("self"))


@rule("sqrt_of_negative")
def half_power_of_negative(failure: Failure) -> Explanation | None:
    found = pow_of_negative(failure) if failure.at("exponent") in (0.5, -0.5) else None
    return Explanation(found.why, 0.5, found.evidence) if found else None


@rule("arc_out_of_domain", elsewhere=ELSEWHERE)
def arc_out_of_domain(failure: Failure) -> Explanation | None:
    if not failure.nan or failure.op not in INVERSE_FUNCTIONS:
        return None
    low, high = INVERSE_FUNCTIONS[failure.op]
    value = failure.at("self")
    seen = (failure.lowest("self"), failure.highest("self")) if value is None else (value,)
    outside = [v for v in seen if v is not None and not low <= v <= high]
    if not outside:
        return None
    worst = max(outside, key=lambda v: max(low - v, v - high))
    excess = min(abs(worst - low), abs(worst - high))
    why = (
        f"`{failure.code}` evaluates {failure.op} at {worst:.8g}, but it is only defined from {number(low)} to "
        f"{number(high)}. "
    ) + (f"The excess of {number(excess)} is a rounding error." if excess < 1e-3 else "The result is NaN.")
    return Explanation(why, 0.95, failure.input_lines("self"))


@rule("pole", elsewhere=ELSEWHERE)
def pole(failure: Failure) -> Explanation | None:
    if not failure.bad or failure.fed_by_nonfinite:
        return None
    value = failure.at("self")
    if failure.op in INVERSE_FUNCTIONS:
        edges = INVERSE_FUNCTIONS[failure.op]
        hit = failure.inf > 0 and (value is None or value in edges)
        unknown = f"{number(edges[0])} or {number(edges[1])}"
    else:
        hit = failure.op in POLES and (value is None or failure.op == "tan" or (value <= 0 and value.is_integer()))
        unknown = "0 or a negative integer"
    if not hit:
        return None
    where = unknown if value is None else f"exactly {number(value)}"
    why = (
        f"`{failure.code}` evaluates {failure.op} at {where}, where the function goes to infinity. "
        f"{counted(failure.bad)} became non-finite."
    )
    return Explanation(why, 0.93, failure.input_lines("self"))


MATRIX_ERROR = re.compile(
    r"linalg|converge|decompos|factori[sz]|\b(svd|eigh?|eigen\w*|cholesky|lapack|magma)\b", re.IGNORECASE
)
"""What torch and LAPACK say about a matrix that they could not handle."""


@rule("not_positive_definite", phases=ANY)
def not_positive_definite(failure: Failure) -> Explanation | None:
    said_so = re.search("positive[- ]definite", failure.raised)
    if failure.phase == "backward" or not (said_so or failure.op in CHOLESKY):
        return None
    why = (
        f"`{failure.code}` needs a positive definite matrix, but this one has an eigenvalue of 0 or below. Rounding "
        "alone can do that to a covariance of too few or nearly equal rows."
    )
    return Explanation(why, 0.96, failure.raised_lines() + failure.input_lines())


@rule("not_positive_definite")
def determinant_not_positive(failure: Failure) -> Explanation | None:
    near = {failure.op} | {e.op for e in failure.feeding(3)}
    if failure.op not in ("where", "slogdet") or "slogdet" not in near or not failure.bad:
        return None
    why = (
        f"`{failure.code}` takes the log-determinant of a matrix whose determinant is not positive. If the matrix "
        "should be a covariance, it is not positive definite."
    )
    return Explanation(why, 0.6, failure.input_lines())


@rule("singular_matrix", phases=ANY)
def singular_matrix(failure: Failure) -> Explanation | None:
    solved = failure.op in SOLVERS and not failure.fed_by_nonfinite
    if failure.phase == "backward":
        fits = solved and failure.derivative_of(SOLVERS | DETERMINANTS | CHOLESKY)
    else:
        fits = "singular" in failure.raised or (solved and failure.bad > 0)
    if not fits:
        return None
    why = (
        f"`{failure.code}` has to invert a matrix that has no inverse. A row or column is zero or a combination of "
        "others, so the solver divides by 0."
    )
    return Explanation(why, 0.94, failure.raised_lines() + failure.input_lines())


@rule("decomposition_failed", phases=ANY)
def decomposition_failed(failure: Failure) -> Explanation | None:
    algebra = "linalg" in failure.origin.aten or failure.op in MATRIX_ALGORITHMS
    if not failure.raised or not (algebra or MATRIX_ERROR.search(failure.raised)):
        return None
    why = f"`{failure.code}` raised an error instead of returning a value. torch said: {failure.raised}"
    return Explanation(why, 0.3, failure.input_lines())


def _reduced(failure: Failure, stat: TensorStat) -> int | None:
    """How many elements each result was computed from; None if that is not known."""
    dim = failure.scalar("dim")
    if isinstance(dim, int):
        dim = [dim]
    if dim:
        if not all(isinstance(d, int) and -len(stat.shape) <= d < len(stat.shape) for d in dim):
            return None
        return math.prod(int(stat.shape[d]) for d in dim)
    made = failure.made
    return stat.numel // made.numel if made and made.numel and stat.numel % made.numel == 0 else stat.numel


def _is_mask(stat: TensorStat | None) -> bool:
    return stat is not None and (stat.binary or stat.dtype == "bool")


@rule("empty_reduction")
def empty_reduction(failure: Failure) -> Explanation | None:
    empty = [t for t in failure.tensors if t.numel == 0 or (failure.op in SPREADS and _reduced(failure, t) == 0)]
    if failure.op not in MEANS | SPREADS or not failure.bad or not empty:
        return None
    spread = "standard deviation" if failure.op.startswith("std") else "variance"
    why = (
        f"`{failure.code}` reduces a tensor of shape {list(empty[0].shape)}, which has no elements in this batch. The "
        f"{spread if failure.op in SPREADS else 'mean'} of zero elements is 0/0."
    )
    return Explanation(why, 0.97, failure.input_lines())


@rule("empty_reduction", title="Every target in the batch is ignored")
def all_ignored(failure: Failure) -> Explanation | None:
    # nll_loss divides by its second output, the summed weight of the targets that count.
    if failure.op not in NEGATIVE_LIKELIHOODS or not failure.nan or failure.fed_by_nonfinite:
        return None
    outputs = failure.event.outputs if failure.event else ()
    if len(outputs) > 1 and outputs[1].max not in (0, None):
        return None
    target, ignore = failure.stat("target"), failure.scalar("ignore_index")
    detail = "this batch has none"
    if target is not None and target.min == target.max == ignore:
        detail = f"all targets of this batch equal ignore_index = {ignore}"
    why = (
        f"`{failure.code}` averages over the targets that count, and {detail}. It divides by their total weight, which "
        "is 0, so the loss is NaN."
    )
    return Explanation(why, 0.95, failure.input_lines("target", "weight"))


@rule("empty_reduction")
def empty_count(failure: Failure) -> Explanation | None:
    bottom = DIVISIONS.get(failure.op, ("", ""))[1]
    if not bottom or not failure.nan or not failure.zero_at(bottom):
        return None
    stat = failure.stat(bottom)
    counted_mask = any(
        m.op in ("sum", "count_nonzero") and any(_is_mask(i.stat) for i in m.inputs) for m in failure.producers(bottom)
    )
    integer = stat is not None and stat.dtype.startswith("int") and has_zero(stat)
    if not (counted_mask or integer or isinstance(failure.scalar(bottom), int)):
        return None
    why = f"`{failure.code}` divides by a count that is 0 in this batch. There is nothing to average: the mean is 0/0."
    return Explanation(why, 0.6, failure.input_lines(bottom))


@rule("single_sample_variance")
def single_sample_variance(failure: Failure) -> Explanation | None:
    if failure.op not in SPREADS or not failure.nan or failure.fed_by_nonfinite:
        return None
    stat = failure.stat("self") or next(iter(failure.tensors), None)
    count = _reduced(failure, stat) if stat else None
    given = failure.scalar("correction", "unbiased")
    correction = 1.0 if given is None else float(given)
    if count == 0 or (count is not None and count > correction):
        return None
    of = "too few elements" if count is None else counted(count)
    why = (
        f"`{failure.code}` computes an unbiased {failure.op} of {of}. It divides by the count minus "
        f"{number(correction)}, which is 0, so the result is NaN."
    )
    return Explanation(why, 0.97 if count is not None else 0.7, failure.input_lines())


COVARIANCE = re.compile(r"\b(cov|corrcoef)\(")


@rule("single_sample_variance", title="Covariance of a single observation")
def single_sample_covariance(failure: Failure) -> Explanation | None:
    # torch.cov ends in div(product, count - correction) with an integer tensor that is 0 for one observation.
    divisor = failure.stat("other")
    if failure.op != "div" or not failure.nan or divisor is None or divisor.numel != 1 or not failure.zero_at("other"):
        return None
    if not COVARIANCE.search(failure.code):
        return None
    why = (
        f"`{failure.code}` computes an unbiased covariance of one observation. It divides by the count minus 1, which "
        "is 0, so the result is NaN."
    )
    return Explanation(why, 0.96, failure.input_lines("self", "other"))


@rule("ctc_infeasible", elsewhere=1.0)
def ctc_infeasible(failure: Failure) -> Explanation | None:
    if not (failure.op.startswith("ctc_loss") or failure.derivative_of({"ctc_loss"})) or not failure.bad:
        return None
    if any(t.bad for t in failure.stats("log_probs")):
        return None
    names = ("input_lengths", "target_lengths")
    lengths = tuple(f"{n}: {failure.scalar(n)}" for n in names if failure.scalar(n) is not None)
    why = (
        f"`{failure.code}` has {counted(failure.bad, 'sequence')} whose target cannot be aligned with its input. CTC "
        "needs one input frame per label and one more between equal neighbours; an impossible alignment has "
        "probability 0, so its loss is inf."
    )
    return Explanation(why, 0.95, lengths + failure.input_lines(*names))


LOSS_ARITHMETIC = SUMS | JOINS | ADDITIONS | words("log_softmax logsumexp masked_fill mul neg select where")
"""What a loss written by hand does with the picked log-probabilities."""


def _width(failure: Failure, stat: TensorStat) -> int | None:
    """How many elements one row of the softmax has."""
    dim = failure.scalar("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if not isinstance(dim, int) or not -len(stat.shape) <= dim < len(stat.shape):
        return None
    return stat.shape[dim]


@rule("fully_masked_softmax", elsewhere=0.5)
def fully_masked_softmax(failure: Failure) -> Explanation | None:
    if failure.op not in SOFTMAXES | ATTENTION or not failure.nan:
        return None
    masked = [t for t in failure.tensors if t.neginf or (t.binary and t.dtype == "bool")]
    if not masked or any(t.posinf or t.nan for t in failure.tensors):
        return None
    width = _width(failure, masked[0])
    if width is not None and 0 < masked[0].neginf < width:
        return None
    rows = counted(failure.nan)
    if width and failure.nan % width == 0:
        rows = f"{counted(failure.nan // width, 'row')} of {counted(width, 'entry', 'entries')}"
    why = (
        f"`{failure.code}` takes a softmax over a row in which every entry is -inf, which is 0/0. {rows} became NaN: "
        "probably a sample is all padding, or two masks together cover everything."
    )
    return Explanation(
        why, 0.95, tuple(f"{t.name}: {t.neginf} of {t.numel} elements are -inf" for t in masked if t.neginf)
    )


@rule("fully_masked_softmax", title="Hand-written softmax over a fully masked row")
def masked_by_hand(failure: Failure) -> Explanation | None:
    # exp(x - x.max()) over a row of -inf is exp(-inf - -inf).
    if failure.op not in ("sub", "rsub", "div") or not failure.nan or any(t.posinf or t.nan for t in failure.tensors):
        return None
    near = {e.op for e in failure.feeding(4)}
    if failure.op == "div":
        # exp(-inf) is 0 everywhere, so the row's sum is 0 too.
        infinite = any(e.on_purpose or any(o.neginf for o in e.outputs) for e in failure.feeding(6))
        fits = {"exp", "sum"} <= near and infinite
    else:
        fits = bool(near & {"amax", "max", "logsumexp"}) and sum(t.neginf > 0 for t in failure.tensors) >= 2
    if not fits:
        return None
    why = (
        f"`{failure.code}` is part of a hand-written softmax over a row in which every entry is -inf. Such a row has "
        f"no finite maximum and its exponentials sum to 0: {counted(failure.nan)} became NaN."
    )
    return Explanation(why, 0.96 if failure.op == "div" else 0.9, failure.input_lines())


@rule("masked_label")
def masked_label(failure: Failure) -> Explanation | None:
    if (
        failure.op not in LABEL_PICKS | LOSS_ARITHMETIC | {"logsumexp"}
        or not failure.inf
        or failure.nan
        or failure.reads_nan
    ):
        return None
    if failure.event is not None and failure.event.born:
        return None
    masked = sum(t.neginf for t in failure.tensors)
    intended = masked > 0 or (failure.event is not None and failure.event.on_purpose)
    if any(t.posinf for t in failure.tensors):  # minus a log-probability that is masked further back
        masked = next((o.neginf for e in failure.feeding() if e.on_purpose for o in e.outputs if o.neginf), 0)
        intended = masked > 0
    if not intended:
        return None
    entries = f" ({counted(masked, 'masked entry', 'masked entries')})" if masked else ""
    if failure.op == "logsumexp":
        why = (
            f"`{failure.code}` reduces a slice in which every entry is masked with -inf{entries}. No class is left "
            "that the labels allow, so the loss is infinite."
        )
        return Explanation(why, 0.9, failure.input_lines())
    alone = failure.op in ADDITIONS and any(t.neginf == t.numel for t in failure.tensors)
    what = "uses an entry" if alone else "picks the log-probability of a class"
    entries = "" if alone else entries
    why = (
        f"`{failure.code}` {what} that is masked with -inf{entries}. The loss is infinite because the mask and the "
        "labels contradict each other."
    )
    return Explanation(why, 0.9 if failure.op in LABEL_PICKS or alone else 0.6, failure.input_lines())
