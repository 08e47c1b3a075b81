"""Masks of -inf: fully masked rows, and labels of a masked class."""

from __future__ import annotations

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.failure import Failure
from firstnan.diagnose.rules.wording import counted
from firstnan.records import TensorStat
from firstnan.records.operator_families import (
    ADDITIONS,
    ATTENTION,
    JOINS,
    LABEL_PICKS,
    SOFTMAXES,
    SUMS,
    words,
)

LOSS_ARITHMETIC = SUMS | JOINS | ADDITIONS | words("log_softmax logsumexp masked_fill mul neg select where")
"""What a loss written by hand does with the picked log-probabilities."""


def _width(failure: Failure, stat: TensorStat) -> int | None:
    """How many elements one row of the softmax has."""
    dim = failure.scalar("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if not isinstance(dim, int) or not -len(stat.shape) <= dim < len(stat.shape):
        return None
    return stat.shape[dim]


@rule("fully_masked_softmax", elsewhere=0.5)
def fully_masked_softmax(failure: Failure) -> Finding | None:
    if failure.op not in SOFTMAXES | ATTENTION or not failure.nan:
        return None
    masked = [t for t in failure.tensors if t.neginf or (t.binary and t.dtype == "bool")]
    if not masked or any(t.posinf or t.nan for t in failure.tensors):
        return None
    width = _width(failure, masked[0])
    if width is not None and 0 < masked[0].neginf < width:
        return None
    rows = counted(failure.nan)
    if width and failure.nan % width == 0:
        rows = f"{counted(failure.nan // width, 'row')} of {counted(width, 'entry', 'entries')}"
    why = (
        f"`{failure.code}` takes a softmax over a row in which every entry is -inf, which is 0/0. {rows} became NaN: "
        "probably a sample is all padding, or two masks together cover everything."
    )
    return Finding(why, 0.95, tuple(f"{t.name}: {t.neginf} of {t.numel} elements are -inf" for t in masked if t.neginf))


@rule("fully_masked_softmax", title="Hand-written softmax over a fully masked row")
def masked_by_hand(failure: Failure) -> Finding | None:
    # exp(x - x.max()) over a row of -inf is exp(-inf - -inf).
    if failure.op not in ("sub", "rsub", "div") or not failure.nan or any(t.posinf or t.nan for t in failure.tensors):
        return None
    near = {e.op for e in failure.feeding(4)}
    if failure.op == "div":
        # exp(-inf) is 0 everywhere, so the row's sum is 0 too.
        infinite = any(e.on_purpose or any(o.neginf for o in e.outputs) for e in failure.feeding(6))
        fits = {"exp", "sum"} <= near and infinite
    else:
        fits = bool(near & {"amax", "max", "logsumexp"}) and sum(t.neginf > 0 for t in failure.tensors) >= 2
    if not fits:
        return None
    why = (
        f"`{failure.code}` is part of a hand-written softmax over a row in which every entry is -inf. Such a row has "
        f"no finite maximum and its exponentials sum to 0: {counted(failure.nan)} became NaN."
    )
    return Finding(why, 0.96 if failure.op == "div" else 0.9, failure.input_lines())


@rule("masked_label")
def masked_label(failure: Failure) -> Finding | None:
    if failure.op not in LABEL_PICKS | LOSS_ARITHMETIC or not failure.inf or failure.nan or failure.reads_nan:
        return None
    if failure.event is not None and failure.event.born:
        return None
    masked = sum(t.neginf for t in failure.tensors)
    intended = masked > 0 or (failure.event is not None and failure.event.on_purpose)
    if any(t.posinf for t in failure.tensors):  # minus a log-probability that is masked further back
        masked = next((o.neginf for e in failure.feeding() if e.on_purpose for o in e.outputs if o.neginf), 0)
        intended = masked > 0
    if not intended:
        return None
    entries = f" ({counted(masked, 'masked entry', 'masked entries')})" if masked else ""
    why = (
        f"`{failure.code}` picks the log-probability of a class that is masked with -inf{entries}. The loss is "
        "infinite because the mask and the labels contradict each other."
    )
    return Finding(why, 0.9 if failure.op in LABEL_PICKS else 0.6, failure.input_lines())
