"""Means and variances of too few elements, and CTC alignments that do not exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.repair.base import Job, Place, remedy
from firstnan.repair.edits import argument, atom, put, without
from firstnan.repair.guards import small, spot
from firstnan.repair.source import Expr, Source, number

NLL = ("cross_entropy", "nll_loss")
LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)
SPREADS = ("std", "var", "std_mean", "var_mean")


def constructed(job: Job, call: ast.Call) -> ast.Call | None:
    """Where the layer that is called was made: `self.loss = nn.CrossEntropyLoss(...)`, or a name given so."""
    place = job.place
    if place is None:
        return None
    source, text = place.source, ast.unparse(call.func)
    if isinstance(call.func, ast.Call):  # nn.CrossEntropyLoss()(x, y)
        return call.func
    kind = (job.event.module_type if job.event else "") or ""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value
            named = any(ast.unparse(t).rsplit(".", 1)[-1] == text.rsplit(".", 1)[-1] for t in node.targets)
            if named and (not kind or source.called(made).endswith(kind)):
                return made
    made_here = [n for n in source.nodes if isinstance(n, ast.Call) and kind and source.called(n).endswith(kind)]
    return made_here[0] if len(made_here) == 1 else None


@remedy("empty_reduction")
def loss_of_nothing(job: Job) -> Iterator[Remedy]:
    """cross_entropy where every target is ignored."""
    place = job.place
    if place is None or not isinstance(place.node, ast.Call) or job.event is None:
        return
    if (
        not job.event.op.startswith(("nll_loss", "cross_entropy"))
        or len(place.expr.args) + len(place.expr.keywords) < 2
    ):
        return
    source, call = place.source, place.node
    logits, target = place.expr.arg(0, "input"), place.expr.arg(1, "target")
    if logits is None or target is None:
        return
    ignored = dict(job.event.scalars).get("ignore_index", -100)
    spelled = place.expr.keywords.get("ignore_index")
    index = source.code(spelled) if spelled is not None else str(ignored)
    counts = f"({atom(source, target)} != {index})"
    start, end = source.span(call)
    inside = f"{source.code(call)} if {counts}.any() else {atom(source, logits)}.sum() * 0.0"
    if place.expr.op in NLL and "weight" not in place.expr.keywords and "reduction" not in place.expr.keywords:
        total = argument(source, call, "reduction", '"sum"')
        text = source.text[start : total.start] + total.text + source.text[total.start : end]
        yield job.remedy(
            "Divide the sum of the losses by the count of targets, at least 1",
            "Where no target counts the loss is 0; otherwise it is the mean as before.",
            put(source, call, f"{text} / {counts}.sum().clamp_min(1)"),
        )
    yield job.remedy(
        "Let a batch without a target count as loss 0",
        "Where no target counts the loss is 0, with zero gradients; otherwise nothing changes.",
        put(source, call, inside),
    )


@remedy("empty_reduction")
def mean_of_nothing(job: Job) -> Iterator[Remedy]:
    found = spot(job, "mean")
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, inner, call = found.place.source, found.expr.args[0], found.expr.node
    dim = found.expr.arg(1, "dim") or found.expr.keywords.get("axis")
    plain = atom(source, inner)
    if dim is None:
        count = f"{plain}.size" if found.pen.numpy else f"{plain}.numel()"
    elif number(dim) is not None:
        count = f"{plain}.shape[{source.code(dim)}]"
    else:
        return
    yield job.remedy(
        "Divide the sum by the count, at least 1",
        "The mean of nothing is 0, with zero gradients; any other mean stays as it is.",
        put(source, call, f"{_summed(source, call)} / max({count}, 1)"),
    )


def _summed(source: Source, call: ast.Call) -> str:
    """The call with `sum` in place of `mean`."""
    start, end = source.span(call)
    after = source.span(call.func)[1]
    return source.text[start : after - len("mean")] + "sum" + source.text[after:end]


@remedy("empty_reduction")
def loss_over_no_element(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None or not isinstance(place.node, ast.Call) or not place.expr.args:
        return
    if job.event is None or job.event.op not in LOSSES:
        return
    source, call, first = place.source, place.node, place.expr.args[0]
    plain = atom(source, first)
    yield job.remedy(
        "Let an empty selection count as loss 0",
        "The mean of nothing is 0, with zero gradients; any other mean stays as it is.",
        put(source, call, f"{source.code(call)} if {plain}.numel() else {plain}.sum()"),
    )


@remedy("single_sample_variance", "empty_reduction")
def spread_of_one(job: Job) -> Iterator[Remedy]:
    found = spot(job, *SPREADS)
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, call, inner = found.place.source, found.expr.node, found.expr.args[0]
    dim = found.expr.keywords.get("dim") or found.expr.keywords.get("axis") or _positional_dim(found.expr)
    plain = atom(source, inner)
    count = f"{plain}.numel()" if dim is None else f"{plain}.shape[{source.code(dim)}]"
    name = "ddof" if found.pen.numpy else "correction"
    if found.pen.numpy and dim is None:
        count = f"{plain}.size"
    flag = next((k for k in call.keywords if k.arg == "unbiased"), None)
    drop = [without(source, call, flag)] if flag is not None else []
    simple = dim is None or number(dim) is not None
    if simple and not drop:
        edit = argument(source, call, name, f"min(1, {count} - 1)")
        why = "The spread of a single element is 0 instead of 0/0; the spread of more stays as it is."
        yield job.remedy("Do not subtract 1 from a count of 1", why, edit)
        yield from _with_floor(job, found.place, call, edit.start, edit.text, edit.end)
    yield job.remedy(
        "Divide by the count, not by the count minus 1",
        "The spread of a single element is 0 instead of 0/0; that of n elements shrinks by sqrt((n - 1) / n).",
        argument(source, call, name, "0") if not drop else argument(source, call, "unbiased", "False"),
    )


def _with_floor(job: Job, place: Place, call: ast.Call, start: int, text: str, stop: int) -> Iterator[Remedy]:
    source, (first, end) = place.source, place.source.span(call)
    if place.expr.op.endswith("_mean"):
        return
    eps = small(job.dtype, "1e-8")
    new = source.text[first:start] + text + source.text[stop:end]
    yield job.remedy(
        f"Do not subtract 1 from a count of 1, and keep the spread at {eps} or above",
        "The spread of a single element is tiny instead of 0/0, so that one may divide by it.",
        put(source, call, f"{new}.clamp_min({eps})"),
    )


def _positional_dim(expr: Expr) -> ast.expr | None:
    given = expr.args[1] if len(expr.args) > 1 else None
    return None if isinstance(given, ast.Constant) and isinstance(given.value, bool) else given


@remedy("ctc_infeasible")
def zero_infinity(job: Job) -> Iterator[Remedy]:
    place = job.place
    if place is None or not isinstance(place.node, ast.Call):
        return
    call = place.node if place.expr.op == "ctc_loss" else constructed(job, place.node)
    if call is not None:
        yield job.remedy(
            "Let impossible alignments count as 0",
            "A target that is too long for its input takes no part in loss and gradient.",
            argument(place.source, call, "zero_infinity", "True"),
        )
