"""A loss that falls without bound: a term of it may have the wrong sign."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.diagnose.rules.base import falls_without_bound
from firstnan.records import Remedy
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.source import parenthesized, replace_node


@remedies_for("divergence_lr")
def other_sign(context: FailureContext) -> Iterator[Remedy]:
    """Every subtracted term of the loss is added instead; at last the loss itself changes its sign."""
    events = context.failure.trace.events
    losses = [e for e in events if e.phase == "forward" and e.grad and e.outputs and not e.outputs[0].shape]
    losses = [e for e in losses if not e.op.endswith("_like")]  # backward() itself calls ones_like(loss)
    location = context.location_of(losses[-1].site) if losses else None
    if location is None or not falls_without_bound(context.failure.diverging):
        return
    source = location.source
    value = getattr(source.statement(location.node), "value", None)
    why = "The loss then has a lower bound, unless another term has the wrong sign too."
    for node in ast.walk(value) if isinstance(value, ast.expr) else ():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            term = source.code(node.right)
            added = f"{source.code(node.left)} + {term}"
            yield context.remedy(f"Add `{term}` instead of subtracting it", why, replace_node(source, node, added))
    if isinstance(value, ast.expr) and not isinstance(value, ast.BinOp):
        negative = value.operand if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub) else None
        text = source.code(negative) if negative is not None else f"-{parenthesized(source, value)}"
        yield context.remedy("Use the loss with the other sign", why, replace_node(source, value, text))
