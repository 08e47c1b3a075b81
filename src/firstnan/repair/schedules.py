"""Learning rate schedules that return NaN, or that raise the learning rate too far."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from firstnan.records import Remedy
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.literals import format_number, nonfinite_constants, scale_number
from firstnan.repair.optimizer_setup import OptimizerSetup
from firstnan.repair.source import Function, SourceFile, literal_value, replace_node

PEAKS = {"OneCycleLR": 1, "CyclicLR": 2}
"""Schedules with a peak, and its position among their arguments."""


@remedies_for("nan_lr")
def guarded_schedule(context: FailureContext) -> Iterator[Remedy]:
    """A guard in the expression that computes the learning rate."""
    for source in OptimizerSetup(context).sources:
        for expression in _schedules(source):
            for node in ast.walk(expression):
                found = _guard(source, node)
                if found is not None:
                    inner, text, why = found
                    title = f"Keep `{' '.join(source.code(inner).split())}` in range"
                    yield context.remedy(title, why, replace_node(source, inner, text), kind="setting")


@remedies_for("nan_lr")
def rate_filled_in(context: FailureContext) -> Iterator[Remedy]:
    """The learning rate of the step before in place of a NaN in the source."""
    rates = [s.lr for s in context.failure.history.steps if s.lr is not None and math.isfinite(s.lr)]
    for source in OptimizerSetup(context).sources if rates else ():
        for node, value in nonfinite_constants(source, source.tree):
            if math.isnan(value):
                why = "The learning rate is NaN in the source; the step before used this one."
                rate = format_number(rates[-1])
                yield context.remedy(
                    f"Use learning rate {rate} instead of NaN", why, replace_node(source, node, rate), kind="setting"
                )


def _schedules(source: SourceFile) -> Iterator[ast.expr]:
    """The expressions that a schedule returns, and those assigned to `group["lr"]`."""
    for call in (c for kind in ("LambdaLR", "MultiplicativeLR") for c in source.calls if kind in source.called(c)):
        given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "lr_lambda")]
        for function in (f for g in given for f in _functions(source, g)):
            yield from _returned(function)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(_is_rate(t) for t in node.targets):
            yield node.value
            # `group["lr"] = schedule(step)`, or a name assigned before
            for function in _functions(source, node.value):
                yield from _returned(function)
            if isinstance(node.value, ast.Name) and (value := source.value(node.value)) is not node.value:
                yield value
                yield from (r for f in _functions(source, value) for r in _returned(f))
    for own in (n for n in source.nodes if isinstance(n, ast.FunctionDef) and n.name == "get_lr"):
        yield from _returned(own)


def _is_rate(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "lr"


def _functions(source: SourceFile, node: ast.expr, depth: int = 3) -> Iterator[Function]:
    """The functions that an expression refers to: a lambda, a name, or what another function returns."""
    if isinstance(node, ast.Lambda):
        yield node
    name = source.called_name(node) if isinstance(node, ast.Call) else getattr(node, "id", None)
    name = node.attr if isinstance(node, ast.Attribute) else name
    for own in source.nodes if depth else ():
        if isinstance(own, ast.FunctionDef) and own.name == name:
            yield own
            for returned in _returned(own):
                yield from _functions(source, returned, depth - 1)


def _returned(function: Function) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    for node in ast.walk(function):
        # The result is often computed in several assignments.
        if isinstance(node, ast.Return | ast.Assign) and node.value is not None:
            yield node.value


def _guard(source: SourceFile, node: ast.AST) -> tuple[ast.expr, str, str] | None:
    """The operand of an operation that may give NaN, its guarded code, and why."""
    expr = source.expr(node)
    first = expr.arg(0, "x")
    if first is None or (isinstance(node, ast.Call) and expr.library not in ("numpy", "math", "torch", "")):
        return None
    if expr.op in ("pow", "sqrt", "log", "log2", "log10") and literal_value(first) is None:
        floor = "0.0" if expr.op in ("pow", "sqrt") else "1e-8"
        why = "After the planned number of steps the argument becomes negative, and the result is not a real number."
        return first, f"max({source.code(first)}, {floor})", why
    if expr.op == "div" and (below := expr.arg(1, "other")) is not None and literal_value(below) is None:
        return below, f"max({source.code(below)}, 1)", "A schedule without steps divides by 0."
    return None


@remedies_for("divergence_lr")
def lower_peak(context: FailureContext) -> Iterator[Remedy]:
    """A lower peak for a schedule that rises and falls."""
    for source in OptimizerSetup(context).sources:
        for call in source.calls:
            at = PEAKS.get(source.called_name(call))
            given = [k.value for k in call.keywords if k.arg == "max_lr"] or (call.args[at : at + 1] if at else [])
            for peak, factor in ((p, f) for p in given[:1] for f in (0.1, 0.01) if at is not None):
                edit, value = scale_number(context.files, Location(source, peak), factor)
                title = f"Multiply the peak learning rate by {format_number(factor)}"
                if value is not None:
                    title = f"Lower the peak learning rate to {format_number(value)}"
                why = "The schedule raised the learning rate until steps overshot; a lower peak avoids that."
                yield context.remedy(title, why, edit, kind="setting")


@remedies_for("divergence_lr")
def capped_schedule(context: FailureContext) -> Iterator[Remedy]:
    """A schedule that stops raising the learning rate while training is still healthy."""
    rates = [(s.step, s.lr) for s in context.failure.history.steps if s.lr is not None and math.isfinite(s.lr)]
    growth = context.failure.growth
    initial: Any = dict(context.failure.history.settings).get("initial_lr")
    if len(rates) < 3 or growth is None or not isinstance(initial, int | float) or not initial:
        return
    healthy = [r for step, r in rates if step <= growth.first_step]
    if not healthy or rates[-1][1] < 3 * min(r for _, r in rates):
        return
    cap = healthy[-1] / initial
    for source in OptimizerSetup(context).sources:
        for call in (c for c in source.calls if source.called(c).endswith("LambdaLR") and len(c.args) > 1):
            for function in _functions(source, call.args[1]):
                ends = [function.body] if isinstance(function, ast.Lambda) else _return_values(function)
                edits = [replace_node(source, e, f"min({source.code(e)}, {format_number(cap)})") for e in ends]
                yield context.remedy(
                    f"Limit the schedule to {format_number(cap)} times the base learning rate",
                    f"The loss began to grow when the learning rate exceeded {format_number(healthy[-1])}.",
                    *edits,
                    kind="setting",
                )


def _return_values(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
