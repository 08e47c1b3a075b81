"""Arguments outside the domain of a function or at its edge, and divisions by zero: guarded where they stand."""

from __future__ import annotations

from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.records.operator_families import words
from firstnan.repair.base import Job, remedy
from firstnan.repair.guards import guarded

STEEP = words("log log2 log10 sqrt rsqrt pow div reciprocal exp expm1 acos asin atanh")


@remedy(
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
def guard_the_argument(job: Job) -> Iterator[Remedy]:
    yield from guarded(job)


@remedy("nan_input", "nan_label")
def guard_what_numpy_computes(job: Job) -> Iterator[Remedy]:
    """A line of a Dataset that made bad data out of good: no operator of torch's was seen there."""
    if job.event is None:
        yield from guarded(job)


@remedy("exploding_gradient", "overflow", "low_precision_overflow")
def guard_a_steep_function(job: Job) -> Iterator[Remedy]:
    if job.place is not None and job.place.expr.op in STEEP:
        yield from guarded(job)
