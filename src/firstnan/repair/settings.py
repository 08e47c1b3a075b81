"""Training settings: the learning rate and its schedule, clipped gradients, a larger eps."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from firstnan.records import Edit, Remedy
from firstnan.repair.context import FailureContext, Location, remedies_for
from firstnan.repair.literals import (
    default_of,
    dictionary_values,
    find_literal,
    format_number,
    nonfinite_constants,
    replace_number,
    scale_number,
)
from firstnan.repair.source import (
    Function,
    SourceFile,
    insert_after,
    insert_before,
    literal_value,
    parameter_names,
    parenthesized,
    replace_node,
    set_argument,
)

# --- how the program trains: where the optimizer is created, and where it steps ----------------------------------


class OptimizerSetup:
    """The optimizer of a failing step in the user's source."""

    def __init__(self, context: FailureContext) -> None:
        self.context, self.history = context, context.failure.history
        self.settings = dict(self.history.settings)

    @cached_property
    def sources(self) -> list[SourceFile]:
        """The files that take part in the failing step, each once."""
        h, origin = self.history, self.context.failure.origin
        sites = [s for s in (h.stepped_at, h.backward_at, h.made_at, origin.site) if s is not None]
        found = [self.context.files.get(name) for name in dict.fromkeys(s.file for s in sites)]
        return [s for s in found if s is not None]

    @cached_property
    def call(self) -> tuple[SourceFile, ast.Call] | None:
        """The call that creates the optimizer."""
        location = self.context.location_of(self.history.made_at)
        if location is not None and isinstance(location.node, ast.Call):
            return location.source, location.node
        name = self.history.optimizer
        calls = [(s, c) for s in self.sources if name for c in s.calls if s.called_name(c) == name]
        return calls[0] if calls else None

    def setting(self, *names: str, position: int | None = None) -> Location[ast.expr] | None:
        """The argument of the constructor for one of the optimizer's settings."""
        if self.call is None:
            return None
        source, call = self.call
        given = next((k.value for k in call.keywords if k.arg in names), None)
        if given is None and position is not None and position < len(call.args):
            given = call.args[position]
        if given is not None:
            return Location(source, given)
        if any(k.arg is None for k in call.keywords):
            return next((s for name in names for s in dictionary_values(source, name)), None)
        return self._own_setting(source, call, names)

    def _own_setting(self, source: SourceFile, call: ast.Call, names: tuple[str, ...]) -> Location[ast.expr] | None:
        """The positional argument or default of an optimizer class in the same file."""
        classes = [n for n in source.nodes if isinstance(n, ast.ClassDef) and n.name == self.history.optimizer][:1]
        for function in (f for own in classes for f in own.body):
            if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                parameters = [a.arg for a in function.args.args[1:]]
                for name in (n for n in names if n in parameters):
                    at = parameters.index(name)
                    given = call.args[at] if at < len(call.args) else default_of(function, name)
                    if given is not None:
                        return Location(source, given)
        return None

    def takes(self, name: str) -> bool:
        """Whether the constructor is one of torch's that has this keyword argument."""
        if self.call is None or name not in self.settings:
            return False
        source, call = self.call
        return source.called_name(call) == self.history.optimizer and self._own_setting(source, call, (name,)) is None

    @cached_property
    def step(self) -> tuple[SourceFile, ast.Call] | None:
        """The call of `step`: the recorded one, else the first after the recorded backward."""
        location = self.context.location_of(self.history.stepped_at)
        if location is not None and isinstance(location.node, ast.Call) and _is_step(location.node):
            return location.source, location.node
        backward = self.context.location_of(self.history.backward_at)
        if backward is None:
            return None
        source, line = backward.source, backward.source.statement(backward.node).lineno
        calls = [n for n in ast.walk(source.scope(backward.node)) if isinstance(n, ast.Call) and _is_step(n)]
        later = [c for c in calls if c.lineno >= line and "sched" not in source.code(c)]
        return (source, min(later, key=lambda c: c.lineno)) if later else None


def _is_step(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "step"


def clip(setup: OptimizerSetup, norm: float) -> Edit | None:
    """A call of `clip_grad_norm_` before the step, after `unscale_` if a gradient scaler makes the step."""
    if setup.step is None:
        return None
    source, call = setup.step
    optimizer, scaler = _stepped_by(source, call)
    if optimizer is None or (call.args and scaler is None):  # a closure computes the gradients inside the step
        return None
    calls = [n for n in ast.walk(source.scope(call)) if isinstance(n, ast.Call)]
    if any(source.called(n).endswith(("clip_grad_norm_", "clip_grad_value_")) for n in calls):
        return None
    function = source.spell("torch.nn.utils.clip_grad_norm_", call)
    lines = [f"{function}({_parameters(setup, source, call, optimizer)}, {format_number(norm)})"]
    if scaler is not None and not any(source.called(n) == ".unscale_" for n in calls):
        lines.insert(0, f"{scaler}.unscale_({optimizer})")
    return insert_before(source, call, *lines)


def _stepped_by(source: SourceFile, call: ast.Call) -> tuple[str | None, str | None]:
    """The code of the optimizer in a `step` call, and of the gradient scaler if there is one."""
    assert isinstance(call.func, ast.Attribute)
    if call.args and isinstance(call.args[0], ast.Name | ast.Attribute) and "scaler" in source.code(call.func).lower():
        return source.code(call.args[0]), source.code(call.func.value)
    plain = isinstance(call.func.value, ast.Name | ast.Attribute | ast.Subscript)
    return (source.code(call.func.value) if plain else None), None


def _parameters(setup: OptimizerSetup, source: SourceFile, step: ast.Call, optimizer: str) -> str:
    """The constructor's first argument if it means the same at the step; else the optimizer's parameter groups."""
    groups = f'[p for group in {optimizer}.param_groups for p in group["params"]]'
    if setup.call is None or setup.call[0] is not source:
        return groups
    made = setup.call[1]
    given = made.args[0] if made.args else next((k.value for k in made.keywords if k.arg == "params"), None)
    if not isinstance(given, ast.Call) or not isinstance(given.func, ast.Attribute) or given.args or given.keywords:
        return groups
    root = next((n for n in ast.walk(given) if isinstance(n, ast.Name)), None)
    # The constructor's argument does not hold parameter groups that are added later.
    if root is None or "add_param_group" in source.text:
        return groups
    if given.func.attr != "parameters" or not _same_name(source, root, step):
        return groups
    return source.code(given)


def _same_name(source: SourceFile, name: ast.Name, use: ast.AST) -> bool:
    """Whether a name means the same at another node: in one function, for `self` in one class, or in the module."""
    here, there = source.scope(name), source.scope(use)
    if name.id == "self":
        classes = [next((p for p in source.parents(n) if isinstance(p, ast.ClassDef)), None) for n in (name, use)]
        return classes[0] is not None and classes[0] is classes[1]
    if here is there:
        return True
    hidden = isinstance(there, Function) and name.id in parameter_names(there)
    return here is source.tree and not hidden


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
