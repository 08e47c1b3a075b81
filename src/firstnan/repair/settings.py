"""Training settings: a smaller learning rate, clipped gradients, a larger eps."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator

from firstnan.records import Edit, Remedy
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.literals import find_literal, format_number, replace_number, scale_number
from firstnan.repair.optimizer_setup import OptimizerSetup, clip
from firstnan.repair.source import SourceFile, insert_after, parenthesized, replace_node, set_argument

RATES = ("lr", "learning_rate", "rate", "step_size", "eta")
UPDATES = ("add_", "sub_", "addcdiv_", "addcmul_")
FACTORS = (0.1, 0.01, 0.001)
EPS = {"float16": 1e-4, "bfloat16": 1e-6}
USUAL_NORM = 1.0
"""The norm to clip to if the run suggests none; most published recipes use it."""


# --- the learning rate -------------------------------------------------------------------------------------------


@remedies_for("divergence_lr")
def smaller_rate(context: FailureContext) -> Iterator[Remedy]:
    """A tenth, a hundredth, a thousandth of the learning rate."""
    setup = OptimizerSetup(context)
    for factor in FACTORS:
        edits, value = _slower(setup, factor)
        title = f"Multiply the learning rate by {format_number(factor)}"
        if value is not None:
            title = f"Lower the learning rate from {format_number(value / factor)} to {format_number(value)}"
        if edits:
            yield context.remedy(
                title,
                "Steps of this size overshoot, so the error grows from step to step; smaller steps do not.",
                *edits,
                kind="setting",
            )


def _slower(setup: OptimizerSetup, factor: float) -> tuple[list[Edit], float | None]:
    context, lr = setup.context, setup.settings.get("initial_lr", setup.settings.get("lr"))
    expected = float(lr) if isinstance(lr, int | float) else None
    if setup.call is None:
        given = _manual_rate(setup)
        if given is None:
            return [], None
        edit, value = scale_number(context.files, given, factor)
        return [edit], value
    source, call = setup.call
    rate = setup.setting(*RATES, position=1)
    groups = _groups(source, call)
    edits = [scale_number(context.files, g, factor)[0] for g in groups]
    if rate is not None:
        edit, value = scale_number(context.files, rate, factor, None if groups else expected)
        return [edit, *edits], value
    if expected is not None and setup.takes("lr"):
        return [set_argument(source, call, "lr", format_number(expected * factor)), *edits], expected * factor
    return edits or _groups_afterwards(source, call, factor), None


def _groups(source: SourceFile, call: ast.Call) -> list[Location[ast.expr]]:
    """The learning rates of parameter groups: `{"params": ..., "lr": ...}`."""
    given: list[ast.AST] = list(call.args)
    if call.args and isinstance(call.args[0], ast.Name):
        given.append(source.value(call.args[0]))
    tables = [d for g in given for d in ast.walk(g) if isinstance(d, ast.Dict)]
    pairs = [(k, v) for d in dict.fromkeys(tables) for k, v in zip(d.keys, d.values, strict=True)]
    return [Location(source, v) for k, v in pairs if isinstance(k, ast.Constant) and k.value == "lr"]


def _groups_afterwards(source: SourceFile, call: ast.Call, factor: float) -> list[Edit]:
    """Changes the learning rate right after the optimizer is created, if the source does not show where it is set."""
    statement = source.statement(call)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = source.code(statement.targets[0])
    if not isinstance(statement.targets[0], ast.Name | ast.Attribute):
        return []
    loop = f"for group in {target}.param_groups:"
    return [insert_after(source, call, loop, f'    group["lr"] *= {format_number(factor)}')]


def _manual_rate(setup: OptimizerSetup) -> Location[ast.expr] | None:
    """The learning rate of a program that updates its weights itself: `w -= rate * w.grad`."""
    for source in setup.sources:
        for node in source.nodes:
            factor = _update_factor(source, node)
            if factor is not None and find_literal(setup.context.files, Location(source, factor)) is not None:
                return Location(source, factor)
    return None


def _update_factor(source: SourceFile, node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.Add):
        return _factor(node.value) if _writes_weights(source, node, node.target) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UPDATES:
        given = next((k.value for k in node.keywords if k.arg in ("alpha", "value")), None)
        if given is not None:
            return given.operand if isinstance(given, ast.UnaryOp) else given
        if node.args and _writes_weights(source, node, node.func.value):
            return _factor(node.args[0])
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.Sub):
        return _factor(node.value.right) if _mentions_grad(node.value.right) else None
    return None


def _writes_weights(source: SourceFile, node: ast.AST, target: ast.expr) -> bool:
    guarded = (source.code(i.context_expr) for w in source.parents(node) if isinstance(w, ast.With) for i in w.items)
    return "data" in source.code(target) or any("no_grad" in text for text in guarded)


def _mentions_grad(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(node))


def _factor(node: ast.expr) -> ast.expr | None:
    """The factor of a product that is not the gradient."""
    if isinstance(node, ast.UnaryOp):
        return _factor(node.operand)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult | ast.Div):
        return None
    sides = [node.left] if isinstance(node.op, ast.Div) else [node.left, node.right]
    for side in sides:
        if isinstance(side, ast.BinOp) and (inner := _factor(side)) is not None:
            return inner
    plain = [s for s in sides if not _mentions_grad(s) and isinstance(s, ast.Name | ast.Attribute | ast.Constant)]
    return plain[0] if plain else None


# --- clipping ---------------------------------------------------------------------------------------------------


@remedies_for("divergence_lr", "optimizer_overflow")
def clipped(context: FailureContext) -> Iterator[Remedy]:
    """Gradient clipping before the update, above the norms of the healthy steps."""
    setup = OptimizerSetup(context)
    if setup.step is None:
        return
    for norm in _norms(context):
        edit = clip(setup, norm)
        if edit is not None:
            yield context.remedy(
                f"Clip the gradient norm to {format_number(norm)} before the update",
                "A gradient that is too large keeps its direction and gets a bounded length.",
                edit,
                kind="setting",
            )


def _norms(context: FailureContext) -> list[float]:
    """Norms to clip to: a power of ten above the norms of the healthy steps, if there are enough; then 1."""
    growth = context.failure.growth
    start = growth.first_step if growth is not None else context.failure.origin.step
    healthy = [s.grad_norm for s in context.failure.history.steps if s.grad_norm is not None and s.step <= start]
    healthy = [n for n in healthy if math.isfinite(n) and n > 0]
    if len(healthy) < 3:
        return [USUAL_NORM]
    above = 10.0 ** math.ceil(math.log10(2 * statistics.median(healthy)))
    return list(dict.fromkeys([above, USUAL_NORM]))


# --- eps ---------------------------------------------------------------------------------------------------------


@remedies_for("optimizer_eps")
def enough_eps(context: FailureContext) -> Iterator[Remedy]:
    """An eps that is not 0 in the dtype of the weights, in the constructor of one of torch's optimizers."""
    setup = OptimizerSetup(context)
    if setup.call is None or "eps" not in setup.settings:
        return
    source, call = setup.call
    given = setup.setting("eps")
    value = EPS.get(context.dtype, 1e-8)
    text = format_number(value)
    now = setup.settings["eps"]
    if isinstance(now, int | float) and now >= value:  # it is large enough already
        return
    if given is not None:
        edit = replace_number(context.files, given, value, now if isinstance(now, int | float) else None)
    elif setup.takes("eps"):
        edit = set_argument(source, call, "eps", text)
    else:
        return
    yield context.remedy(
        f"Use eps={text}",
        f"The denominator of the update is at least {text}, so a weight without a gradient does not change.",
        edit,
        kind="setting",
    )


@remedies_for("optimizer_eps")
def eps_in_own_update(context: FailureContext) -> Iterator[Remedy]:
    """An eps added to the denominator of an update in the user's code."""
    location = context.location
    if location is None or context.failure.origin.site is None:
        return
    names = {"div": (1, "other"), "addcdiv": (2, "tensor2"), "rsqrt": (0, "input"), "reciprocal": (0, "input")}
    at = names.get(location.expr.op)
    below = location.expr.arg(*at) if at is not None else None
    if below is None:
        return
    eps, plain = format_number(EPS.get(context.dtype, 1e-8)), parenthesized(location.source, below)
    why = f"A denominator of 0 becomes {eps}; the quotient is "
    why += "0 where the gradient was always 0." if context.failure.nan else "large there, but finite."
    for title, text in (
        (f"Add {eps} to the denominator", f"{plain} + {eps}"),
        (f"Keep the denominator at {eps} or above", f"{plain}.clamp_min({eps})"),
    ):
        yield context.remedy(title, why, replace_node(location.source, below, text))
