"""Masks of -inf: rows that are masked as a whole, and labels that point at a masked class."""

from __future__ import annotations

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure
from firstnan.records import TensorStat

SOFTMAXES = ("softmax", "log_softmax", "scaled_dot_product_attention", "masked_softmax", "safe_softmax")
PICKS = (
    "nll_loss",
    "nll_loss2d",
    "nll_loss_nd",
    "cross_entropy",
    "cross_entropy_loss",
    "gather",
    "index",
    "index_select",
    "take",
)
CARRIES = (
    "sum",
    "mean",
    "neg",
    "mul",
    "log_softmax",
    "masked_fill",
    "where",
    "select",
    "logsumexp",
    "cat",
    "stack",
    "add",
    "sub",
)


def _width(failure: Failure, stat: TensorStat) -> int | None:
    """How many elements one row of the softmax has."""
    dim = failure.scalar("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if not isinstance(dim, int) or not -len(stat.shape) <= dim < len(stat.shape):
        return None
    return stat.shape[dim]


@rule("fully_masked_softmax", elsewhere=0.5)
def fully_masked_softmax(failure: Failure) -> Finding | None:
    if failure.op not in SOFTMAXES or not failure.nan:
        return None
    masked = [t for t in failure.tensors if t.neginf or (t.binary and t.dtype == "bool")]
    if not masked or any(t.posinf or t.nan for t in failure.tensors):
        return None
    width = _width(failure, masked[0])
    if width is not None and 0 < masked[0].neginf < width:
        return None
    rows = f"{failure.nan} element(s)"
    if width and failure.nan % width == 0:
        rows = f"{failure.nan // width} row(s) of {width} entries"
    why = (
        f"`{failure.code}` normalises a row in which every entry is -inf, so it computes exp(-inf - -inf) and "
        f"0/0. {rows} became NaN: probably a sample that is all padding, or two masks that together cover "
        "everything."
    )
    return Finding(why, 0.95, tuple(f"{t.name}: {t.neginf} of {t.numel} elements are -inf" for t in masked if t.neginf))


@rule("fully_masked_softmax", title="Hand-written softmax over a row that is masked as a whole")
def masked_by_hand(failure: Failure) -> Finding | None:
    # exp(x - x.max()) over a row of -inf is exp(-inf - -inf).
    if failure.op not in ("sub", "rsub", "div") or not failure.nan or any(t.posinf or t.nan for t in failure.tensors):
        return None
    near = {e.op for e in failure.feeding(4)}
    if failure.op == "div":
        # exp(-inf) is 0 everywhere, so the row's sum is 0 too.
        fits = {"exp", "sum"} <= near and any(
            e.on_purpose or any(o.neginf for o in e.outputs) for e in failure.feeding(6)
        )
    else:
        fits = bool(near & {"amax", "max", "logsumexp"}) and sum(t.neginf > 0 for t in failure.tensors) >= 2
    if not fits:
        return None
    why = (
        f"`{failure.code}` is part of a softmax written out by hand, over a row in which every entry is -inf. "
        f"The row has no maximum and no sum to divide by, so {failure.nan} element(s) became NaN."
    )
    return Finding(why, 0.96 if failure.op == "div" else 0.9, failure.input_lines())


@rule("masked_label")
def masked_label(failure: Failure) -> Finding | None:
    if failure.op not in PICKS + CARRIES or not failure.inf or failure.nan:
        return None
    masked = sum(t.neginf for t in failure.tensors)
    legal = masked or (failure.event is not None and failure.event.on_purpose)
    if any(t.posinf for t in failure.tensors):  # minus a log-probability that is masked further back
        masks = [o.neginf for e in failure.feeding() if e.on_purpose for o in e.outputs if o.neginf]
        legal = masked = masks[0] if masks else 0
    if not legal or any(t.nan for t in failure.tensors):
        return None
    why = (
        f"`{failure.code}` picks the log-probability of the target class, and {failure.inf} of the picked values "
        f"belong(s) to a class that is masked with -inf ({masked} masked entries). The loss is then infinite: "
        "mask and labels contradict each other."
    )
    return Finding(why, 0.9 if failure.op in PICKS else 0.6, failure.input_lines())
