"""Means and variances of too few elements, and CTC alignments that are impossible."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Edit, Remedy
from firstnan.records.operator_families import words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import FailingOperation, failing_operation
from firstnan.repair.source import (
    Expr,
    SourceFile,
    changed_text,
    literal_value,
    parenthesized,
    replace_node,
    set_argument,
)

NLL = ("cross_entropy", "nll_loss")
LOSSES = words(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
)
SPREADS = ("std", "var", "std_mean", "var_mean")


def constructed(context: FailureContext, call: ast.Call) -> ast.Call | None:
    """The call that created the layer that is called: `self.loss = nn.CrossEntropyLoss(...)`."""
    location = context.location
    if location is None:
        return None
    source, text = location.source, ast.unparse(call.func)
    if isinstance(call.func, ast.Call):  # nn.CrossEntropyLoss()(x, y)
        return call.func
    kind = (context.event.module_type if context.event else "") or ""
    for node in source.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = node.value
            named = any(ast.unparse(t).rsplit(".", 1)[-1] == text.rsplit(".", 1)[-1] for t in node.targets)
            if named and (not kind or source.called(made).endswith(kind)):
                return made
    created = [c for c in source.calls if kind and source.called(c).endswith(kind)]
    return created[0] if len(created) == 1 else None


@remedies_for("empty_reduction")
def loss_of_nothing(context: FailureContext) -> Iterator[Remedy]:
    """cross_entropy in which every target is ignored."""
    location = context.location
    if location is None or not isinstance(location.node, ast.Call) or context.event is None:
        return
    if not context.event.op.startswith(("nll_loss", "cross_entropy")):
        return
    source, call = location.source, location.node
    passed = Expr("", tuple(call.args), location.expr.keywords) if location.expr.op not in NLL else location.expr
    logits, target = passed.arg(0, "input"), passed.arg(1, "target")
    if logits is None or target is None:
        return
    ignored = dict(context.event.scalars).get("ignore_index", -100)
    given = location.expr.keywords.get("ignore_index")
    index = source.code(given) if given is not None else str(ignored)
    if location.expr.op not in NLL:  # a layer, which has the number
        index = f"{source.code(call.func)}.ignore_index"
    counts = f"({parenthesized(source, target)} != {index})"
    if any(operand.name == "weight" for operand in context.event.inputs):  # a weight of 0 counts for nothing
        given = location.expr.keywords.get("weight")
        weight = source.code(given) if given is not None else f"{source.code(call.func)}.weight"
        counts = f"({counts} & ({weight}[{parenthesized(source, target)}.clamp_min(0)] != 0))"
    inside = f"{source.code(call)} if {counts}.any() else {parenthesized(source, logits)}.sum() * 0.0"
    if location.expr.op in NLL and "weight" not in location.expr.keywords and "reduction" not in location.expr.keywords:
        text = changed_text(source, call, set_argument(source, call, "reduction", '"sum"'))
        yield context.remedy(
            "Divide the summed loss by the number of targets, at least 1",
            "The loss is 0 if all targets are ignored; otherwise it is unchanged.",
            replace_node(source, call, f"{text} / {counts}.sum().clamp_min(1)"),
        )
    yield context.remedy(
        "Use a loss of 0 for a batch without targets",
        "The loss and its gradients are 0 if no target counts; otherwise nothing changes.",
        replace_node(source, call, inside),
    )


@remedies_for("empty_reduction")
def mean_of_nothing(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "mean")
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, inner, call = found.location.source, found.expr.args[0], found.expr.node
    dim = found.expr.arg(1, "dim") or found.expr.keywords.get("axis")
    plain = parenthesized(source, inner)
    if dim is None:
        count = f"{plain}.size" if found.writer.numpy else f"{plain}.numel()"
    else:
        dims = dim.elts if isinstance(dim, ast.Tuple | ast.List) else [dim]
        if not dims or any(literal_value(one) is None for one in dims):
            return
        count = " * ".join(f"{plain}.shape[{source.code(one)}]" for one in dims)
    yield context.remedy(
        "Divide the sum by the count, at least 1",
        "The mean of an empty selection and its gradients are 0; any other mean is unchanged.",
        replace_node(source, call, f"{_summed(source, call)} / max({count}, 1)"),
    )


def _summed(source: SourceFile, call: ast.Call) -> str:
    """The call with `sum` instead of `mean`."""
    start, end = source.span(call)
    after = source.span(call.func)[1]
    return source.text[start : after - len("mean")] + "sum" + source.text[after:end]


@remedies_for("empty_reduction")
def loss_over_no_element(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call) or not location.expr.args:
        return
    if context.event is None or context.event.op not in LOSSES:
        return
    source, call, first = location.source, location.node, location.expr.args[0]
    plain = parenthesized(source, first)
    yield context.remedy(
        "Use a loss of 0 for an empty selection",
        "The mean of an empty selection and its gradients are 0; any other mean is unchanged.",
        replace_node(source, call, f"{source.code(call)} if {plain}.numel() else {plain}.sum()"),
    )


@remedies_for("single_sample_variance")
def spread_of_one(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, *SPREADS)
    if found is None or not isinstance(found.expr.node, ast.Call):
        return
    source, op = found.location.source, found.expr.op
    statement = source.statement(found.location.node)
    calls = [n for n in source.within(found.location.node) if isinstance(n, ast.Call)]
    near = [source.expr(n) for n in calls if source.statement(n) is statement and n is not found.expr.node]
    # The others of the line read as many samples.
    others = [e for e in near if e.op == op and e.args and e.library == found.expr.library]
    others = [] if hasattr(statement, "body") else others
    changes = [list(_for_one(found, e)) for e in (found.expr, *others)]
    also = f", and the same for the other `{op}` in this line" if others else ""
    for title, why, _ in changes[0]:
        edits = [edit for one in changes for name, _, edit in one if name == title]
        yield context.remedy(title + also, why, *edits)


@remedies_for("nan_input", "nan_label")
def spread_of_one_in_numpy(context: FailureContext) -> Iterator[Remedy]:
    """A line that computes data with numpy, which divides by the count minus 1 only where it is told to."""
    found = failing_operation(context, *SPREADS) if context.event is None else None
    if found is not None and "ddof" in found.expr.keywords:
        yield from spread_of_one(context)


def _for_one(found: FailingOperation, expr: Expr) -> Iterator[tuple[str, str, Edit]]:
    """Title, reason and edit of each way to compute the spread of a single element."""
    source, call, inner, numpy = found.location.source, expr.node, expr.args[0], found.writer.numpy
    assert isinstance(call, ast.Call)
    dim = expr.keywords.get("dim") or expr.keywords.get("axis") or _positional_dim(expr)
    plain = parenthesized(source, inner)
    count = f"{plain}.numel()" if dim is None else f"{plain}.shape[{source.code(dim)}]"
    name = "ddof" if numpy else "correction"
    if numpy and dim is None:
        count = f"{plain}.size"
    is_std = expr.op.startswith("std")
    what, factor = ("standard deviation", "sqrt((n - 1) / n)") if is_std else ("variance", "(n - 1) / n")
    unbiased = any(k.arg == "unbiased" for k in call.keywords)
    simple = dim is None or literal_value(dim) is not None
    if simple and not unbiased:
        edit = set_argument(source, call, name, f"min(1, {count} - 1)")
        why = f"The {what} of a single element is 0 instead of 0/0; of more elements it is unchanged."
        yield "Use no correction for a single element", why, edit
        if not expr.op.endswith("_mean"):
            eps = found.context.epsilon("1e-8")
            yield (
                f"Use no correction for a single element, and keep the result at {eps} or above",
                f"The result for a single element is {eps} instead of 0/0, so dividing by it is safe.",
                replace_node(source, call, _floored(changed_text(source, call, edit), eps, numpy)),
            )
    yield (
        "Divide by the count instead of the count minus 1",
        f"The {what} of a single element is 0 instead of 0/0; of n elements it shrinks by {factor}.",
        set_argument(source, call, "unbiased", "False") if unbiased else set_argument(source, call, name, "0"),
    )


def _floored(text: str, eps: str, numpy: str) -> str:
    return f"{numpy}.maximum({text}, {eps})" if numpy else f"{text}.clamp_min({eps})"


def _positional_dim(expr: Expr) -> ast.expr | None:
    given = expr.args[1] if len(expr.args) > 1 else None
    return None if isinstance(given, ast.Constant) and isinstance(given.value, bool) else given


@remedies_for("ctc_infeasible")
def zero_infinity(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    call = location.node if location.expr.op == "ctc_loss" else constructed(context, location.node)
    if call is not None:
        yield context.remedy(
            "Ignore impossible alignments",
            "A target that is too long for its input contributes nothing to the loss and the gradient.",
            set_argument(location.source, call, "zero_infinity", "True"),
        )
