"""Schedules of the learning rate: kept a number, and kept from growing past what training can bear."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from typing import Any

from firstnan.records import Remedy
from firstnan.repair.base import Job, remedy
from firstnan.repair.edits import put
from firstnan.repair.masks import literals
from firstnan.repair.numbers import Spelled, times, written
from firstnan.repair.setup import Setup
from firstnan.repair.source import Function, Source, number

PEAKS = {"OneCycleLR": 1, "CyclicLR": 2}
"""Schedules with a peak, and the position of that among their arguments."""


@remedy("nan_lr")
def guarded_schedule(job: Job) -> Iterator[Remedy]:
    """The expression that computes the learning rate kept inside its domain."""
    for source in Setup(job).files:
        for expression in _schedules(source):
            for node in ast.walk(expression):
                found = _guard(source, node)
                if found is not None:
                    inner, text, why = found
                    title = f"`{' '.join(source.code(inner).split())}` kept in range"
                    yield job.remedy(title, why, put(source, inner, text), kind="setting")


@remedy("nan_lr")
def rate_filled_in(job: Job) -> Iterator[Remedy]:
    """A NaN that is written out among the rates becomes the rate of the step before."""
    rates = [s.lr for s in job.scene.history.steps if s.lr is not None and math.isfinite(s.lr)]
    for source in Setup(job).files if rates else ():
        for node, value in literals(source, source.tree):
            if math.isnan(value):
                why = "The rate was never filled in; the step before was made with this one."
                yield job.remedy(
                    f"A rate of {written(rates[-1])} in place of the NaN",
                    why,
                    put(source, node, written(rates[-1])),
                    kind="setting",
                )


def _schedules(source: Source) -> Iterator[ast.expr]:
    """What a schedule returns, and what is written into `group["lr"]`."""
    names = [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and "LambdaLR" in source.called(n)]
    names += [n for n in ast.walk(source.tree) if isinstance(n, ast.Call) and "MultiplicativeLR" in source.called(n)]
    for call in names:
        given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "lr_lambda")]
        for function in (f for g in given for f in _functions(source, g)):
            yield from _returned(function)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and any(_is_rate(t) for t in node.targets):
            yield node.value
            # `group["lr"] = schedule(step)`, or a name that was computed before
            for function in _functions(source, node.value):
                yield from _returned(function)
            if isinstance(node.value, ast.Name) and (value := source.value(node.value)) is not node.value:
                yield value
                yield from (r for f in _functions(source, value) for r in _returned(f))
    for own in (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef) and n.name == "get_lr"):
        yield from _returned(own)


def _is_rate(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "lr"


def _functions(source: Source, node: ast.expr, depth: int = 3) -> Iterator[Function]:
    """The functions that an expression stands for: a lambda, a name, what another function returns."""
    if isinstance(node, ast.Lambda):
        yield node
    name = source.called(node).rsplit(".", 1)[-1] if isinstance(node, ast.Call) else getattr(node, "id", None)
    name = node.attr if isinstance(node, ast.Attribute) else name
    for own in ast.walk(source.tree) if depth else ():
        if isinstance(own, ast.FunctionDef) and own.name == name:
            yield own
            for returned in _returned(own):
                yield from _functions(source, returned, depth - 1)


def _returned(function: Function) -> Iterator[ast.expr]:
    if isinstance(function, ast.Lambda):
        yield function.body
        return
    for node in ast.walk(function):
        # What it is computed from on the way counts too.
        if isinstance(node, ast.Return | ast.Assign) and node.value is not None:
            yield node.value


def _guard(source: Source, node: ast.AST) -> tuple[ast.expr, str, str] | None:
    """An operation that leaves the numbers, with the operand that has to be held and how."""
    expr = source.expr(node)
    first = expr.arg(0, "x")
    if first is None or (isinstance(node, ast.Call) and expr.library not in ("numpy", "math", "torch", "")):
        return None
    if expr.op in ("pow", "sqrt", "log", "log2", "log10") and number(first) is None:
        floor = "0.0" if expr.op in ("pow", "sqrt") else "1e-8"
        why = "After the planned number of steps the base becomes negative, and a fractional power of it is no number."
        return first, f"max({source.code(first)}, {floor})", why
    if expr.op == "div" and (below := expr.arg(1, "other")) is not None and number(below) is None:
        return below, f"max({source.code(below)}, 1)", "A schedule of no steps divided by zero."
    return None


@remedy("divergence_lr")
def lower_peak(job: Job) -> Iterator[Remedy]:
    """The largest rate of a schedule that goes up and down."""
    for source in Setup(job).files:
        for call in (n for n in ast.walk(source.tree) if isinstance(n, ast.Call)):
            at = PEAKS.get(source.called(call).rsplit(".", 1)[-1])
            given = [k.value for k in call.keywords if k.arg == "max_lr"] or (call.args[at : at + 1] if at else [])
            for peak, factor in ((p, f) for p in given[:1] for f in (0.1, 0.01) if at is not None):
                edit, value = times(job.desk, Spelled(source, peak), factor)
                to = written(value) if value is not None else f"{written(factor)} times what it was"
                why = "The schedule raised the rate to where steps overshot; a lower peak stays below that."
                yield job.remedy(f"Peak of the schedule: {to}", why, edit, kind="setting")


@remedy("divergence_lr")
def capped_schedule(job: Job) -> Iterator[Remedy]:
    """A schedule that raises the rate stops where training was still healthy."""
    rates = [(s.step, s.lr) for s in job.scene.history.steps if s.lr is not None and math.isfinite(s.lr)]
    growth = job.scene.growth
    initial: Any = dict(job.scene.history.settings).get("initial_lr")
    if len(rates) < 3 or growth is None or not isinstance(initial, int | float) or not initial:
        return
    healthy = [r for step, r in rates if step <= growth.first_step]
    if not healthy or rates[-1][1] < 3 * min(r for _, r in rates):
        return
    cap = healthy[-1] / initial
    for source in Setup(job).files:
        for call in ast.walk(source.tree):
            if not isinstance(call, ast.Call) or not source.called(call).endswith("LambdaLR") or len(call.args) < 2:
                continue
            for function in _functions(source, call.args[1]):
                ends = [function.body] if isinstance(function, ast.Lambda) else _last_return(function)
                edits = [put(source, e, f"min({source.code(e)}, {written(cap)})") for e in ends]
                yield job.remedy(
                    f"The schedule ends at {written(cap)} times the base rate",
                    f"The loss began to rise when the learning rate passed {written(healthy[-1])}.",
                    *edits,
                    kind="setting",
                )


def _last_return(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]
