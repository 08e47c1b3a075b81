"""From a cause to edits of the user's source, the most promising first; nothing is tried here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from types import ModuleType

from firstnan.diagnose.rules.base import Failure, falls_without_bound
from firstnan.records import Cause, History, Origin, Remedy, Trace
from firstnan.repair import (
    attention,
    bias_correction,
    compiler,
    data,
    derivatives,
    guards,
    log_domain,
    masks,
    matrices,
    parameters,
    precision,
    reductions,
    settings,
    signs,
    softmax_by_hand,
    stable_formulas,
    torch_functions,
    zero_weights,
)
from firstnan.repair.context import PROPOSERS, FailureContext, SourceFiles
from firstnan.repair.source import as_patch

__all__ = ["propose"]

FAMILIES: tuple[ModuleType, ...] = (
    attention,
    bias_correction,
    log_domain,
    softmax_by_hand,
    zero_weights,
    stable_formulas,
    masks,
    reductions,
    matrices,
    derivatives,
    torch_functions,
    signs,
    settings,
    parameters,
    precision,
    guards,
    data,
    compiler,
)
"""Imported for the candidates they register; for one cause, those of the family named first come first."""
ORDER = [family.__name__ for family in FAMILIES]

MOST = 8
MOST_PER_CAUSE = 6

ADVICE = {
    "log_of_zero": ("Keep the argument of the logarithm above 0", "x.clamp_min(1e-12), or log_softmax and logsigmoid."),
    "log_of_negative": ("Keep the argument of the logarithm above 0", "x.clamp_min(1e-12), or softplus before it."),
    "sqrt_of_negative": ("Keep the argument of the root above 0", "x.clamp_min(1e-12) removes the rounding error."),
    "sqrt_grad_at_zero": ("Keep the argument of the root above 0", "x.clamp_min(1e-12).sqrt() has a finite gradient."),
    "pow_of_zero": ("Keep the base of the power above 0", "x.clamp_min(1e-8), or clamp_min(1) if it is a count."),
    "pow_of_negative": (
        "Keep the base of the power above 0",
        "x.clamp_min(1e-8): fractional powers are defined there.",
    ),
    "pow_grad_at_zero": ("Keep the base of the power above 0", "x.clamp_min(1e-8) ** p has a finite gradient."),
    "acos_grad_at_one": (
        "Keep the argument between -1 and 1",
        "x.clamp(-1 + 1e-6, 1 - 1e-6) has a finite gradient.",
    ),
    "arc_out_of_domain": ("Keep the argument inside the domain", "x.clamp(-1 + 1e-6, 1 - 1e-6)."),
    "pole": ("Keep the argument away from the pole", "x.clamp_min(1e-6)."),
    "div_by_zero": ("Keep the denominator away from 0", "x.clamp_min(1e-8), or clamp_min(1) if it is a count."),
    "zero_over_zero": (
        "Keep the denominator away from 0",
        "0 / x.clamp_min(1e-8) is 0; use clamp_min(1) for a count.",
    ),
    "exp_overflow": ("Bound the exponent", "x.clamp_max(20), or logsumexp, softmax and softplus instead of exp."),
    "fully_masked_softmax": ("Mask with -1e9 instead of -inf", "A fully masked row then has a finite result."),
    "masked_label": ("Mask with -1e4 instead of -inf", "A label on a masked class then has a large, finite loss."),
    "logsumexp_grad_all_inf": ("Mask with -1e9 instead of -inf", "A fully masked row then has a finite gradient."),
    "zero_times_inf": ("Fill in the mask instead of multiplying", "masked_fill, or a finite number instead of inf."),
    "empty_reduction": (
        "Divide the sum by the count, at least 1",
        "sum() / max(count, 1) is 0 for an empty selection.",
    ),
    "single_sample_variance": ("Use correction=0 for a single sample", "Its variance is then 0 instead of 0/0."),
    "where_grad_trap": (
        "Guard the argument, not the result",
        "Give the branch that is not taken a harmless argument.",
    ),
    "xlogy_grad_at_zero": ("Keep the second argument above 0", "xlogy(x, y.clamp_min(1e-12)) has a finite gradient."),
    "degenerate_decomposition": ("Add small, distinct numbers to the diagonal", "Equal values then differ a little."),
    "not_positive_definite": ("Add 1e-6 to the diagonal", "No eigenvalue is then 0 or negative through rounding."),
    "singular_matrix": ("Add 1e-6 to the diagonal", "The matrix then has an inverse."),
    "ctc_infeasible": ("Use zero_infinity=True", "Targets that cannot be aligned are then ignored."),
}
"""What usually helps, in words, if the source is not on disk."""


def propose(origin: Origin, trace: Trace, history: History, causes: Sequence[Cause]) -> tuple[Remedy, ...]:
    """Candidates for the causes that were found, without repetition, those of the likeliest cause first."""
    failure, files = Failure(origin, trace, history), SourceFiles()
    found: dict[str, Remedy] = {}
    # A smaller learning rate, or a bound, only delays the end of a loss that has no lower bound.
    endless = bool(causes) and causes[0].slug == "divergence_lr" and falls_without_bound(failure.diverging)
    for cause in causes[:1] if endless else causes:
        for candidate in islice(
            _candidates(FailureContext(failure, cause, files), signs if endless else None), MOST_PER_CAUSE
        ):
            found.setdefault(candidate.diff, candidate)
    if not found and causes and (origin.site is None or files.get(origin.site.file) is None):
        return _advice(causes[0].slug)
    return tuple(found.values())[:MOST]


def _candidates(context: FailureContext, only: ModuleType | None) -> Iterator[Remedy]:
    """Those whose edits are valid, with their diffs; of one family, if it is given."""
    proposers = PROPOSERS.get(context.cause.slug, [])
    if only is not None:
        proposers = [p for p in proposers if p.__module__ == only.__name__]
    for proposer in sorted(proposers, key=lambda proposer: ORDER.index(proposer.__module__)):
        try:
            for candidate in proposer(context):
                edits, diff = as_patch(candidate.edits, context.files.get)
                if diff:
                    yield replace(candidate, edits=edits, diff=diff)
        except Exception:  # an unusual program must not cost the other candidates
            continue


def _advice(slug: str) -> tuple[Remedy, ...]:
    """One remedy without a diff, if there is a usual one."""
    title, why = ADVICE.get(slug, ("", ""))
    return (Remedy(title, why=why, note="the source is not on disk"),) if title else ()
