"""Divisions by zero, in all the forms that aten gives them, and products and differences with infinity."""

from __future__ import annotations

import math

from firstnan.diagnose.rules.base import ELSEWHERE, Finding, rule
from firstnan.diagnose.rules.failure import Failure, has_zero
from firstnan.diagnose.rules.provenance import why_zero
from firstnan.diagnose.rules.wording import counted
from firstnan.records.operator_families import ADDITIONS, DIVISIONS, NORMALISERS, PRODUCTS, SPREADS, SUMS
from firstnan.records.words import number

ELEMENTWISE = ADDITIONS | {"div"}
WEIGHT_NORM = "weight_norm_interface"


@rule("zero_over_zero", elsewhere=ELSEWHERE)
def zero_over_zero(failure: Failure) -> Finding | None:
    if failure.op not in DIVISIONS or not failure.nan:
        return None
    top, bottom = DIVISIONS[failure.op]
    if not top or not failure.zero_at(bottom) or not failure.zero_at(top):
        return None
    reason = why_zero(failure.trace, failure.event, bottom) or " Nothing keeps the denominator away from 0."
    why = f"`{failure.code}` divides 0 by 0 in {counted(failure.nan)}, and 0/0 is NaN.{reason}"
    return Finding(why, 0.95, failure.input_lines(top, bottom))


@rule("zero_over_zero", title="Normalising equal values")
def normalise_constant(failure: Failure) -> Finding | None:
    if failure.op not in NORMALISERS | {WEIGHT_NORM} or not failure.nan or failure.fed_by_nonfinite:
        return None
    eps = failure.scalar("eps")
    if eps is None and failure.op == WEIGHT_NORM:
        eps = 0.0
    if eps is None or eps > 1e-30:
        return None
    why = (
        f"`{failure.code}` divides by a spread or norm of 0, with eps = {number(eps)}. Equal values then give "
        f"0/0: {counted(failure.nan)} became NaN."
    )
    return Finding(why, 0.9, failure.input_lines())


@rule("div_by_zero", elsewhere=ELSEWHERE)
def div_by_zero(failure: Failure) -> Finding | None:
    if failure.op not in DIVISIONS or not (failure.inf or failure.op in ("fmod", "remainder")):
        return None
    top, bottom = DIVISIONS[failure.op]
    if not failure.zero_at(bottom):
        return None
    numerator = f"{number(failure.at(top))} " if top and failure.at(top) is not None else ""
    became = f"{counted(failure.inf)} became infinite" if failure.inf else f"{counted(failure.nan)} became NaN"
    reason = why_zero(failure.trace, failure.event, bottom)
    why = f"`{failure.code}` divides {numerator}by exactly 0: {became}.{reason}"
    return Finding(why, 0.94, failure.input_lines(*(n for n in (top, bottom) if n)))


@rule("zero_times_inf", elsewhere=ELSEWHERE)
def zero_times_inf(failure: Failure) -> Finding | None:
    if failure.op not in PRODUCTS or not failure.nan or failure.event is None or failure.reads_nan:
        return None
    constant, seen = failure.scalar("other", "value"), failure.read_at.values()
    infinite = constant in (math.inf, -math.inf) or any(t.inf for t in failure.tensors)
    zero = constant == 0 or (0 in seen if seen else any(has_zero(t) for t in failure.tensors))
    if not infinite or not zero:
        return None
    why = (
        f"`{failure.code}` multiplies infinity by 0 in {counted(failure.nan)}, and 0 * inf is NaN. A mask of "
        "infinities must be filled in or added, never multiplied."
    )
    return Finding(why, 0.92, failure.input_lines())


@rule("inf_minus_inf")
def inf_minus_inf(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.6, failure.input_lines())


@rule("inf_minus_inf", title="Operator undefined for infinity")
def undefined_for_infinity(failure: Failure) -> Finding | None:
    if failure.event is None or not failure.event.nan_from_inf or failure.reads_nan:
        return None
    infinite = counted(sum(t.inf for t in failure.tensors), "infinite element")
    why = (
        f"`{failure.code}` reads {infinite}, and {failure.op} is undefined for infinity: {counted(failure.nan)} became "
        "NaN. The infinity itself looks intentional, as in a mask."
    )
    return Finding(why, 0.2, failure.input_lines())
