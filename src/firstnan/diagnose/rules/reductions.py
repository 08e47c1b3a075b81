"""Means and variances of too few elements, and CTC alignments that do not exist."""

from __future__ import annotations

import math

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure, has_zero
from firstnan.diagnose.rules.wording import counted
from firstnan.records import TensorStat
from firstnan.records.operator_families import DIVISIONS, MEANS, NEGATIVE_LIKELIHOODS, SPREADS
from firstnan.records.words import number


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
def empty_reduction(failure: Failure) -> Finding | None:
    empty = [t for t in failure.tensors if t.numel == 0 or (failure.op in SPREADS and _reduced(failure, t) == 0)]
    if failure.op not in MEANS | SPREADS or not failure.bad or not empty:
        return None
    why = (
        f"`{failure.code}` reduces a tensor of shape {list(empty[0].shape)}, which has no elements in this batch. The "
        "mean of zero elements is 0/0."
    )
    return Finding(why, 0.97, failure.input_lines())


@rule("empty_reduction", title="Every target in the batch is ignored")
def all_ignored(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.95, failure.input_lines("target", "weight"))


@rule("empty_reduction")
def empty_count(failure: Failure) -> Finding | None:
    bottom = DIVISIONS.get(failure.op, ("", ""))[1]
    if not bottom or not failure.nan or not failure.zero_at(bottom):
        return None
    stat = failure.stat(bottom)
    counted_mask = any(
        m.op in ("sum", "count_nonzero") and any(_is_mask(i.stat) for i in m.inputs) for m in failure.makers(bottom)
    )
    integer = stat is not None and stat.dtype.startswith("int") and has_zero(stat)
    if not (counted_mask or integer or isinstance(failure.scalar(bottom), int)):
        return None
    why = f"`{failure.code}` divides by a count that is 0 in this batch. There is nothing to average: the mean is 0/0."
    return Finding(why, 0.6, failure.input_lines(bottom))


@rule("single_sample_variance")
def single_sample_variance(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.97 if count is not None else 0.7, failure.input_lines())


@rule("single_sample_variance", title="Covariance of a single observation")
def single_sample_covariance(failure: Failure) -> Finding | None:
    # torch.cov ends in div(product, count - correction) with an integer tensor that is 0 for one observation.
    if failure.op != "div" or not failure.nan or "cov" not in failure.code or not failure.zero_at("other"):
        return None
    why = (
        f"`{failure.code}` computes an unbiased covariance of one observation. It divides by the count minus 1, which "
        "is 0, so the result is NaN."
    )
    return Finding(why, 0.96, failure.input_lines("self", "other"))


@rule("ctc_infeasible", elsewhere=1.0)
def ctc_infeasible(failure: Failure) -> Finding | None:
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
    return Finding(why, 0.95, lengths + failure.input_lines(*names))
