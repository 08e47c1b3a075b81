"""Finite in forward, infinite in backward: branches of `where` that are not taken, and roots inside a norm."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import GUARDS, failing_operation
from firstnan.repair.source import parenthesized, replace_node


@remedies_for("where_grad_trap")
def double_where(context: FailureContext) -> Iterator[Remedy]:
    """`where(c, log(x), y)`: the log reads 1 where its branch is not taken."""
    found = failing_operation(context)
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, node = found.location.source, found.expr.node
    argument = found.expr.args[1 if found.expr.op == "div" else 0]
    inner: ast.AST = node
    for outer in source.parents(node):
        expr = source.expr(outer)
        if expr.op == "where" and len(expr.args) == 3 and expr.called != ".where":
            branch = expr.args.index(inner) if isinstance(inner, ast.expr) and inner in expr.args else 0
            condition = source.code(expr.args[0])
            if branch and source.unchanged(expr.args[0], node):
                one = "0.0" if found.expr.op in ("exp", "acos", "asin", "atanh") else "1.0"
                pair = (source.code(argument), one) if branch == 1 else (one, source.code(argument))
                text = f"{source.spell('torch', node)}.where({condition}, {pair[0]}, {pair[1]})"
                yield context.remedy(
                    f"Give {found.expr.op or 'it'} a harmless argument where its branch is not taken",
                    "Backward runs through both branches; now the gradient is finite in the one not taken, too.",
                    replace_node(source, argument, text),
                )
            return
        inner = outer
        if isinstance(outer, ast.stmt):
            return


@remedies_for("sqrt_grad_at_zero", "where_grad_trap", "infinite_derivative")
def root_inside_a_norm(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "norm", "cdist", "hypot", "std", "pairwise_distance")
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, expr, node = found.location.source, found.expr, found.expr.node
    eps = context.epsilon("1e-12", "1e-6")
    first = parenthesized(source, expr.args[0])
    torch = source.spell("torch", node)
    if expr.op == "hypot":
        second = parenthesized(source, expr.args[1])
        text = f"{torch}.sqrt({first} ** 2 + {second} ** 2 + {eps})"
    elif expr.op == "cdist":
        second = parenthesized(source, expr.args[1])
        text = f"{torch}.sqrt(({first}.unsqueeze(-2) - {second}.unsqueeze(-3)).pow(2).sum(-1) + {eps})"
    elif expr.op == "pairwise_distance":
        second = parenthesized(source, expr.args[1])
        text = f"{torch}.sqrt(({first} - {second}).pow(2).sum(-1) + {eps})"
    elif expr.op == "std":
        start, end = source.span(node)
        call = source.text[start:end].replace("std", "var", 1)
        text = f"{torch}.sqrt({call} + {eps})"
    else:
        rest = [source.code(k) for k in getattr(node, "keywords", []) if k.arg in ("dim", "keepdim")]
        text = f"{torch}.sqrt({first}.pow(2).sum({', '.join(rest)}) + {eps})"
    yield context.remedy(
        f"Add {eps} under the root",
        "The gradient of the root is finite at a distance of 0; larger distances are unchanged.",
        replace_node(source, node, text),
    )


@remedies_for("where_grad_trap", "nan_input", "nan_label")
def fill_before_the_arithmetic(context: FailureContext) -> Iterator[Remedy]:
    """NaN in the data that a later mask removes: replaced before it reaches an operator."""
    location, event = context.location, context.event
    if location is None or event is None or context.failure.phase != "backward" or location.expr.op in GUARDS:
        return
    for operand, node in zip(event.inputs, location.expr.args, strict=False):
        if operand.stat is not None and operand.stat.nan:
            torch = location.source.spell("torch", node)
            yield context.remedy(
                "Replace missing values before computing with them",
                "What the mask removes later is finite, so its gradient of 0 stays 0.",
                replace_node(location.source, node, f"{torch}.nan_to_num({location.code(node)})"),
            )
