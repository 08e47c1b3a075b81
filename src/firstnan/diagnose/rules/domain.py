"""Arguments outside the domain of a function, or at its edge: log, sqrt, pow, inverse trigonometry, poles."""

from __future__ import annotations

import math

from firstnan.diagnose.rules import provenance
from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure, number

# The argument of the logarithm, and the value at which it is -inf (below that it is NaN).
LOGS = {
    "log": ("self", 0.0),
    "log2": ("self", 0.0),
    "log10": ("self", 0.0),
    "log1p": ("self", -1.0),
    "xlogy": ("other", 0.0),
    "xlog1py": ("other", -1.0),
    "entr": ("self", 0.0),
    "kl_div": ("target", 0.0),
}
ROOTS = ("sqrt", "rsqrt")
ARCS = ("acos", "asin", "atanh", "erfinv")
DOMAINS = {"acosh": (1.0, math.inf), "logit": (0.0, 1.0), "ndtri": (0.0, 1.0)}
"""Where an inverse function is defined, if it is not from -1 to 1."""
POLES = ("lgamma", "digamma", "polygamma", "tan", "mvlgamma", "zeta")
NORMALISERS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
ELSEWHERE = 0.3


def _zero(failure: Failure, name: str, edge: float = 0.0) -> str:
    return provenance.zero(failure.trace, failure.event, name) if edge == 0 else ""


@rule("log_of_zero", elsewhere=ELSEWHERE)
def log_of_zero(failure: Failure) -> Finding | None:
    if failure.op not in LOGS or not failure.inf:
        return None
    name, edge = LOGS[failure.op]
    value = failure.at(name)
    stats = failure.stats(name)
    touched = (
        value == edge if value is not None else any(edge in (s.min, s.max) or (edge == 0 and s.zeros) for s in stats)
    )
    if not touched and stats:
        return None
    count = sum(s.zeros for s in stats) if edge == 0 else failure.inf
    why = (
        f"`{failure.code}` takes a logarithm whose argument is exactly {number(edge)} in {count or failure.inf} "
        f"element(s), and the logarithm there is -inf.{_zero(failure, name, edge)} The infinity then spreads into "
        "the loss and the gradients."
    )
    return Finding(why, 0.95 if touched else 0.7, failure.input_lines(name))


@rule("log_of_negative", elsewhere=ELSEWHERE)
def log_of_negative(failure: Failure) -> Finding | None:
    if failure.op not in LOGS or not failure.nan:
        return None
    name, edge = LOGS[failure.op]
    if not failure.negative_at(name, edge):
        return None
    lowest = min((s.min for s in failure.stats(name) if s.min is not None), default=failure.at(name))
    why = (
        f"`{failure.code}` takes the logarithm of numbers down to {number(lowest)}, below {number(edge)}, where "
        f"it is not defined. That gives {failure.nan} NaN."
    )
    return Finding(why, 0.95, failure.input_lines(name))


@rule("log_of_negative", title="Log-determinant of a matrix with a negative determinant")
def logdet_of_negative(failure: Failure) -> Finding | None:
    # logdet is slogdet, eq(sign, -1), scalar_tensor(nan), where: the NaN is a constant that torch itself selects.
    if (
        failure.op != "where"
        or not failure.nan
        or not any(e.op in ("slogdet", "linalg_slogdet") for e in failure.feeding(3))
    ):
        return None
    why = (
        f"`{failure.code}` takes the logarithm of a determinant that is negative in {failure.nan} matrix(es). A "
        "negative determinant has no real logarithm, so torch returns NaN."
    )
    return Finding(why, 0.97)


@rule("log_of_zero", title="Log-determinant of a singular matrix")
def logdet_of_singular(failure: Failure) -> Finding | None:
    if failure.op != "slogdet" or not failure.inf or failure.fed_by_nonfinite:
        return None
    why = (
        f"`{failure.code}` takes the logarithm of a determinant that is exactly 0 in {failure.inf} matrix(es), "
        "which is -inf. The matrix is singular: a row or column is zero or a combination of others."
    )
    return Finding(why, 0.8, failure.input_lines())


@rule("sqrt_of_negative", elsewhere=ELSEWHERE)
def sqrt_of_negative(failure: Failure) -> Finding | None:
    name = "running_var" if failure.op in NORMALISERS else "self"
    if failure.op not in (*ROOTS, *NORMALISERS) or not failure.nan or not failure.negative_at(name):
        return None
    lowest = min((s.min for s in failure.stats(name) if s.min is not None), default=failure.at(name))
    small = lowest is not None and lowest > -1e-3
    tail = " So small a negative number is usually rounding of a difference that should be 0." if small else ""
    why = (
        f"`{failure.code}` takes the square root of {number(lowest)}. A negative number has no real root, so "
        f"{failure.nan} element(s) became NaN.{tail}"
    )
    return Finding(why, 0.95, failure.input_lines(name))


@rule("pow_of_zero", elsewhere=ELSEWHERE)
def pow_of_zero(failure: Failure) -> Finding | None:
    if failure.op not in ("pow", "float_power") or not failure.inf:
        return None
    if not failure.negative_at("exponent") or not failure.zero_at("self"):
        return None
    why = (
        f"`{failure.code}` raises 0 to the power {number(failure.at('exponent'))}. A negative power divides by "
        f"its base, and dividing by 0 gave {failure.inf} infinite element(s).{_zero(failure, 'self')}"
    )
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("pow_of_negative", elsewhere=ELSEWHERE)
def pow_of_negative(failure: Failure) -> Finding | None:
    if failure.op not in ("pow", "float_power") or not failure.nan or not failure.negative_at("self"):
        return None
    exponent = failure.at("exponent")
    if exponent is not None and float(exponent).is_integer():
        return None
    base = failure.at("self")
    lowest = (
        base if base is not None else min((s.min for s in failure.stats("self") if s.min is not None), default=None)
    )
    why = (
        f"`{failure.code}` raises {number(lowest)} to the power {number(exponent)}. A negative base has no real "
        f"fractional power, so {failure.nan} element(s) became NaN."
    )
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("sqrt_of_negative")
def half_power_of_negative(failure: Failure) -> Finding | None:
    if failure.at("exponent") not in (0.5, -0.5):
        return None
    found = pow_of_negative(failure)
    return Finding(found.why, 0.5, found.evidence) if found else None


@rule("arc_out_of_domain", elsewhere=ELSEWHERE)
def arc_out_of_domain(failure: Failure) -> Finding | None:
    if not failure.nan or failure.op not in (*ARCS, *DOMAINS):
        return None
    stat, value = failure.stat("self"), failure.at("self")
    low, high = DOMAINS.get(failure.op, (-1.0, 1.0))
    seen = [v for v in ((value,) if value is not None else (stat.min, stat.max) if stat else ()) if v is not None]
    outside = [v for v in seen if not low <= v <= high]
    if not outside:
        return None
    worst = max(outside, key=lambda v: max(low - v, v - high))
    excess = min(abs(worst - low), abs(worst - high))
    why = (
        f"`{failure.code}` got {worst:.8g}, but {failure.op} is defined from {number(low)} to {number(high)} only. "
        + (f"It is out by {number(excess)}, which is rounding." if excess < 1e-3 else "That gives NaN.")
    )
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("pole", elsewhere=ELSEWHERE)
def pole(failure: Failure) -> Finding | None:
    if not (failure.nan or failure.inf) or failure.fed_by_nonfinite:
        return None
    value = failure.at("self")
    if failure.op in (*ARCS, *DOMAINS):
        edges = DOMAINS.get(failure.op, (-1.0, 1.0))
        hit = failure.inf > 0 and (value in edges if value is not None else True)
        where = f"exactly {number(value)}" if value is not None else f"{number(edges[0])} or {number(edges[1])}"
    elif failure.op in POLES:
        hit = value is None or failure.op == "tan" or (value <= 0 and float(value).is_integer())
        where = f"exactly {number(value)}" if value is not None else "0 or a negative whole number"
    else:
        return None
    if not hit:
        return None
    why = (
        f"`{failure.code}` evaluates {failure.op} at {where}, where the function goes to infinity. That gives "
        f"{failure.nan + failure.inf} non-finite element(s)."
    )
    return Finding(why, 0.93, failure.input_lines("self"))
