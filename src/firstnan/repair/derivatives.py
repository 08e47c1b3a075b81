"""Finite in forward, infinite in backward: the argument of a branch not taken, and roots hidden in a norm."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.repair.base import Job, remedy
from firstnan.repair.edits import atom, put
from firstnan.repair.guards import GUARDS, small, spot


@remedy("where_grad_trap")
def double_where(job: Job) -> Iterator[Remedy]:
    """`where(c, log(x), y)`: the log gets 1 where its branch is not taken."""
    found = spot(job)
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, node = found.place.source, found.expr.node
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
                yield job.remedy(
                    f"Give {found.expr.op or 'it'} a harmless argument where its branch is not taken",
                    "Backward runs through both branches; the one not taken is finite now, and 0 times finite is 0.",
                    put(source, argument, text),
                )
            return
        inner = outer
        if isinstance(outer, ast.stmt):
            return


@remedy("sqrt_grad_at_zero", "where_grad_trap", "infinite_derivative")
def root_inside_a_norm(job: Job) -> Iterator[Remedy]:
    found = spot(job, "norm", "cdist", "hypot", "std", "pairwise_distance")
    if found is None or not isinstance(found.expr.node, ast.expr):
        return
    source, expr, node = found.place.source, found.expr, found.expr.node
    eps = small(job.dtype, "1e-12", "1e-6")
    first = atom(source, expr.args[0])
    torch = source.spell("torch", node)
    if expr.op == "hypot":
        second = atom(source, expr.args[1])
        text = f"{torch}.sqrt({first} ** 2 + {second} ** 2 + {eps})"
    elif expr.op == "cdist":
        second = atom(source, expr.args[1])
        text = f"{torch}.sqrt(({first}.unsqueeze(-2) - {second}.unsqueeze(-3)).pow(2).sum(-1) + {eps})"
    elif expr.op == "pairwise_distance":
        second = atom(source, expr.args[1])
        text = f"{torch}.sqrt(({first} - {second}).pow(2).sum(-1) + {eps})"
    elif expr.op == "std":
        start, end = source.span(node)
        call = source.text[start:end].replace("std", "var", 1)
        text = f"{torch}.sqrt({call} + {eps})"
    else:
        rest = [source.code(k) for k in getattr(node, "keywords", []) if k.arg in ("dim", "keepdim")]
        text = f"{torch}.sqrt({first}.pow(2).sum({', '.join(rest)}) + {eps})"
    yield job.remedy(
        f"Add {eps} under the root",
        "The slope of the root is finite where the distance is 0; larger distances keep their value.",
        put(source, node, text),
    )


@remedy("where_grad_trap", "nan_input", "nan_label")
def fill_before_the_arithmetic(job: Job) -> Iterator[Remedy]:
    """NaN in the data that a later mask throws away: it is filled before, so that backward meets numbers only."""
    place, event = job.place, job.event
    if place is None or event is None or job.scene.phase != "backward" or place.expr.op in GUARDS:
        return
    for operand, node in zip(event.inputs, place.expr.args, strict=False):
        if operand.stat is not None and operand.stat.nan:
            torch = place.source.spell("torch", node)
            yield job.remedy(
                "Fill what is missing before computing with it",
                "What the mask throws away later is a number now, so that its gradient 0 stays 0.",
                put(place.source, node, f"{torch}.nan_to_num({place.code(node)})"),
            )
