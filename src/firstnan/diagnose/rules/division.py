"""Divisions by zero, in all the forms that aten gives them, and products of zero and infinity."""

from __future__ import annotations

import math

from firstnan.diagnose.rules import provenance
from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure, has_zero, number

# (numerator, denominator) by operator; `1 / x` reaches aten as reciprocal(x), then mul.
DIVISIONS: dict[str, tuple[str, str]] = {
    "div": ("self", "other"),
    "true_divide": ("self", "other"),
    "floor_divide": ("self", "other"),
    "remainder": ("self", "other"),
    "fmod": ("self", "other"),
    "addcdiv": ("tensor1", "tensor2"),
    "reciprocal": ("", "self"),
    "rsqrt": ("", "self"),
}
NORMALISERS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "weight_norm_interface")
PRODUCTS = ("mul", "mm", "addmm", "bmm", "baddbmm", "dot", "mv", "addmv", "prod", "cumprod", "addcmul", "convolution")
ONE_BY_ONE = ("sub", "rsub", "add", "div")
ELSEWHERE = 0.3


@rule("zero_over_zero", elsewhere=ELSEWHERE)
def zero_over_zero(failure: Failure) -> Finding | None:
    if failure.op not in DIVISIONS or not failure.nan:
        return None
    top, bottom = DIVISIONS[failure.op]
    if not top or not failure.zero_at(bottom) or not failure.zero_at(top):
        return None
    named = provenance.zero(failure.trace, failure.event, bottom) or " Nothing keeps the denominator away from 0."
    why = f"`{failure.code}` divides 0 by 0 in {failure.nan} element(s), and 0/0 is NaN. The denominator is 0.{named}"
    return Finding(why, 0.95, failure.input_lines(top, bottom))


@rule("zero_over_zero", title="Normalising values that are all equal")
def normalise_constant(failure: Failure) -> Finding | None:
    if failure.op not in NORMALISERS or not failure.nan or failure.fed_by_nonfinite:
        return None
    eps = failure.scalar("eps")
    if eps is None and failure.op != "weight_norm_interface":
        return None
    if eps is not None and eps > 1e-30:
        return None
    why = (
        f"`{failure.code}` divides by a spread or norm that is 0, with eps = {number(eps or 0.0)}. Values that "
        f"are all equal then give 0/0, here {failure.nan} NaN."
    )
    return Finding(why, 0.9, failure.input_lines())


@rule("div_by_zero", elsewhere=ELSEWHERE)
def div_by_zero(failure: Failure) -> Finding | None:
    if failure.op not in DIVISIONS or not (failure.inf or failure.op in ("fmod", "remainder")):
        return None
    top, bottom = DIVISIONS[failure.op]
    if not failure.zero_at(bottom):
        return None
    count = sum(s.zeros for s in failure.stats(bottom)) or failure.inf
    numerator = f"{number(failure.at(top))} " if top and failure.at(top) is not None else ""
    named = provenance.zero(failure.trace, failure.event, bottom)
    result = f"{failure.inf} infinite" if failure.inf else f"{failure.nan} NaN"
    why = (
        f"`{failure.code}` divides {numerator}by a number that is exactly 0 in {count} element(s).{named} "
        f"That gives {result} element(s)."
    )
    return Finding(why, 0.94, failure.input_lines(*(n for n in (top, bottom) if n)))


@rule("zero_times_inf", elsewhere=ELSEWHERE)
def zero_times_inf(failure: Failure) -> Finding | None:
    if failure.op not in PRODUCTS or not failure.nan or failure.event is None:
        return None
    constant = failure.scalar("other", "value")
    scalar_inf = constant in (float("inf"), float("-inf"))
    infinite = scalar_inf or any(t.inf for t in failure.tensors)
    values = [v for n, v in failure.event.witness if n != "result"]
    zero = constant == 0 or (0 in values if values else any(has_zero(t) for t in failure.tensors))
    if not infinite or not zero or any(t.nan for t in failure.tensors):
        return None
    why = (
        f"`{failure.code}` multiplies an infinity by 0, and 0 * inf is NaN ({failure.nan} element(s)). The "
        "infinity is there on purpose, as a mask: a mask of infinities must be filled in or added, never "
        "multiplied."
    )
    return Finding(why, 0.92, failure.input_lines())


@rule("inf_minus_inf")
def inf_minus_inf(failure: Failure) -> Finding | None:
    if failure.op not in ("sub", "rsub", "add", "sum", "mean", "cumsum", "div", "var", "std") or not failure.nan:
        return None
    infinite = sum(t.inf for t in failure.tensors)
    if not infinite or any(t.nan for t in failure.tensors):
        return None
    seen = [v for n, v in failure.event.witness if n != "result"] if failure.event is not None else []
    if seen and failure.op in ONE_BY_ONE and not any(math.isinf(v) for v in seen):
        return None  # the infinities are elsewhere in it
    kind = "divides one infinity by another" if failure.op == "div" else "subtracts one infinity from another"
    why = (
        f"`{failure.code}` reads {infinite} infinite element(s) and {kind}. That has no value, so {failure.nan} "
        "element(s) became NaN."
    )
    return Finding(why, 0.6, failure.input_lines())


@rule("inf_minus_inf", title="An operator that has no value for infinity")
def no_value_for_infinity(failure: Failure) -> Finding | None:
    if failure.event is None or not failure.event.nan_from_inf or any(t.nan for t in failure.tensors):
        return None
    infinite = sum(t.inf for t in failure.tensors)
    why = (
        f"`{failure.code}` reads {infinite} infinite element(s), for which {failure.op} has no value: {failure.nan} "
        "element(s) became NaN. The infinity was put there on purpose, or belongs to a mask."
    )
    return Finding(why, 0.2, failure.input_lines())
