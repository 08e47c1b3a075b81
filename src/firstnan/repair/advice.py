"""What usually helps, in words, where there is no source on disk to change."""

from __future__ import annotations

from firstnan.records import Remedy

ADVICE = {
    "log_of_zero": ("Keep the argument of the logarithm above 0", "x.clamp_min(1e-12), or log_softmax and logsigmoid."),
    "log_of_negative": ("Keep the argument of the logarithm above 0", "x.clamp_min(1e-12), or softplus before it."),
    "sqrt_of_negative": ("Keep the argument of the root above 0", "x.clamp_min(1e-12): rounding no longer matters."),
    "sqrt_grad_at_zero": ("Keep the argument of the root above 0", "The slope of x.clamp_min(1e-12).sqrt() is finite."),
    "pow_of_zero": ("Keep the base of the power above 0", "x.clamp_min(1e-8), or 1 where it is a count."),
    "pow_of_negative": (
        "Keep the base of the power above 0",
        "x.clamp_min(1e-8): fractional powers are defined there.",
    ),
    "pow_grad_at_zero": ("Keep the base of the power above 0", "The slope of x.clamp_min(1e-8) ** p is finite."),
    "acos_grad_at_one": ("Keep the argument inside of -1 and 1", "x.clamp(-1 + 1e-6, 1 - 1e-6): the slope is finite."),
    "arc_out_of_domain": ("Keep the argument inside of the domain", "x.clamp(-1 + 1e-6, 1 - 1e-6)."),
    "pole": ("Keep the argument away from the pole", "x.clamp_min(1e-6)."),
    "div_by_zero": ("Keep the denominator away from 0", "x.clamp_min(1e-8), or 1 where it is a count."),
    "zero_over_zero": ("Keep the denominator away from 0", "0 / x.clamp_min(1e-8) is 0; counts take clamp_min(1)."),
    "exp_overflow": ("Bound the exponent", "x.clamp_max(20), or logsumexp, softmax and softplus in place of exp."),
    "fully_masked_softmax": ("Mask with -1e9 instead of -inf", "A row without anything to attend to has a value then."),
    "masked_label": ("Mask with -1e4 instead of -inf", "A label on a masked class costs much, not infinitely much."),
    "logsumexp_grad_all_inf": ("Mask with -1e9 instead of -inf", "The derivative of such a row is finite."),
    "zero_times_inf": ("Fill the mask in instead of multiplying", "masked_fill, or a finite number in place of inf."),
    "empty_reduction": (
        "Divide the sum by the count, at least 1",
        "sum() / max(count, 1) is 0 for an empty selection.",
    ),
    "single_sample_variance": ("Use correction=0 for a single sample", "Its spread is 0 then instead of 0/0."),
    "where_grad_trap": (
        "Guard the argument, not the result",
        "Where the branch is not taken, give it a harmless number.",
    ),
    "xlogy_grad_at_zero": ("Keep the second argument above 0", "xlogy(x, y.clamp_min(1e-12)) has a finite slope."),
    "degenerate_decomposition": ("Add a small ladder to the diagonal", "Equal values then differ a little."),
    "not_positive_definite": ("Add 1e-6 to the diagonal", "No eigenvalue is 0, or below it by rounding."),
    "singular_matrix": ("Add 1e-6 to the diagonal", "The matrix then has an inverse."),
    "ctc_infeasible": ("Use zero_infinity=True", "Targets that cannot be aligned take no part."),
}


def advice(slug: str) -> tuple[Remedy, ...]:
    """One remedy without a diff, where there is a usual one."""
    title, why = ADVICE.get(slug, ("", ""))
    return (Remedy(title, why=why, note="the source is not on disk"),) if title else ()
