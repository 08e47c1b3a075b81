"""Arguments outside the domain of a function, or at its edge: log, sqrt, pow, inverse functions, poles."""

from __future__ import annotations

from firstnan.diagnose.rules.base import ELSEWHERE, Finding, rule
from firstnan.diagnose.rules.failure import Failure
from firstnan.diagnose.rules.provenance import why_zero
from firstnan.diagnose.rules.wording import counted
from firstnan.records.operator_families import DETERMINANTS, INVERSE_FUNCTIONS, LOGS, NORMALISERS, POLES, POWERS, ROOTS
from firstnan.records.words import number


def _logarithm(failure: Failure, edge: float) -> str:
    return "takes the logarithm of" if edge == 0 else f"evaluates {failure.op} at"


@rule("log_of_zero", elsewhere=ELSEWHERE)
def log_of_zero(failure: Failure) -> Finding | None:
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
        f"which gives -inf.{reason} The infinity then spreads to the loss and the gradients."
    )
    return Finding(why, 0.95 if touched else 0.7, failure.input_lines(name))


@rule("log_of_negative", elsewhere=ELSEWHERE)
def log_of_negative(failure: Failure) -> Finding | None:
    if failure.op not in LOGS or not failure.nan:
        return None
    name, edge = LOGS[failure.op]
    if not failure.negative_at(name, edge):
        return None
    why = (
        f"`{failure.code}` {_logarithm(failure, edge)} numbers down to {number(failure.lowest(name))}, but it is "
        f"only defined above {number(edge)}. {counted(failure.nan)} became NaN."
    )
    return Finding(why, 0.95, failure.input_lines(name))


@rule("log_of_negative", title="Log-determinant of a negative determinant")
def logdet_of_negative(failure: Failure) -> Finding | None:
    # logdet is slogdet, eq(sign, -1), scalar_tensor(nan), where: the NaN is a constant that torch itself selects.
    if failure.op != "where" or not failure.nan or not any(e.op in DETERMINANTS for e in failure.feeding(3)):
        return None
    why = (
        f"The determinant in `{failure.code}` is negative for {counted(failure.nan, 'matrix', 'matrices')}. A negative "
        "number has no real logarithm, so torch returns NaN."
    )
    return Finding(why, 0.97)


@rule("log_of_zero", title="Log-determinant of a singular matrix")
def logdet_of_singular(failure: Failure) -> Finding | None:
    if failure.op != "slogdet" or not failure.inf or failure.fed_by_nonfinite:
        return None
    why = (
        f"The determinant in `{failure.code}` is exactly 0 for {counted(failure.inf, 'matrix', 'matrices')}, and its "
        "logarithm is -inf. The matrix is singular: a row or column is zero or a combination of others."
    )
    return Finding(why, 0.8, failure.input_lines())


@rule("sqrt_of_negative", elsewhere=ELSEWHERE)
def sqrt_of_negative(failure: Failure) -> Finding | None:
    name = "running_var" if failure.op in NORMALISERS else "self"
    if failure.op not in ROOTS | NORMALISERS or not failure.nan or not failure.negative_at(name):
        return None
    lowest = failure.lowest(name)
    small = lowest is not None and lowest > -1e-3
    tail = (
        " Such a small negative number is usually a rounding error in a difference that should be 0." if small else ""
    )
    why = (
        f"`{failure.code}` takes the square root of {number(lowest)}. A negative number has no real root: "
        f"{counted(failure.nan)} became NaN.{tail}"
    )
    return Finding(why, 0.95, failure.input_lines(name))


@rule("pow_of_zero", elsewhere=ELSEWHERE)
def pow_of_zero(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("pow_of_negative", elsewhere=ELSEWHERE)
def pow_of_negative(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("sqrt_of_negative")
def half_power_of_negative(failure: Failure) -> Finding | None:
    found = pow_of_negative(failure) if failure.at("exponent") in (0.5, -0.5) else None
    return Finding(found.why, 0.5, found.evidence) if found else None


@rule("arc_out_of_domain", elsewhere=ELSEWHERE)
def arc_out_of_domain(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.95, failure.input_lines("self"))


@rule("pole", elsewhere=ELSEWHERE)
def pole(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.93, failure.input_lines("self"))
