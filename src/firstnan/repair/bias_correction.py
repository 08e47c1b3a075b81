"""The bias correction of Adam written by hand, 1 - beta ** step, with a step that is counted from 0."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from firstnan.records import Edit, Remedy
from firstnan.repair.context import FailureContext, remedies_for
from firstnan.repair.source import SourceFile, delete_statement, insert_before, literal_value, replace_node

_WHY = "1 - beta ** 0 is 0; the averages hold one gradient when they are first used, so the count is 1 there."


@remedies_for("div_by_zero", "zero_over_zero", "optimizer_eps")
def count_from_one(context: FailureContext) -> Iterator[Remedy]:
    location = context.location
    if location is None or location.expr.op not in ("div", "addcdiv", "reciprocal"):
        return
    source = location.source
    counts = [found for n in ast.walk(source.statement(location.node)) for found in _counts_below(source, n)]
    for average, count in counts[:1]:
        code, late = source.code(count), _late_update(source, average)
        moved = _moved_before(source, count, late)
        if moved is not None:
            first = f"Update `{source.code(average)}` and count" if late else "Count"
            yield context.remedy(f"{first} `{code}` before the bias correction", _WHY, *moved)
            return
        if late is not None:
            return  # the average is still 0 there, whatever the count is
        edits = [replace_node(source, other, f"{source.code(other)} + 1") for other in _same_counts(source, count)]
        yield context.remedy(f"Use `{source.code(count)} + 1` in the bias correction", _WHY, *edits)


def _counts_below(source: SourceFile, node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The numerator of a fraction, and the exponent in its denominator, of the form `1 - beta ** count`."""
    expr = source.expr(node)
    if expr.op == "div" and len(expr.args) > 1:
        found = _count(source, source.value(expr.args[1]))
        if found is not None:
            yield source.value(expr.args[0]), found


def _count(source: SourceFile, node: ast.expr) -> ast.expr | None:
    difference = source.expr(node)
    if difference.op != "sub" or len(difference.args) != 2 or literal_value(difference.args[0]) != 1:
        return None
    power = source.expr(difference.args[1])
    exponent = power.args[1] if power.op == "pow" and len(power.args) > 1 else None
    return exponent if isinstance(exponent, ast.Name | ast.Attribute | ast.Subscript) else None


def _same_counts(source: SourceFile, count: ast.expr) -> list[ast.expr]:
    """The exponents of all bias corrections of this function that read the same count."""
    found = [c for n in source.within(count) if isinstance(n, ast.BinOp) and (c := _count(source, n)) is not None]
    return [c for c in found if ast.dump(c) == ast.dump(count)]


def _late_update(source: SourceFile, average: ast.expr) -> ast.Assign | None:
    """The statement that updates the average only after it was corrected, and could do so before."""
    here, text = source.statement(average), ast.unparse(average)
    written = [n for n in source.within(average) if isinstance(n, ast.stmt) and _writes(n, text)]
    if len(written) != 1 or not isinstance(late := written[0], ast.Assign) or late.lineno <= here.lineno:
        return None
    around = source.parent(here)
    between = [
        n
        for n in (ast.walk(around) if around is not None else ())
        if here.lineno <= n.__dict__.get("lineno", 0) < late.lineno
    ]
    stored = {ast.unparse(n) for n in between if isinstance(getattr(n, "ctx", None), ast.Store)}
    read = {ast.unparse(n) for n in ast.walk(late.value) if isinstance(getattr(n, "ctx", None), ast.Load)}
    return late if source.parent(late) is around and stored.isdisjoint(read) else None


def _writes(statement: ast.stmt, text: str) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return ast.unparse(statement.value).startswith(f"{text}.")  # `average.mul_(beta)`
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return any(target is not None and ast.unparse(target) == text for target in targets)


def _moved_before(source: SourceFile, count: ast.expr, late: ast.Assign | None) -> list[Edit] | None:
    """`count += 1`, which follows the bias correction, and what is `late`, before the first statement that reads it."""
    here = source.statement(count)
    for node in source.within(count):
        if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Add) or literal_value(node.value) != 1:
            continue
        if ast.unparse(node.target) != ast.unparse(count) or node.lineno <= here.lineno:
            continue
        around = source.parent(node)
        block = next((b for name in ("body", "orelse") if node in (b := getattr(around, name, []))), [])
        if around not in source.parents(here):
            continue
        first = next((s for s in block if _reads(s, count)), None)
        deleted = delete_statement(source, node)
        removed = [deleted, *([delete_statement(source, late)] if late is not None else [])]
        if first is not None and first.lineno <= here.lineno:
            lines = [source.code(node), *([source.code(late)] if late is not None else [])]
            edits = [edit for edit in removed if edit is not None]
            return [insert_before(source, first, *lines), *edits] if len(edits) == len(removed) else None
    return None


def _reads(statement: ast.stmt, count: ast.expr) -> bool:
    kind, text = type(count), ast.unparse(count)
    found = [n for n in ast.walk(statement) if isinstance(n, kind) and ast.unparse(n) == text]
    return any(isinstance(getattr(n, "ctx", None), ast.Load) for n in found)
