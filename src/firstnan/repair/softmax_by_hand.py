"""A softmax written as exp(x) / exp(x).sum(), with or without the maximum subtracted: torch's own instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from firstnan.records import Edit, Remedy
from firstnan.records.operator_families import words
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.masks import zero_weights
from firstnan.repair.source import Expr, SourceFile, literal_value, replace_node
from firstnan.repair.stable_formulas import AROUND_A_SUM
from firstnan.repair.steps import Steps

_AROUND_A_MAXIMUM = words("detach clone unsqueeze view reshape values")


@dataclass(frozen=True)
class SoftmaxByHand:
    """One softmax of the user's: what it is taken of, and the steps that compute it."""

    source: SourceFile
    whole: ast.expr
    """The expression that is the result."""
    scores: ast.expr
    dim: ast.expr
    steps: Steps

    @property
    def text(self) -> str:
        """torch's softmax, with SCORES for the scores."""
        return f"{self.source.spell('torch', self.whole)}.softmax(SCORES, dim={self.source.code(self.dim)})"

    def removed(self) -> list[Edit] | None:
        """The steps that nothing else reads, taken out; None if the scores would then be other ones."""
        edits, unchanged = self.steps.removed(), self.source.unchanged(self.scores, self.whole)
        if edits is None:
            return [] if unchanged else None
        if unchanged:
            return edits
        # `s = s - s.max()` assigns the scores again, but it is one of the steps.
        own = {n for s in self.steps.statements for n in ast.walk(s)}
        names = {n.id for n in ast.walk(self.scores) if isinstance(n, ast.Name)}
        first, last = (self.source.statement(n).lineno for n in (self.scores, self.whole))
        stores = [n for n in self.source.within(self.whole) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        stores = [n for n in stores if n.id in names and n not in own]
        return None if any(first <= self.source.statement(n).lineno < last for n in stores) else edits


def softmax_by_hand(source: SourceFile, node: ast.AST) -> SoftmaxByHand | None:
    """The softmax that ends at this expression, if it is one."""
    expr = source.expr(node)
    if not isinstance(node, ast.BinOp | ast.Call) or not expr.args:
        return None
    steps = Steps(source, node)
    if expr.op == "exp":
        return _by_logsumexp(source, node, expr, steps)
    if expr.op != "div" or len(expr.args) < 2:
        return None
    top, where = steps.resolve(expr.args[0])
    below = _sum(steps, expr.args[1])
    if top.op != "exp" or not top.args or below is None:
        return None
    total, dim, at = below
    inner, inner_where = steps.resolve(total, at)
    if inner.op != "exp" or not inner.args or ast.dump(inner.args[0]) != ast.dump(top.args[0]):
        return None
    scores = _unshifted(steps, top.args[0], where)
    _unshifted(steps, inner.args[0], inner_where)
    return SoftmaxByHand(source, node, scores, dim, steps)


def _by_logsumexp(source: SourceFile, node: ast.expr, expr: Expr, steps: Steps) -> SoftmaxByHand | None:
    """`exp(x - logsumexp(x))`."""
    difference, where = steps.resolve(expr.args[0])
    if difference.op != "sub" or len(difference.args) < 2:
        return None
    total, _ = steps.resolve(difference.args[1], where)
    dim = total.arg(1, "dim")
    if total.op != "logsumexp" or dim is None or ast.dump(total.args[0]) != ast.dump(difference.args[0]):
        return None
    return SoftmaxByHand(source, node, difference.args[0], dim, steps)


def _sum(steps: Steps, node: ast.expr) -> tuple[ast.expr, ast.expr, ast.AST] | None:
    """What is summed in a denominator, over which dimension, and where: through new axes and small numbers."""
    at: ast.AST = node
    kept = False
    for _ in range(8):
        expr, at = steps.resolve(node, at)
        if isinstance(expr.node, ast.Subscript):
            node, kept = expr.node.value, True
        elif expr.op in AROUND_A_SUM and expr.args:
            node, kept = expr.args[0], kept or expr.op in ("unsqueeze", "view", "reshape", "expand_as")
        else:
            break
    dim = expr.arg(1, "dim") or expr.keywords.get("axis")
    if expr.op != "sum" or not expr.args or dim is None:
        return None
    kept = kept or "keepdim" in expr.keywords or "keepdims" in expr.keywords or len(expr.args) > 2
    return (expr.args[0], dim, at) if kept or literal_value(dim) == 0 else None


def _unshifted(steps: Steps, node: ast.expr, at: ast.AST) -> ast.expr:
    """The scores without the maximum that is subtracted from them first."""
    probe = Steps(steps.source, steps.whole)
    difference, where = probe.resolve(node, at)
    if difference.op != "sub" or len(difference.args) < 2:
        return node
    scores, maximum = difference.args[:2]
    where = difference.node if isinstance(difference.node, ast.expr) else where
    for _ in range(6):
        found, where = probe.resolve(maximum, where)
        if isinstance(found.node, ast.Subscript | ast.Attribute):  # `x.max(-1, keepdim=True)[0]`, `.values`
            maximum = found.node.value
        elif found.op in _AROUND_A_MAXIMUM and found.args:
            maximum = found.args[0]
        else:
            break
    if isinstance(found.node, ast.Name):
        found = _first_of_pair(probe, found.node, where)
    if found.op not in ("max", "amax") or not found.args or ast.dump(found.args[0]) != _as_read(scores):
        return node
    steps.include(probe)
    return scores


def _as_read(node: ast.expr) -> str:
    """An expression as `ast.dump` shows it where it is read; the target of `s -= s.max()` is written too."""
    return ast.dump(node).replace("Store()", "Load()")


def _first_of_pair(steps: Steps, name: ast.Name, at: ast.AST) -> Expr:
    """`m, _ = x.max(...)`."""
    source, here = steps.source, steps.source.statement(at)
    for statement in source.within(name):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        if not isinstance(target, ast.Tuple) or not isinstance(statement, ast.Assign) or len(target.elts) != 2:
            continue
        first = target.elts[0]
        if isinstance(first, ast.Name) and first.id == name.id and statement.lineno < here.lineno:
            steps.take(statement)
            return source.expr(statement.value)
    return Expr("")


def _found(context: FailureContext) -> Iterator[SoftmaxByHand]:
    """The softmaxes written by hand of which the failing operation is a part."""
    location = context.location
    if location is None or location.expr.library == "numpy":
        return
    for node in location.source.within(location.node):
        found = softmax_by_hand(location.source, node) if isinstance(node, ast.BinOp | ast.Call) else None
        if found is not None and location.node in found.steps.nodes:
            yield found


@remedies_for("fully_masked_softmax")
def attend_to_nothing_by_hand(context: FailureContext) -> Iterator[Remedy]:
    for found in _found(context):
        removed = found.removed()
        if removed is not None:
            yield from zero_weights(context, found.source, found.whole, found.scores, found.text, removed)
            return


@remedies_for("exp_overflow", "overflow", "low_precision_overflow", "where_grad_trap", "zero_over_zero")
def softmax_of_the_same(context: FailureContext) -> Iterator[Remedy]:
    for found in _found(context):
        removed = found.removed()
        if removed is None:
            continue
        text = found.text.replace("SCORES", found.source.code(found.scores))
        yield context.remedy(
            "Use softmax instead of exp(x) / exp(x).sum()",
            "softmax subtracts the largest entry first, so no exponential overflows.",
            replace_node(found.source, found.whole, text),
            *removed,
        )
        return
