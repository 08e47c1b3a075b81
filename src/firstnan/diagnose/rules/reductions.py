"""Means and variances of too few elements, and a CTC alignment that does not exist."""

from __future__ import annotations

import math

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS
from firstnan.diagnose.rules.failure import Failure, has_zero, number, words
from firstnan.records import TensorStat

MEANS = words(
    "mean nanmean median nanmedian mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div logsumexp soft_margin_loss nll_loss nll_loss2d cross_entropy"
)
NLL = ("nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy", "cross_entropy_loss")
SPREADS = ("var", "std", "var_mean", "std_mean")


def _reduced(failure: Failure, stat: TensorStat) -> int | None:
    """How many elements each result was computed from; None if that cannot be told."""
    dim = failure.scalar("dim")
    if isinstance(dim, int):
        dim = [dim]
    if dim:
        if not all(isinstance(d, int) and -len(stat.shape) <= d < len(stat.shape) for d in dim):
            return None
        return math.prod(int(stat.shape[d]) for d in dim)
    made = failure.made
    return stat.numel // made.numel if made and made.numel and stat.numel % made.numel == 0 else stat.numel


def _mask(stat: TensorStat | None) -> bool:
    return stat is not None and (stat.binary or stat.dtype == "bool")


def _correction(failure: Failure) -> float:
    given = failure.scalar("correction", "unbiased")
    return 1.0 if given is None else float(given)


@rule("empty_reduction")
def empty_reduction(failure: Failure) -> Finding | None:
    empty = [t for t in failure.tensors if t.numel == 0 or (failure.op in SPREADS and _reduced(failure, t) == 0)]
    if failure.op not in MEANS | {*SPREADS, *NLL} or not (failure.nan or failure.inf) or not empty:
        return None
    why = (
        f"`{failure.code}` reduces a tensor of shape {list(empty[0].shape)}, which has no element to average. A "
        "mean over nothing is 0/0: the selection before it came out empty in this batch."
    )
    return Finding(why, 0.97, failure.input_lines())


@rule("empty_reduction", title="Every target of the batch is ignored")
def all_ignored(failure: Failure) -> Finding | None:
    # nll_loss divides by its second output, the summed weight of the targets that count.
    if failure.op not in NLL or not failure.nan or failure.fed_by_nonfinite:
        return None
    outputs = failure.event.outputs if failure.event else ()
    if len(outputs) > 1 and outputs[1].max not in (0, None):
        return None
    target = failure.stat("target")
    ignore = failure.scalar("ignore_index")
    ignored = target is not None and target.min == target.max == ignore
    detail = f"all {target.numel} targets equal ignore_index = {ignore}" if target and ignored else "no target counts"
    why = (
        f"`{failure.code}` averages over the targets that count, and in this batch there are none: {detail}. "
        "The total weight it divides by is 0, so the loss is NaN."
    )
    return Finding(why, 0.95, failure.input_lines("target", "weight"))


@rule("empty_reduction")
def empty_count(failure: Failure) -> Finding | None:
    if failure.op not in DIVISIONS or not failure.nan or not failure.zero_at(DIVISIONS[failure.op][1]):
        return None
    bottom = DIVISIONS[failure.op][1]
    stat = failure.stat(bottom)
    makers = [failure.trace.events[i.producer] for i in failure.operands(bottom) if i.producer is not None]
    counted = any(m.op in ("sum", "count_nonzero") and any(_mask(i.stat) for i in m.inputs) for m in makers)
    whole = (stat is not None and stat.dtype.startswith("int") and has_zero(stat)) or isinstance(
        failure.scalar(bottom), int
    )
    if not counted and not whole:
        return None
    why = f"`{failure.code}` divides by a count that is 0 in this batch. There was nothing to average, so the mean is 0/0."
    return Finding(why, 0.6, failure.input_lines(bottom))


@rule("single_sample_variance")
def single_sample_variance(failure: Failure) -> Finding | None:
    if failure.op not in SPREADS or not failure.nan or failure.fed_by_nonfinite:
        return None
    stat = failure.stat("self") or next(iter(failure.tensors), None)
    count = _reduced(failure, stat) if stat else None
    correction = _correction(failure)
    if count == 0 or (count is not None and count > correction):
        return None
    why = (
        f"`{failure.code}` computes an unbiased {failure.op} over {count if count is not None else 'too few'} "
        f"element(s). It divides by the count minus {number(correction)}, which is 0, so the result is NaN."
    )
    return Finding(why, 0.97 if count is not None else 0.7, failure.input_lines())


@rule("single_sample_variance", title="Covariance of a single observation")
def single_sample_covariance(failure: Failure) -> Finding | None:
    # torch.cov ends in div(product, count - correction) with an integer tensor that is 0 for one observation.
    if failure.op != "div" or not failure.nan or "cov" not in failure.code or not failure.zero_at("other"):
        return None
    why = (
        f"`{failure.code}` computes an unbiased covariance of one observation. It divides by the count minus 1, "
        "which is 0, so the result is NaN."
    )
    return Finding(why, 0.96, failure.input_lines("self", "other"))


@rule("ctc_infeasible", elsewhere=1.0)
def ctc_infeasible(failure: Failure) -> Finding | None:
    named = failure.op.startswith("ctc_loss") or "ctcloss" in failure.family
    if not named or not (failure.inf or failure.nan):
        return None
    if any(t.bad for n in ("log_probs",) for t in failure.stats(n)):
        return None
    lengths = [(n, failure.scalar(n)) for n in ("input_lengths", "target_lengths")]
    known = tuple(f"{n}: {v}" for n, v in lengths if v is not None) + failure.input_lines(
        "input_lengths", "target_lengths"
    )
    why = (
        f"`{failure.code}` has {failure.inf + failure.nan} sequence(s) whose target cannot be aligned: it needs at "
        "least one input frame a label, and one more between equal labels. The probability of an impossible "
        "alignment is 0, its loss inf."
    )
    return Finding(why, 0.95, known)
