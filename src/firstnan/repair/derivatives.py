"""Finite in forward, infinite in backward: untaken branches of `where`, roots inside a norm."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.guards import GUARDS, failing_operation
from firstnan.repair.source import SourceFile, parenthesized, replace_node


@remedies_for("where_grad_trap")
def double_where(context: FailureContext) -> Iterator[Remedy]:
    """`where(c, log(x), y)`: the log reads 1 where its branch is not taken; also with a name for `log(x)`."""
    found = failing_operation(context)
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, node = found.location.source, found.expr.node
    argument = found.expr.args[1 if found.expr.op == "div" else 0]
    taken = _where_around(source, node)
    if taken is None:
        return
    condition, first = taken
    if {n.id for n in ast.walk(condition) if isinstance(n, ast.Name)} & _assigned_between(source, node, condition):
        return  # the place of the operation is not known yet
    one = "0.0" if found.expr.op in ("exp", "acos", "asin", "atanh") else "1.0"
    pair = (source.code(argument), one) if first else (one, source.code(argument))
    text = f"{source.spell('torch', node)}.where({source.code(condition)}, {pair[0]}, {pair[1]})"
    yield context.remedy(
        f"Give {found.expr.op or 'it'} a harmless argument where its branch is not taken",
        "Backward runs through both branches; now the gradient is finite in the one not taken, too.",
        replace_node(source, argument, text),
    )


def _where_around(source: SourceFile, node: ast.expr) -> tuple[ast.expr, bool] | None:
    """The condition of the `where` that discards some of a value, and whether the value is its first branch."""
    inner: ast.AST = node
    for outer in source.parents(node):
        expr = source.expr(outer)
        if expr.op == "where" and len(expr.args) == 3:
            condition, *branches = expr.args if expr.called != ".where" else (expr.args[1], expr.args[0], expr.args[2])
            return (condition, inner is branches[0]) if inner in branches else None
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(outer.targets[0], ast.Name):
            name = outer.targets[0]
            uses = [n for n in source.within(node) if isinstance(n, ast.Name) and n.id == name.id and n is not name]
            return _where_around(source, uses[0]) if len(uses) == 1 and isinstance(uses[0].ctx, ast.Load) else None
        if isinstance(outer, ast.stmt):
            return None
        inner = inner if isinstance(outer, ast.Attribute) else outer
    return None


def _assigned_between(source: SourceFile, first: ast.AST, last: ast.AST) -> set[str]:
    """The names that are assigned from one statement up to another."""
    start, end = source.statement(first).lineno, source.statement(last).lineno
    stores = [n for n in source.within(first) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    return {n.id for n in stores if start <= source.statement(n).lineno < end}


@remedies_for("sqrt_grad_at_zero", "where_grad_trap", "infinite_derivative")
def root_inside_a_norm(context: FailureContext) -> Iterator[Remedy]:
    found = failing_operation(context, "norm", "cdist", "hypot", "std", "pairwise_distance")
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, expr, node = found.location.source, found.expr, found.expr.node
    eps = context.epsilon("1e-12", "1e-6")
    first = parenthesized(source, expr.args[0])
    second = parenthesized(source, expr.args[1]) if expr.op in ("hypot", "cdist", "pairwise_distance") else ""
    torch = source.spell("torch", node)
    if expr.op == "hypot":
        text = f"{torch}.sqrt({first} ** 2 + {second} ** 2 + {eps})"
    elif expr.op == "cdist":
        text = f"{torch}.sqrt(({first}.unsqueeze(-2) - {second}.unsqueeze(-3)).pow(2).sum(-1) + {eps})"
    elif expr.op == "pairwise_distance":
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
                replace_node(
                    location.source, node, f"{torch}.nan_to_num({location.code(node)}, posinf=0.0, neginf=0.0)"
                ),
            )
