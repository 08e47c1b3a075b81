"""Masks of -inf: rows that are masked as a whole, and labels that point at a masked class."""

from __future__ import annotations

from firstnan.diagnose.rules.base import Finding, rule
from firstnan.diagnose.rules.scene import Scene
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


def _width(scene: Scene, stat: TensorStat) -> int | None:
    """How many elements one row of the softmax has."""
    dim = scene.scalar("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and dim else dim
    if not isinstance(dim, int) or not -len(stat.shape) <= dim < len(stat.shape):
        return None
    return stat.shape[dim]


@rule("fully_masked_softmax", elsewhere=0.5)
def fully_masked_softmax(scene: Scene) -> Finding | None:
    if scene.op not in SOFTMAXES or not scene.nan:
        return None
    masked = [t for t in scene.tensors if t.neginf or (t.binary and t.dtype == "bool")]
    if not masked or any(t.posinf or t.nan for t in scene.tensors):
        return None
    width = _width(scene, masked[0])
    if width is not None and 0 < masked[0].neginf < width:
        return None
    rows = f"{scene.nan} element(s)"
    if width and scene.nan % width == 0:
        rows = f"{scene.nan // width} row(s) of {width} entries"
    why = (
        f"`{scene.code}` normalises a row in which every entry is -inf, so it computes exp(-inf - -inf) and "
        f"0/0. {rows} became NaN: probably a sample that is all padding, or two masks that together cover "
        "everything."
    )
    return Finding(why, 0.95, tuple(f"{t.name}: {t.neginf} of {t.numel} elements are -inf" for t in masked if t.neginf))


@rule("fully_masked_softmax", title="Hand-written softmax over a row that is masked as a whole")
def masked_by_hand(scene: Scene) -> Finding | None:
    # exp(x - x.max()) over a row of -inf is exp(-inf - -inf).
    if scene.op not in ("sub", "rsub", "div") or not scene.nan or any(t.posinf or t.nan for t in scene.tensors):
        return None
    near = {e.op for e in scene.feeding(4)}
    if scene.op == "div":
        # exp(-inf) is 0 everywhere, so the row's sum is 0 too.
        fits = {"exp", "sum"} <= near and any(
            e.on_purpose or any(o.neginf for o in e.outputs) for e in scene.feeding(6)
        )
    else:
        fits = bool(near & {"amax", "max", "logsumexp"}) and sum(t.neginf > 0 for t in scene.tensors) >= 2
    if not fits:
        return None
    why = (
        f"`{scene.code}` is part of a softmax written out by hand, over a row in which every entry is -inf. "
        f"The row has no maximum and no sum to divide by, so {scene.nan} element(s) became NaN."
    )
    return Finding(why, 0.96 if scene.op == "div" else 0.9, scene.input_lines())


@rule("masked_label")
def masked_label(scene: Scene) -> Finding | None:
    if scene.op not in PICKS + CARRIES or not scene.inf or scene.nan:
        return None
    masked = sum(t.neginf for t in scene.tensors)
    legal = masked or (scene.event is not None and scene.event.on_purpose)
    if any(t.posinf for t in scene.tensors):  # minus a log-probability that is masked further back
        masks = [o.neginf for e in scene.feeding() if e.on_purpose for o in e.outputs if o.neginf]
        legal = masked = masks[0] if masks else 0
    if not legal or any(t.nan for t in scene.tensors):
        return None
    why = (
        f"`{scene.code}` picks the log-probability of the target class, and {scene.inf} of the picked values "
        f"belong(s) to a class that is masked with -inf ({masked} masked entries). The loss is then infinite: "
        "mask and labels contradict each other."
    )
    return Finding(why, 0.9 if scene.op in PICKS else 0.6, scene.input_lines())
