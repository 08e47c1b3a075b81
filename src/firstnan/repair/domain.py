"""Arguments outside the domain of a function or at its boundary, and divisions by zero: guarded."""

from __future__ import annotations

from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import guarded

STEEP = words("log log2 log10 sqrt rsqrt pow div reciprocal exp expm1 acos asin atanh")


@remedies_for(
    "log_of_zero",
    "log_of_negative",
    "sqrt_of_negative",
    "pow_of_zero",
    "pow_of_negative",
    "arc_out_of_domain",
    "pole",
    "div_by_zero",
    "zero_over_zero",
    "empty_reduction",
    "exp_overflow",
    "sqrt_grad_at_zero",
    "pow_grad_at_zero",
    "acos_grad_at_one",
    "xlogy_grad_at_zero",
    "where_grad_trap",
    "custom_backward",
    "infinite_derivative",
    "unexplained",
)
def guard_the_argument(context: FailureContext) -> Iterator[Remedy]:
    yield from guarded(context)


@remedies_for("nan_input", "nan_label")
def guard_numpy_code(context: FailureContext) -> Iterator[Remedy]:
    """A line of a Dataset that computes bad values with numpy, where no torch operator was recorded."""
    if context.event is None:
        yield from guarded(context)


@remedies_for("exploding_gradient", "overflow", "low_precision_overflow")
def guard_a_steep_function(context: FailureContext) -> Iterator[Remedy]:
    if context.location is not None and context.location.expr.op in STEEP:
        yield from guarded(context)
