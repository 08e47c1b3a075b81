"""Training settings: a smaller step, clipped gradients, an eps that is there, a schedule that stays a number."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from firstnan.records import Remedy
from firstnan.remedies.base import Job, remedy
from firstnan.remedies.edits import Edit, after, argument, atom, before, put
from firstnan.remedies.numbers import Spelled, entries, literal, replaced, times, written
from firstnan.remedies.source import Function, Source, number

RATES = ("lr", "learning_rate", "rate", "step_size", "eta")
UPDATES = ("add_", "sub_", "addcdiv_", "addcmul_")
SMALLER = (0.1, 0.01, 0.001)
EPS = {"float16": 1e-4, "bfloat16": 1e-6}
GENTLE = 1.0
"""The norm that gradients are cut to where the run gives no better one; the value of most published recipes."""


class Setup:
    """The optimizer of a failure as the source shows it."""

    def __init__(self, job: Job) -> None:
        self.job, self.history = job, job.scene.history
        self.settings = dict(self.history.settings)

    @cached_property
    def files(self) -> list[Source]:
        """Where to look where a place was not recorded: files that take part in this step, each once."""
        h, origin = self.history, self.job.scene.origin
        sites = [s for s in (h.stepped_at, h.backward_at, h.made_at, origin.site) if s is not None]
        found = [self.job.desk.source(name) for name in dict.fromkeys(s.file for s in sites)]
        return [s for s in found if s is not None]

    @cached_property
    def call(self) -> tuple[Source, ast.Call] | None:
        """The call that makes the optimizer."""
        place = self.job.place_of(self.history.made_at)
        if place is not None and isinstance(place.node, ast.Call):
            return place.source, place.node
        name = self.history.optimizer
        for source in self.files if name else ():
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call) and source.called(node).rsplit(".", 1)[-1] == name:
                    return source, node
        return None

    def setting(self, *names: str, position: int | None = None) -> Spelled | None:
        """The argument of the constructor that gives one of the optimizer's numbers."""
        if self.call is None:
            return None
        source, call = self.call
        given = next((k.value for k in call.keywords if k.arg in names), None)
        if given is None and position is not None and position < len(call.args):
            given = call.args[position]
        if given is not None:
            return Spelled(source, given)
        if any(k.arg is None for k in call.keywords):
            return next((s for name in names for s in entries(source, name)), None)
        return self._default(source, call, names)

    def _default(self, source: Source, call: ast.Call, names: tuple[str, ...]) -> Spelled | None:
        """The default of the user's own optimizer class, or what a call hands over by position."""
        own = next((n for n in ast.walk(source.tree) if isinstance(n, ast.ClassDef) and n.name == self._title), None)
        made = [f for f in own.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"] if own else []
        for function in made:
            parameters = [a.arg for a in function.args.args[1:]]
            defaults = function.args.defaults
            for name in (n for n in names if n in parameters):
                at = parameters.index(name)
                if at < len(call.args):
                    return Spelled(source, call.args[at])
                if (missing := len(parameters) - len(defaults)) <= at:
                    return Spelled(source, defaults[at - missing])
        return None

    @property
    def _title(self) -> str:
        return self.history.optimizer

    def takes(self, name: str) -> bool:
        """The constructor is torch's own, which takes this setting by name."""
        if self.call is None or name not in self.settings:
            return False
        source, call = self.call
        return source.called(call).rsplit(".", 1)[-1] == self._title and self._default(source, call, (name,)) is None

    @cached_property
    def step(self) -> tuple[Source, ast.Call] | None:
        """The call of `step`: the one recorded, else the one behind the recorded backward."""
        place = self.job.place_of(self.history.stepped_at)
        if place is not None and _is_step(place.node):
            assert isinstance(place.node, ast.Call)
            return place.source, place.node
        backward = self.job.place_of(self.history.backward_at)
        if backward is None:
            return None
        line = backward.source.statement(backward.node).lineno
        calls = [n for n in ast.walk(backward.source.scope(backward.node)) if isinstance(n, ast.Call) and _is_step(n)]
        later = [c for c in calls if c.lineno >= line and "sched" not in backward.source.code(c)]
        return (backward.source, min(later, key=lambda c: c.lineno)) if later else None


def _is_step(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def ahead(source: Source, node: ast.AST, *lines: str) -> Edit:
    """New statements in front of the node's; on the same line where others stand before it there."""
    statement = source.statement(node)
    start = source.span(statement)[0]
    if source.text[source.line_start(statement.lineno) : start].strip():
        return Edit(source, start, start, "; ".join(lines) + "; ")
    return before(source, node, *lines)


# --- the step size ----------------------------------------------------------------------------------------------


@remedy("divergence_lr")
def smaller_rate(job: Job) -> Iterator[Remedy]:
    """A tenth, a hundredth, a thousandth of the learning rate."""
    setup = Setup(job)
    for factor in SMALLER:
        edits, value = _slower(setup, factor)
        if edits:
            to = f" {written(value)}" if value is not None else f" {written(factor)} times what it was"
            yield job.remedy(
                f"Learning rate{to}",
                "Every step overshot and made the next gradient larger; a smaller step does not.",
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


def clip(setup: Setup, norm: float) -> Edit | None:
    """The call of `clip_grad_norm_` in front of the step; with a gradient scaler behind its `unscale_`."""
    if setup.step is None:
        return None
    source, call = setup.step
    optimizer, scaler = stepped(source, call)
    scope = source.scope(call)
    if optimizer is None or (call.args and scaler is None):  # a closure computes the gradients inside the step
        return None
    calls = [n for n in ast.walk(scope) if isinstance(n, ast.Call)]
    if any(source.called(n).endswith(("clip_grad_norm_", "clip_grad_value_")) for n in calls):
        return None
    function = source.spell("torch.nn.utils.clip_grad_norm_", call)
    lines = [f"{function}({parameters(setup, source, call, optimizer)}, {written(norm)})"]
    if scaler is not None and not any(source.called(n) == ".unscale_" for n in calls):
        lines.insert(0, f"{scaler}.unscale_({optimizer})")
    return ahead(source, call, *lines)


def stepped(source: Source, call: ast.Call) -> tuple[str | None, str | None]:
    """The optimizer of a `step` call as it is written there, and the gradient scaler if one makes the step."""
    assert isinstance(call.func, ast.Attribute)
    if call.args and isinstance(call.args[0], ast.Name | ast.Attribute) and "scaler" in source.code(call.func).lower():
        return source.code(call.args[0]), source.code(call.func.value)
    plain = isinstance(call.func.value, ast.Name | ast.Attribute | ast.Subscript)
    return (source.code(call.func.value) if plain else None), None


def parameters(setup: Setup, source: Source, step: ast.Call, optimizer: str) -> str:
    """What the optimizer was given, where that can be written at the step too; else what it holds."""
    held = f'[p for group in {optimizer}.param_groups for p in group["params"]]'
    if setup.call is None or setup.call[0] is not source:
        return held
    made = setup.call[1]
    given = made.args[0] if made.args else next((k.value for k in made.keywords if k.arg == "params"), None)
    if not isinstance(given, ast.Call) or not isinstance(given.func, ast.Attribute) or given.args or given.keywords:
        return held
    root = next((n for n in ast.walk(given) if isinstance(n, ast.Name)), None)
    # Groups that join later are no part of what the constructor was given.
    if root is None or "add_param_group" in source.text:
        return held
    if given.func.attr != "parameters" or not _same_name(source, root, step):
        return held
    return source.code(given)


def _same_name(source: Source, name: ast.Name, use: ast.AST) -> bool:
    """Whether a name means the same at another place: one function, one class for `self`, or the module's."""
    here, there = source.scope(name), source.scope(use)
    if name.id == "self":
        classes = [next((p for p in source.parents(n) if isinstance(p, ast.ClassDef)), None) for n in (name, use)]
        return classes[0] is not None and classes[0] is classes[1]
    if here is there:
        return True
    hidden = isinstance(there, Function) and name.id in {a.arg for a in there.args.args}
    return here is source.tree and not hidden


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
    guarded = f"{atom(place.source, below)} + {written(eps)}"
    yield job.remedy(f"Add {written(eps)} to the denominator", why, put(place.source, below, guarded))
    clamped = f"{atom(place.source, below)}.clamp_min({written(eps)})"
    yield job.remedy(f"Denominator at least {written(eps)}", why, put(place.source, below, clamped))


# --- schedules ---------------------------------------------------------------------------------------------------


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
