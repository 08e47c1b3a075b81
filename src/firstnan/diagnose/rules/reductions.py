"""Means and variances of too few elements, and a CTC alignment that does not exist."""

from __future__ import annotations

import math

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.division import DIVISIONS
from firstnan.diagnose.rules.scene import Scene, has_zero, number, words
from firstnan.records import TensorStat

MEANS = words(
    "mean nanmean median nanmedian mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div logsumexp soft_margin_loss nll_loss nll_loss2d cross_entropy"
)
NLL = ("nll_loss", "nll_loss2d", "nll_loss_nd", "cross_entropy", "cross_entropy_loss")
SPREADS = ("var", "std", "var_mean", "std_mean")


def _reduced(scene: Scene, stat: TensorStat) -> int | None:
    """How many elements each result was computed from; None if that cannot be told."""
    dim = scene.scalar("dim")
    if isinstance(dim, int):
        dim = [dim]
    if dim:
        if not all(isinstance(d, int) and -len(stat.shape) <= d < len(stat.shape) for d in dim):
            return None
        return math.prod(int(stat.shape[d]) for d in dim)
    made = scene.made
    return stat.numel // made.numel if made and made.numel and stat.numel % made.numel == 0 else stat.numel


def _mask(stat: TensorStat | None) -> bool:
    return stat is not None and (stat.binary or stat.dtype == "bool")


def _correction(scene: Scene) -> float:
    given = scene.scalar("correction", "unbiased")
    return 1.0 if given is None else float(given)


@rule("empty_reduction")
def empty_reduction(scene: Scene) -> Finding | None:
    empty = [t for t in scene.tensors if t.numel == 0 or (scene.op in SPREADS and _reduced(scene, t) == 0)]
    if scene.op not in MEANS | {*SPREADS, *NLL} or not (scene.nan or scene.inf) or not empty:
        return None
    why = (
        f"`{scene.code}` reduces a tensor of shape {list(empty[0].shape)}, which has no element to average. A "
        "mean over nothing is 0/0: the selection before it came out empty in this batch."
    )
    return Finding(why, 0.97, scene.input_lines())


@rule("empty_reduction", title="Every target of the batch is ignored")
def all_ignored(scene: Scene) -> Finding | None:
    # nll_loss divides by its second output, the summed weight of the targets that count.
    if scene.op not in NLL or not scene.nan or scene.fed_by_nonfinite:
        return None
    outputs = scene.event.outputs if scene.event else ()
    if len(outputs) > 1 and outputs[1].max not in (0, None):
        return None
    target = scene.stat("target")
    ignore = scene.scalar("ignore_index")
    ignored = target is not None and target.min == target.max == ignore
    detail = f"all {target.numel} targets equal ignore_index = {ignore}" if target and ignored else "no target counts"
    why = (
        f"`{scene.code}` averages over the targets that count, and in this batch there are none: {detail}. "
        "The total weight it divides by is 0, so the loss is NaN."
    )
    return Finding(why, 0.95, scene.input_lines("target", "weight"))


@rule("empty_reduction")
def empty_count(scene: Scene) -> Finding | None:
    if scene.op not in DIVISIONS or not scene.nan or not scene.zero_at(DIVISIONS[scene.op][1]):
        return None
    bottom = DIVISIONS[scene.op][1]
    stat = scene.stat(bottom)
    makers = [scene.trace.events[i.producer] for i in scene.operands(bottom) if i.producer is not None]
    counted = any(m.op in ("sum", "count_nonzero") and any(_mask(i.stat) for i in m.inputs) for m in makers)
    whole = (stat is not None and stat.dtype.startswith("int") and has_zero(stat)) or isinstance(
        scene.scalar(bottom), int
    )
    if not counted and not whole:
        return None
    why = (
        f"`{scene.code}` divides by a count that is 0 in this batch. There was nothing to average, so the mean is 0/0."
    )
    return Finding(why, 0.6, scene.input_lines(bottom))


@rule("single_sample_variance")
def single_sample_variance(scene: Scene) -> Finding | None:
    if scene.op not in SPREADS or not scene.nan or scene.fed_by_nonfinite:
        return None
    stat = scene.stat("self") or next(iter(scene.tensors), None)
    count = _reduced(scene, stat) if stat else None
    correction = _correction(scene)
    if count == 0 or (count is not None and count > correction):
        return None
    why = (
        f"`{scene.code}` computes an unbiased {scene.op} over {count if count is not None else 'too few'} "
        f"element(s). It divides by the count minus {number(correction)}, which is 0, so the result is NaN."
    )
    return Finding(why, 0.97 if count is not None else 0.7, scene.input_lines())


@rule("single_sample_variance", title="Covariance of a single observation")
def single_sample_covariance(scene: Scene) -> Finding | None:
    # torch.cov ends in div(product, count - correction) with an integer tensor that is 0 for one observation.
    if scene.op != "div" or not scene.nan or "cov" not in scene.code or not scene.zero_at("other"):
        return None
    why = (
        f"`{scene.code}` computes an unbiased covariance of one observation. It divides by the count minus 1, "
        "which is 0, so the result is NaN."
    )
    return Finding(why, 0.96, scene.input_lines("self", "other"))


@rule("ctc_infeasible", elsewhere=1.0)
def ctc_infeasible(scene: Scene) -> Finding | None:
    named = scene.op.startswith("ctc_loss") or "ctcloss" in scene.family
    if not named or not (scene.inf or scene.nan):
        return None
    if any(t.bad for n in ("log_probs",) for t in scene.stats(n)):
        return None
    lengths = [(n, scene.scalar(n)) for n in ("input_lengths", "target_lengths")]
    known = tuple(f"{n}: {v}" for n, v in lengths if v is not None) + scene.input_lines(
        "input_lengths", "target_lengths"
    )
    why = (
        f"`{scene.code}` has {scene.inf + scene.nan} sequence(s) whose target cannot be aligned: it needs at "
        "least one input frame a label, and one more between equal labels. The probability of an impossible "
        "alignment is 0, its loss inf."
    )
    return Finding(why, 0.95, known)
