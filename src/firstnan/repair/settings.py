"""Training settings: a smaller step, clipped gradients, an eps that is there."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator

from firstnan.records import Remedy
from firstnan.repair.base import Job, remedy
from firstnan.repair.edits import Edit, after, argument, atom, put
from firstnan.repair.numbers import Spelled, literal, replaced, times, written
from firstnan.repair.setup import Setup, clip
from firstnan.repair.source import Source, number

RATES = ("lr", "learning_rate", "rate", "step_size", "eta")
UPDATES = ("add_", "sub_", "addcdiv_", "addcmul_")
SMALLER = (0.1, 0.01, 0.001)
EPS = {"float16": 1e-4, "bfloat16": 1e-6}
GENTLE = 1.0
"""The norm that gradients are cut to where the run gives no better one; the value of most published recipes."""


# --- the step size ----------------------------------------------------------------------------------------------


@remedy("divergence_lr")
def smaller_rate(job: Job) -> Iterator[Remedy]:
    """A tenth, a hundredth, a thousandth of the learning rate."""
    setup = Setup(job)
    for factor in SMALLER:
        edits, value = _slower(setup, factor)
        if edits:
            yield job.remedy(
                f"Learning rate {written(value)} instead of {written(value / factor)}"
                if value is not None
                else f"Learning rate {written(factor)} times what it was",
                "Steps of this size overshoot, and what is too large grows further; smaller ones do not.",
                *edits,
                kind="setting",
            )


def _slower(setup: Setup, factor: float) -> tuple[list[Edit], float | None]:
    job, lr = setup.job, setup.settings.get("initial_lr", setup.settings.get("lr"))
    expected = float(lr) if isinstance(lr, int | float) else None
    if setup.call is None:
        given = _by_hand(setup)
        if given is None:
            return [], None
        edit, value = times(job.desk, given, factor)
        return [edit], value
    source, call = setup.call
    rate = setup.setting(*RATES, position=1)
    groups = _groups(source, call)
    edits = [times(job.desk, g, factor)[0] for g in groups]
    if rate is not None:
        edit, value = times(job.desk, rate, factor, None if groups else expected)
        return [edit, *edits], value
    if expected is not None and setup.takes("lr"):
        return [argument(source, call, "lr", written(expected * factor)), *edits], expected * factor
    return edits or _groups_afterwards(source, call, factor), None


def _groups(source: Source, call: ast.Call) -> list[Spelled]:
    """Learning rates of single parameter groups: `{"params": ..., "lr": ...}`."""
    given: list[ast.AST] = list(call.args)
    if call.args and isinstance(call.args[0], ast.Name):
        given.append(source.value(call.args[0]))
    tables = [d for g in given for d in ast.walk(g) if isinstance(d, ast.Dict)]
    pairs = [(k, v) for d in dict.fromkeys(tables) for k, v in zip(d.keys, d.values, strict=True)]
    return [Spelled(source, v) for k, v in pairs if isinstance(k, ast.Constant) and k.value == "lr"]


def _groups_afterwards(source: Source, call: ast.Call, factor: float) -> list[Edit]:
    """Where nothing says how the rate gets in: it is changed right after the optimizer is made."""
    statement = source.statement(call)
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return []
    target = source.code(statement.targets[0])
    if not isinstance(statement.targets[0], ast.Name | ast.Attribute):
        return []
    loop = f"for group in {target}.param_groups:"
    return [after(source, call, loop, f'    group["lr"] *= {written(factor)}')]


def _by_hand(setup: Setup) -> Spelled | None:
    """The factor of the gradient where the program updates its weights itself: `w -= rate * w.grad`."""
    for source in setup.files:
        for node in ast.walk(source.tree):
            factor = _update_factor(source, node)
            if factor is not None and (number(factor) is not None or literal(setup.job.desk, Spelled(source, factor))):
                return Spelled(source, factor)
    return None


def _update_factor(source: Source, node: ast.AST) -> ast.expr | None:
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


def _writes_weights(source: Source, node: ast.AST, target: ast.expr) -> bool:
    guarded = (source.code(i.context_expr) for w in source.parents(node) if isinstance(w, ast.With) for i in w.items)
    return "data" in source.code(target) or any("no_grad" in text for text in guarded)


def _mentions_grad(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(node))


def _factor(node: ast.expr) -> ast.expr | None:
    """The side of a product that is no gradient."""
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


@remedy("divergence_lr", "optimizer_overflow")
def clipped(job: Job) -> Iterator[Remedy]:
    """The norm of the gradient cut before the update, above what it was while all was well."""
    setup = Setup(job)
    if setup.step is None:
        return
    for norm in _norms(job):
        edit = clip(setup, norm)
        if edit is not None:
            yield job.remedy(
                f"Clip the gradient norm to {written(norm)} before the update",
                "A gradient that is too large keeps its direction and loses its length: no step can leap away.",
                edit,
                kind="setting",
            )


def _norms(job: Job) -> list[float]:
    """Norms to cut to: a round number above the healthy steps' norms where some came before the growth; then 1."""
    growth = job.scene.growth
    start = growth.first_step if growth is not None else job.scene.origin.step
    healthy = [s.grad_norm for s in job.scene.history.steps if s.grad_norm is not None and s.step <= start]
    healthy = [n for n in healthy if math.isfinite(n) and n > 0]
    if len(healthy) < 3:
        return [GENTLE]
    above = 10.0 ** math.ceil(math.log10(2 * statistics.median(healthy)))
    return list(dict.fromkeys([above, GENTLE]))


# --- eps ---------------------------------------------------------------------------------------------------------


@remedy("optimizer_eps")
def enough_eps(job: Job) -> Iterator[Remedy]:
    """An eps that the type of the weights can hold, in the constructor of one of torch's optimizers."""
    setup = Setup(job)
    if setup.call is None or "eps" not in setup.settings:
        return
    source, call = setup.call
    given = setup.setting("eps")
    value = EPS.get(job.dtype, 1e-8)
    now = setup.settings["eps"]
    if isinstance(now, int | float) and now >= value:  # more of it is needed, if any
        return
    if given is not None:
        edit = replaced(job.desk, given, value, now if isinstance(now, int | float) else None)
    elif setup.takes("eps"):
        edit = argument(source, call, "eps", written(value))
    else:
        return
    yield job.remedy(
        f"eps={written(value)}",
        f"The denominator of the update is at least {written(value)}: a weight without a gradient stays as it is.",
        edit,
        kind="setting",
    )


@remedy("optimizer_eps")
def eps_in_own_update(job: Job) -> Iterator[Remedy]:
    """The same in an update that the user wrote: an eps behind the denominator."""
    place = job.place
    if place is None or job.scene.origin.site is None:
        return
    names = {"div": (1, "other"), "addcdiv": (2, "tensor2"), "rsqrt": (0, "input"), "reciprocal": (0, "input")}
    at = names.get(place.expr.op)
    below = place.expr.arg(*at) if at is not None else None
    if below is None:
        return
    eps = EPS.get(job.dtype, 1e-8)
    why = f"Where the gradient was always 0 the denominator is now {written(eps)}, and 0 divided by it is 0."
    if not job.scene.nan:
        why = f"Where the denominator was 0 it is now {written(eps)}: what is divided by it is large there, but finite."
    guarded = f"{atom(place.source, below)} + {written(eps)}"
    yield job.remedy(f"Add {written(eps)} to the denominator", why, put(place.source, below, guarded))
    clamped = f"{atom(place.source, below)}.clamp_min({written(eps)})"
    yield job.remedy(f"Denominator at least {written(eps)}", why, put(place.source, below, clamped))
