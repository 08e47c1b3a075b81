"""Masks of -inf: a finite number in their place, or a lower bound for the scores."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence

from firstnan.records import Edit, OpEvent, Remedy
from firstnan.records.operator_families import SOFTMAXES, words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import GuardWriter, failing_operation
from firstnan.repair.literals import nonfinite_constants
from firstnan.repair.source import (
    SourceFile,
    changed_text,
    insert_before,
    literal_value,
    named_before,
    parenthesized,
    replace_node,
    set_argument,
)

MOST_OPERATORS = 24
MOST_EVENTS = 8
PADDING = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")


def mask_events(context: FailureContext) -> list[OpEvent]:
    """The events before the origin that write infinities or NaN on purpose, nearest first."""
    start = context.failure.event or context.event
    if start is None:
        return []
    own = [e for e in (start, context.event) if e is not None]
    around = [*own, *context.failure.trace.feeding(start, MOST_OPERATORS)]
    if context.event is not None and context.event is not start:
        around += context.failure.trace.feeding(context.event, MOST_OPERATORS)
    masks = [e for e in around if e.on_purpose or any(s in (math.inf, -math.inf) for _, s in e.scalars)]
    return list({e.site: e for e in reversed(masks)}.values())[::-1][:MOST_EVENTS]


def _finite_constants(context: FailureContext, low: str, high: str) -> list[Edit]:
    """Finite numbers for the infinities in the statements that write the mask."""
    locations = [context.location_of(event.site) for event in mask_events(context)]
    edits: dict[tuple[str, int], Edit] = {}
    for location in filter(None, [*locations, context.location]):
        source = location.source
        for node, value in nonfinite_constants(source, source.statement(location.node)):
            if math.isinf(value):
                edit = replace_node(source, node, low if value < 0 else high)
                edits.setdefault((source.file, source.span(node)[0]), edit)
    return list(edits.values())


def _why(context: FailureContext, low: str) -> str:
    effects = {
        "masked_label": "a label on a masked class has a large, finite loss",
        "zero_times_inf": "0 times a finite number is 0",
        "inf_minus_inf": "a difference of finite numbers is finite",
    }
    effect = effects.get(context.cause.slug, "only fully masked rows change, and their result is finite")
    return f"exp({low}) is 0 too; {effect}."


@remedies_for("fully_masked_softmax")
def attend_to_nothing(context: FailureContext) -> Iterator[Remedy]:
    """A finite mask, and a weight of 0 for what is masked: a fully masked row would attend to all of it otherwise."""
    location = context.location
    found = failing_operation(context, "softmax")
    layer = context.event.module_type if context.event is not None else ""
    call = found.expr.node if found is not None else location.node if location is not None else None
    if location is None or not isinstance(call, ast.Call) or (found is None and layer != "Softmax"):
        return
    source = location.source
    given = source.expr(call).args if found is not None else tuple(call.args)
    if not given:
        return
    yield from zero_weights(context, source, call, given[0])


def zero_weights(
    context: FailureContext,
    source: SourceFile,
    whole: ast.expr,
    scores: ast.expr,
    softmax: str = "",
    others: Sequence[Edit] = (),
) -> Iterator[Remedy]:
    """A softmax of finite scores, and a weight of 0 for what is masked.

    `whole` is the call of softmax; or what `softmax`, with SCORES for the scores, and the `others` replace.
    """
    low = context.epsilon("-1e9", "-1e4")
    why = "A fully masked row then attends to nothing, instead of to padding or the future; other rows are unchanged."
    by_hand = " Use softmax instead of exp(x) / exp(x).sum()." if softmax else ""
    masks = [m for event in mask_events(context) if (m := mask_of(context, event, whole)) is not None]
    shapes = {out.shape for event in mask_events(context) for out in event.outputs[:1]}
    same = context.event is None or shapes <= {out.shape for out in context.event.outputs[:1]}
    complete = len(masks) == len(mask_events(context)) and same  # a mask that is added may have another shape
    if masks and complete and sum(len(source.code(mask)) for _, mask, _ in masks) <= LONGEST_MASK:
        edits = [replace_node(source, value, low) for _, _, value in masks]
        inside = [edit for edit in edits if is_inside(source, edit, whole)]
        text = softmax.replace("SCORES", source.code(scores)) or source.code(whole)
        for edit in inside[:1] if not softmax else ():
            text = changed_text(source, whole, edit)
        codes = [parenthesized(source, mask) for _, mask, _ in masks]
        mask = " | ".join(codes) if len(codes) > 1 else source.code(masks[0][1])
        if len(inside) < (1 if softmax else 2):
            weights = replace_node(source, whole, f"{text}.masked_fill({mask}, 0.0)")
            title = f"Mask with {low} instead of -inf, and give what is masked a weight of 0"
            yield context.remedy(title, why + by_hand, *(e for e in edits if e not in inside), weights, *others)
            return
    plain = isinstance(scores, ast.Name | ast.Attribute)
    _, name, named = ("", source.code(scores), []) if plain else named_before(source, scores, "masked_scores")
    bounded = f"{name}.clamp_min({low})"
    text = softmax.replace("SCORES", bounded) or changed_text(source, whole, replace_node(source, scores, bounded))
    yield context.remedy(
        f"Keep the scores at {low} or above, and give what is masked a weight of 0",
        why + by_hand,
        *named,
        replace_node(source, whole, f"{text}.masked_fill({name}.isneginf(), 0.0)"),
        *others,
    )


LONGEST_MASK = 48


def mask_of(context: FailureContext, event: OpEvent, use: ast.AST) -> tuple[ast.Call, ast.expr, ast.expr] | None:
    """The call of `masked_fill` that writes a mask, with its mask and its value, if both mean the same at `use`."""
    location = context.location_of(event.site)
    if location is None or location.expr.op != "masked_fill" or not isinstance(location.node, ast.Call):
        return None
    mask, value = location.expr.arg(1, "mask"), location.expr.arg(2, "value")
    if mask is None or value is None or not location.source.unchanged(mask, use):
        return None
    if location.source.parent(location.source.statement(location.node)) not in location.source.parents(use):
        return None  # written only under a condition, `if mask is not None`
    constants = [node for node, number in nonfinite_constants(location.source, location.node) if number == -math.inf]
    return (location.node, mask, value) if value in constants else None


def is_inside(source: SourceFile, edit: Edit, node: ast.AST) -> bool:
    (start, end), (a, b) = source.span(node), source.edit_span(edit)
    return start <= a and b <= end


@remedies_for(
    *words("fully_masked_softmax masked_label zero_times_inf logsumexp_grad_all_inf inf_minus_inf where_grad_trap")
)
def finite_mask(context: FailureContext) -> Iterator[Remedy]:
    low = context.epsilon("-1e9", "-1e4")
    if context.cause.slug == "masked_label":
        low = "-1e4"
    edits = _finite_constants(context, low, low.removeprefix("-"))
    yield context.remedy(f"Mask with {low} instead of -inf", _why(context, low), *edits)


@remedies_for("fully_masked_softmax", "logsumexp_grad_all_inf")
def lower_bound_of_the_scores(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None:
        return
    found = failing_operation(context, *SOFTMAXES, "softmin", "logsumexp", "logcumsumexp")
    low = context.epsilon("-1e9", "-1e4")
    module_type = context.event.module_type if context.event is not None else ""
    layer = location.expr.called.startswith("self.") and "oftmax" in module_type
    nodes = found.expr.args[:1] if found is not None else location.expr.args[:1] if layer else ()
    both = failing_operation(context, "logaddexp", "logaddexp2")
    if both is not None:
        nodes = both.expr.args[:2]
    edits = [GuardWriter(location.source).floor(node, low) for node in nodes]
    yield context.remedy(f"Keep the scores at {low} or above", _why(context, low), *edits)


@remedies_for("fully_masked_softmax", "inf_minus_inf")
def lower_bound_before_the_statement(context: FailureContext) -> Iterator[Remedy]:
    """exp(x - x.max()) reads x twice, so x is made finite before the statement."""
    location = context.location
    if location is None or location.expr.op != "sub" or not isinstance(location.expr.args[0], ast.Name):
        return
    name, low = location.expr.args[0].id, context.epsilon("-1e9", "-1e4")
    yield context.remedy(
        f"Keep `{name}` at {low} or above",
        _why(context, low),
        insert_before(location.source, location.node, f"{name} = {name}.clamp_min({low})"),
    )


@remedies_for("fully_masked_softmax")
def unmask_empty_rows(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or not isinstance(location.node, ast.Call):
        return
    source, expr = location.source, location.expr
    layer = context.event.module_type if context.event is not None else ""
    if layer == "MultiheadAttention" and _weights_are_unused(source, location.node):
        yield context.remedy(
            "Do not compute the attention weights (need_weights=False)",
            "scaled_dot_product_attention, which is used then, gives a fully masked row a result of 0; other rows are "
            "unchanged.",
            set_argument(source, location.node, "need_weights", "False"),
        )
    for name in PADDING:
        mask = expr.keywords.get(name)
        if mask is not None:
            plain = parenthesized(source, mask)
            yield context.remedy(
                "Unmask fully masked rows",
                "A fully masked row attends to everything; all other rows are unchanged.",
                replace_node(source, mask, f"{plain} & ~{plain}.all(-1, keepdim=True)"),
            )
    if expr.op == "scaled_dot_product_attention":
        mask = expr.arg(3, "attn_mask")
        if mask is None:
            return
        plain, low = parenthesized(source, mask), context.epsilon("-1e9", "-1e4")
        title, why = "Unmask fully masked rows", "Only fully masked rows change."
        yield context.remedy(title, why, replace_node(source, mask, f"{plain} | ~{plain}.any(-1, keepdim=True)"))
        yield context.remedy(title, why, replace_node(source, mask, f"{plain}.clamp_min({low})"))


def _weights_are_unused(source: SourceFile, call: ast.Call) -> bool:
    """Whether nothing reads the second result of the call."""
    parent = source.parent(call)
    if isinstance(parent, ast.Subscript):
        return literal_value(parent.slice) == 0
    target = parent.targets[0] if isinstance(parent, ast.Assign) and len(parent.targets) == 1 else None
    if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or not isinstance(target.elts[1], ast.Name):
        return False
    return not source.reads(target.elts[1].id, call)


@remedies_for("masked_label")
def lower_bound_of_the_logits(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "cross_entropy", "nll_loss", "gather", "log_softmax")
    location = context.location
    node = found.expr.args[0] if found is not None else None
    if found is None and location is not None and isinstance(location.node, ast.Subscript):  # `scores[before, tag]`
        node = location.node.value
    if node is not None and location is not None:
        writer = found.writer if found is not None else GuardWriter(location.source)
        yield context.remedy(
            "Keep the logits at -1e4 or above",
            "A label on a masked class has a large, finite loss; the loss of other labels is unchanged.",
            writer.floor(node, "-1e4"),
        )


@remedies_for("zero_times_inf", "inf_minus_inf", "where_grad_trap")
def finite_operand(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "mul", "matmul", "sub", "add", "div")
    if found is None or found.event is None:
        return
    tensors = [i for i in found.event.inputs if i.name in ("self", "other", "mat2", "batch1", "batch2")]
    edits = []
    for operand, node in zip(tensors, found.expr.args, strict=False):
        if operand.stat is not None and operand.stat.neginf:
            edits.append(found.writer.floor(node, "-1e4"))
        elif operand.stat is not None and operand.stat.posinf:
            edits.append(found.writer.ceiling(node, "1e4"))
    if edits:
        yield context.remedy(
            "Bound the infinite operand", "Finite operands are unchanged, and no infinity is left.", *edits
        )


@remedies_for("zero_times_inf")
def zero_for_infinite_elements(context: FailureContext) -> Iterator[Remedy]:
    """A layer that reads infinities, as a maximum over no elements has left them."""
    location, event = context.location, context.event
    if location is None or event is None or not event.module_type or len(location.expr.args) != 1:
        return
    node = location.expr.args[0]
    stats = [i.stat for i in event.inputs if i.stat is not None and i.name not in ("mat2", "weight")]
    if isinstance(node, ast.Name) and any(stat.neginf or stat.posinf for stat in stats):
        change = replace_node(location.source, node, f"{node.id}.masked_fill({node.id}.isinf(), 0.0)")
        yield context.remedy(f"Use 0 for infinite elements of `{node.id}`", "All other elements are unchanged.", change)


@remedies_for("nan_constant")
def finite_constant(context: FailureContext) -> Iterator[Remedy]:
    for value in ("0.0", "1.0"):
        for location in filter(None, (context.location_of(event.site) for event in mask_events(context))):
            source = location.source
            found = nonfinite_constants(source, source.statement(location.node))
            edits = [replace_node(source, node, value) for node, constant in found if math.isnan(constant)]
            if edits:
                title, why = f"Use {value} instead of NaN", "Undefined entries become an ordinary number."
                yield context.remedy(title, why, *edits)
                break
