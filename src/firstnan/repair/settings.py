"""Training settings: the learning rate and its schedule, clipped gradients, a larger eps."""

from __future__ import annotations

import ast
import math
import statistics
from collections.abc import Iterator
from functools import cached_property

from firstnan.diagnose.rules.base import RATE_ROSE, Growth
from firstnan.records import Edit, OptimizerHistory, Remedy
from firstnan.records.operator_families import words
from firstnan.repair.context import FailureContext, Location, SourceFiles, remedies_for
from firstnan.repair.literals import (
    default_of,
    dictionary_values,
    find_literal,
    format_number,
    nonfinite_constants,
    replace_number,
    scale_number,
)
from firstnan.repair.rates import (
    RATES,
    RateSetter,
    assigned_rates,
    function_at,
    is_computed,
    is_rate,
    manual_rates,
    returned,
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


_MOST_EVENTS = 20_000
"""Operators of the step whose files are looked up."""
_MOST_FILES = 40


class OptimizerSetup:
    """The optimizer of a failing step in the user's source."""

    def __init__(self, context: FailureContext) -> None:
        self.context = context
        self.history: OptimizerHistory = context.failure.history
        if context.cause.slug == "divergence_lr":
            self.history = context.failure.diverging
        self.settings = dict(self.history.settings)

    @cached_property
    def sources(self) -> list[SourceFile]:
        """The files that take part in the failing step, each once."""
        h, origin = self.history, self.context.failure.origin
        sites = [s for s in (h.stepped_at, h.backward_at, h.made_at, origin.site) if s is not None]
        found = [self.context.files.get(name) for name in dict.fromkeys(s.file for s in sites)]
        return [s for s in found if s is not None]

    @cached_property
    def surroundings(self) -> list[SourceFile]:
        """These files, then those of the step's operators, then those that are imported by them, and by these."""
        events = self.context.failure.trace.events[:_MOST_EVENTS]
        names = dict.fromkeys(e.site.file for e in events if e.site is not None)
        found = list(dict.fromkeys([*self.sources, *filter(None, map(self.context.files.get, names))]))
        for source in found:  # which grows
            if len(found) < _MOST_FILES:
                found += [other for other in self.context.files.imported(source) if other not in found]
        return found

    @cached_property
    def call(self) -> tuple[SourceFile, ast.Call] | None:
        """The call that creates the optimizer."""
        location = self.context.location_of(self.history.made_at)
        if location is not None and isinstance(location.node, ast.Call):
            return location.source, location.node
        name = self.history.optimizer
        calls = [(s, c) for s in self.sources if name for c in s.calls if s.called_name(c) == name]
        if len(calls) > 1:  # not the first of its class, but the one with this learning rate
            calls = [(s, c) for s, c in calls if self._has_its_rate(s, c)]
        return calls[0] if len(calls) == 1 else None

    def _has_its_rate(self, source: SourceFile, call: ast.Call) -> bool:
        lr = self.settings.get("initial_lr", self.settings.get("lr"))
        given = rate_of(call)
        if given is None or not isinstance(lr, int | float):
            return False
        return find_literal(self.context.files, Location(source, given), float(lr)) is not None

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

    @property
    def is_constructor(self) -> bool:
        """Whether the call is the optimizer's own constructor, not a framework's function that makes one."""
        return self.call is not None and self.call[0].called_name(self.call[1]) == self.history.optimizer

    def takes(self, name: str) -> bool:
        """Whether the constructor is one of torch's that has this keyword argument."""
        if self.call is None or name not in self.settings:
            return False
        source, call = self.call
        return self.is_constructor and self._own_setting(source, call, (name,)) is None

    @cached_property
    def setters(self) -> list[RateSetter]:
        """The expressions that the program itself assigns to the learning rate, or updates its weights with."""
        site = self.history.rate_set_at
        known = [site.file] if site is not None else []
        if not self.history.optimizer:
            return manual_rates(self.context.files, [*known, *(s.file for s in self.sources)])
        found = assigned_rates(self.context.files, [*known, *(s.file for s in self.sources)], self.history.name)
        same = [s for s in found if site is not None and (s.site.file, s.site.line) == (site.file, site.line)]
        return same if site is not None else []

    @cached_property
    def schedule(self) -> tuple[SourceFile, Function] | None:
        """The function that computes the factor of a schedule."""
        site = self.history.rate_set_at
        source = self.context.files.get(site.file) if site is not None else None
        function = function_at(source, site.line) if source is not None and site is not None else None
        return (source, function) if source is not None and function is not None else None

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


@remedies_for("overflow", "exp_overflow", "exploding_gradient", "divergence_lr")
def line_search(context: FailureContext) -> Iterator[Remedy]:
    """A line search for LBFGS, which otherwise takes steps of full length whatever the loss becomes."""
    setup = OptimizerSetup(context)
    if setup.call is None or setup.history.optimizer != "LBFGS" or setup.settings.get("line_search_fn"):
        return
    source, call = setup.call
    if source.called_name(call) == "LBFGS":
        quote = max("\"'", key=source.text.count)
        why = (
            "LBFGS without a line search takes its steps in full, even where the loss explodes. This one shortens them."
        )
        edit = set_argument(source, call, "line_search_fn", f"{quote}strong_wolfe{quote}")
        yield context.remedy("Let LBFGS search along its direction", why, edit, kind="setting")


_NO_STEPS = "A schedule without steps divides by 0."
_MEASURES = words("max min amax amin mean median std var norm sum abs item")
"""What these return is seldom a number of steps."""
PEAKS = {"OneCycleLR": 1, "CyclicLR": 2}
"""Schedules with a peak, and its position among their arguments."""


@remedies_for("nan_lr")
def guarded_schedule(context: FailureContext) -> Iterator[Remedy]:
    """A guard in the expression that computes the learning rate."""
    for at in _schedules(OptimizerSetup(context)):
        for node in ast.walk(at.node):
            found = _guard(at.source, node)
            if found is not None:
                inner, text, why = found
                title = f"Keep `{' '.join(at.code(inner).split())}` in range"
                yield context.remedy(title, why, replace_node(at.source, inner, text), kind="setting")


@remedies_for("nan_lr")
def guarded_denominators(context: FailureContext) -> Iterator[Remedy]:
    """The same guard at every use of a denominator in a function that computes the rate."""
    scopes = {at.source.scope(at.node): at.source for at in _schedules(OptimizerSetup(context))}
    for scope, source in scopes.items():
        if scope is source.tree:
            continue
        inside = list(ast.walk(scope))
        below = [n.right for n in inside if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div)]
        for name in dict.fromkeys(ast.unparse(b) for b in below if isinstance(b, ast.Name | ast.Attribute)):
            uses = [n for n in inside if isinstance(n, ast.Name | ast.Attribute) and ast.unparse(n) == name]
            reads = [n for n in uses if isinstance(n.ctx, ast.Load)]
            if len(reads) < 2 or len(reads) < len(uses):
                continue
            edits = [replace_node(source, n, f"max({name}, 1)") for n in reads]
            yield context.remedy(f"Use at least 1 for `{name}`", _NO_STEPS, *edits, kind="setting")


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


def _schedules(setup: OptimizerSetup) -> list[Location[ast.expr]]:
    """The expressions that a schedule returns, and those assigned to `group["lr"]`, each once.

    A schedule is often in a separate file, which the step does not pass through."""
    files, site = setup.context.files, setup.history.rate_set_at
    beside = files.get(site.file) if site is not None else None
    sources = list(dict.fromkeys([*([beside] if beside is not None else []), *setup.sources]))
    sources += [s for s in dict.fromkeys(i for s in sources for i in files.imported(s)) if s not in sources]
    found = [at for source in sources for at in _schedules_in(files, source, sources)]
    if setup.schedule is not None:
        source, function = setup.schedule
        found = [*(Location(source, e) for e in _returned(function)), *found]
    return list({at.node: at for at in found}.values())


def _schedules_in(files: SourceFiles, source: SourceFile, sources: list[SourceFile]) -> Iterator[Location[ast.expr]]:
    def computed_by(node: ast.expr) -> Iterator[Location[ast.expr]]:
        inside = [n for n in ast.walk(node) if isinstance(n, ast.Call) and n is not node]  # `schedule(step).item()`
        for at in (at for n in (node, *inside) for at in _functions(source, sources, n)):
            yield from (Location(at.source, e) for e in _returned(at.node))

    for call in (c for kind in ("LambdaLR", "MultiplicativeLR") for c in source.calls if kind in source.called(c)):
        given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "lr_lambda")]
        for function in given:
            yield from computed_by(function)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and any(is_rate(t) for t in node.targets):
            yield Location(source, node.value)
            # `group["lr"] = schedule(step)`, or a name assigned before
            yield from computed_by(node.value)
            for value in _assigned_values(source, node.value):
                yield Location(source, value)
                yield from computed_by(value)
    for setter in assigned_rates(files, [source.file], ""):  # `set_rate(opt, schedule(step))`
        if isinstance(setter.at.node, ast.Call):
            for value in (setter.value.node, *_assigned_values(source, setter.value.node)):
                yield Location(source, value)
                yield from computed_by(value)
    for own in (n for n in source.nodes if isinstance(n, ast.FunctionDef) and n.name == "get_lr"):
        yield from (Location(source, e) for e in _returned(own))


def _assigned_values(source: SourceFile, node: ast.expr) -> Iterator[ast.expr]:
    """What was assigned to the names in an expression, `float(lr)`; in branches, the values of all of them."""
    for name in (n for n in ast.walk(node) if isinstance(n, ast.Name)):
        value = source.value(name)
        if value is not name:
            yield value
            continue
        assigned = (a for a in source.within(name) if isinstance(a, ast.Assign))
        yield from (a.value for a in assigned if any(ast.unparse(t) == name.id for t in a.targets))


def _functions(
    source: SourceFile, sources: list[SourceFile], node: ast.expr, depth: int = 3
) -> Iterator[Location[Function]]:
    """The functions that an expression refers to: a lambda, a name, or what another function returns."""
    if isinstance(node, ast.Lambda):
        yield Location(source, node)
    name = source.called_name(node) if isinstance(node, ast.Call) else getattr(node, "id", None)
    name = node.attr if isinstance(node, ast.Attribute) else name
    for at in sources if depth and name else ():
        for own in (n for n in at.nodes if isinstance(n, ast.FunctionDef) and n.name == name):
            yield Location(at, own)
            for value in _returned(own):
                yield from _functions(at, sources, value, depth - 1)


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
    power = literal_value(given) if expr.op == "pow" and (given := expr.arg(1, "exponent")) is not None else None
    if power is not None and power < 0 and literal_value(first) is None and isinstance(node, ast.BinOp):
        return first, f"max({source.code(first)}, 1)", _NO_STEPS
    if expr.op in ("pow", "sqrt", "log", "log2", "log10") and literal_value(first) is None:
        floor = "0.0" if expr.op in ("pow", "sqrt") else "1e-8"
        why = "After the planned number of steps the argument becomes negative, and the result is not a real number."
        is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not expr.library
        if is_method or (isinstance(node, ast.Call) and expr.library == "torch"):  # neither takes a plain number
            return first, f"{parenthesized(source, first)}.clamp_min({floor})", why
        return first, f"max({source.code(first)}, {floor})", why
    if expr.op == "div" and (below := expr.arg(1, "other")) is not None and literal_value(below) is None:
        if any(isinstance(n, ast.Call) and source.called_name(n) in _MEASURES for n in ast.walk(below)):
            return below, f"max({source.code(below)}, 1e-8)", "Where it is 0, the fraction becomes 0 or very large."
        return below, f"max({source.code(below)}, 1)", _NO_STEPS
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
def capped_rate(context: FailureContext) -> Iterator[Remedy]:
    """A bound on what sets the learning rate, where the program raised it: a rate that was healthy."""
    setup, rise = OptimizerSetup(context), context.failure.rate_rise
    if rise is None and not setup.history.optimizer:
        yield from _bounded_by_hand(context, setup)
    healthy = _healthy_rate(context, rise) if rise is not None else None
    if rise is None or healthy is None:
        return
    raised = f"The program raised it to {rise.last:.3g}"
    limits = [(healthy / 10, "a tenth of the rate at which the loss began to grow"), (healthy, "the rate before that")]
    given = setup.settings.get("lr_at_start")
    if isinstance(given, int | float) and 0 < given <= healthy:
        limits = [
            (float(given), "this is the rate that the optimizer was made with"),
            (healthy, "the last healthy rate"),
        ]
    for limit, why in limits:
        edits = _bounded(setup, limit)
        if edits:
            title = f"Keep the learning rate at {format_number(limit)} or below"
            yield context.remedy(title, f"{raised}; {why}.", *edits, kind="setting")


def _bounded_by_hand(context: FailureContext, setup: OptimizerSetup) -> Iterator[Remedy]:
    """A bound on the rate of an update by hand whose rates are not known: at the number that it began with."""
    setter, rate = next(iter(setup.setters), None), context.failure.lr()
    if setter is None or rate is None or not is_computed(setter.value):
        return
    found = find_literal(context.files, setter.value)
    value = literal_value(found.node) if found is not None else None
    if value is not None and 0 < value <= rate / RATE_ROSE:
        source, node = setter.value.source, setter.value.node
        limit = format_number(value)
        yield context.remedy(
            f"Keep the learning rate at {limit} or below",
            f"The program raised it from {limit} to {rate:.3g}.",
            replace_node(source, node, f"min({source.code(node)}, {limit})"),
            kind="setting",
        )


def _healthy_rate(context: FailureContext, rise: Growth) -> float | None:
    """The greatest rate of the steps before anything grew, with two digits."""
    history, growth = context.failure.diverging, context.failure.growth
    last = growth.first_step if growth is not None else rise.first_step
    rates = [s.lr for s in history.steps if s.lr is not None and math.isfinite(s.lr) and s.step <= last]
    greatest = max((r for r in rates if r > 0), default=None)
    if greatest is None:
        return None
    unit = 10.0 ** (math.floor(math.log10(greatest)) - 1)
    return math.floor(greatest / unit * (1 + 1e-9)) * unit


def _bounded(setup: OptimizerSetup, limit: float) -> list[Edit]:
    """The edits that keep the rate at a limit, wherever it is set."""
    for setter in setup.setters[:1]:
        source, node, statement = setter.value.source, setter.value.node, setter.at.node
        if isinstance(statement, ast.AugAssign) and is_rate(statement.target):
            target, operator = source.code(statement.target), _symbol(statement.op)
            bounded = f"{target} = min({target} {operator} {parenthesized(source, node)}, {format_number(limit)})"
            return [source.edit(*source.span(statement), bounded)] if operator else []
        return [replace_node(source, node, f"min({source.code(node)}, {format_number(limit)})")]
    initial = setup.settings.get("initial_lr")
    if setup.schedule is None or not isinstance(initial, int | float) or not initial:
        return []
    source, function = setup.schedule
    if getattr(function, "name", "") == "get_lr":  # it returns a list of rates, one for each group
        rates = [e.elt for e in returned(function) if isinstance(e, ast.ListComp)]
        return [replace_node(source, r, f"min({source.code(r)}, {format_number(limit)})") for r in rates]
    factor = format_number(limit / initial)
    return [replace_node(source, end, f"min({source.code(end)}, {factor})") for end in returned(function)]


def _symbol(operator: ast.operator) -> str:
    return {ast.Mult: "*", ast.Div: "/", ast.Add: "+", ast.Sub: "-"}.get(type(operator), "")


@remedies_for("divergence_lr")
def inverted_factor(context: FailureContext) -> Iterator[Remedy]:
    """A schedule that multiplies the rate by more than 1: the inverse, which lowers it."""
    if context.failure.rate_rise is None:
        return
    setup = OptimizerSetup(context)
    location = context.location_of(setup.history.rate_set_at)
    if location is not None and isinstance(location.node, ast.AugAssign):
        yield from _inverted_update(context, location.source, location.node)
    call = location.node if location is not None and isinstance(location.node, ast.Call) else None
    for name in ("gamma", "factor", "end_factor"):
        given = next((k.value for k in call.keywords if k.arg == name), None) if call is not None else None
        found = find_literal(context.files, Location(location.source, given)) if location and given else None
        value = literal_value(found.node) if found is not None else None
        if found is not None and value is not None and value > 1:
            inverse = format_number(1 / value)
            why = f"{name}={format_number(value)} raises the learning rate each time; {inverse} lowers it."
            edit = replace_node(found.source, found.node, inverse)
            yield context.remedy(f"Use {name}={inverse}", why, edit, kind="setting")


def _inverted_update(context: FailureContext, source: SourceFile, update: ast.AugAssign) -> Iterator[Remedy]:
    """`lr *= 0.25` for `lr /= 0.25`."""
    value = literal_value(update.value)
    if value is None or value <= 0 or not isinstance(update.op, ast.Mult | ast.Div):
        return
    factor = value if isinstance(update.op, ast.Mult) else 1 / value
    if factor > 1:
        new = f"{source.code(update.target)} *= {format_number(1 / factor)}"
        why = f"`{source.code(update)}` raises the learning rate each time; this lowers it."
        yield context.remedy(f"Use `{new}`", why, source.edit(*source.span(update), new), kind="setting")


FACTORS = (0.1, 0.01, 0.001)
_BEFORE = (
    " The program has trained with another optimizer before, which may have its rate from the same place: then lower"
    " only the rate of this run."
)
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
        why = "Steps of this size overshoot, so the error grows from step to step; smaller steps do not."
        if setup.history.first_step:  # a search for the best rate, folds, or stages
            why += _BEFORE
        if edits:
            yield context.remedy(title, why, *edits, kind="setting")


def _slower(setup: OptimizerSetup, factor: float) -> tuple[list[Edit], float | None]:
    context, lr = setup.context, setup.settings.get("initial_lr", setup.settings.get("lr"))
    expected = float(lr) if isinstance(lr, int | float) else None
    for setter in setup.setters:  # what is in use: the constructor's rate is overwritten, or there is none
        statement = setter.at.node
        if isinstance(statement, ast.AugAssign) and is_rate(statement.target):
            continue
        constant = expected if setup.history.optimizer else context.failure.lr()
        constant = constant if context.failure.rate_rise is None else None
        if is_computed(setter.value):
            source, node = setter.value.source, setter.value.node
            return [replace_node(source, node, f"{parenthesized(source, node)} * {format_number(factor)}")], None
        edit, value = scale_number(context.files, setter.value, factor, constant)
        return [edit], value
    if setup.call is None:
        return _written_rate(setup, factor, expected)
    source, call = setup.call
    rate = setup.setting(*RATES, position=1)
    if rate is not None and rate.node in call.args and not setup.is_constructor:  # `net.fit(x, y)`
        rate = rate if expected is not None and find_literal(context.files, rate, expected) else None
    if rate is not None and expected is not None and find_literal(context.files, rate, expected) is None:
        elsewhere = _written_rate(setup, factor, expected)  # something else has set the rate since
        if elsewhere[0]:
            return elsewhere
    groups = _groups(source, call)
    edits = [scale_number(context.files, g, factor)[0] for g in groups]
    if rate is not None and not _is_shared(setup, rate):
        edit, value = scale_number(context.files, rate, factor, None if groups else expected)
        return [edit, *edits], value
    if rate is not None:
        text = f"{parenthesized(source, rate.node)} * {format_number(factor)}"
        return [replace_node(rate.source, rate.node, text), *edits], expected * factor if expected else None
    if expected is not None and setup.takes("lr"):
        return [set_argument(source, call, "lr", format_number(expected * factor)), *edits], expected * factor
    edits = edits or _groups_afterwards(source, call, factor)
    return (edits, None) if edits else _written_rate(setup, factor, expected)


def _written_rate(setup: OptimizerSetup, factor: float, expected: float | None) -> tuple[list[Edit], float | None]:
    """A smaller rate where the program gives it to a framework, which makes the optimizer: `Arguments(lr=0.1)`."""
    if expected is None:
        return [], None
    files = setup.context.files
    sources = dict.fromkeys(s for one in setup.sources for s in (one, *files.imported(one)))
    given = [Location(s, k.value) for s in sources for c in s.calls for k in c.keywords if _is_rate_name(k.arg)]
    given += [v for s in sources for name in RATES for v in dictionary_values(s, name)]
    numbers = {found.node: found for at in given if (found := find_literal(files, at, expected)) is not None}
    if len(numbers) != 1:
        return [], None
    edit, value = scale_number(files, next(iter(numbers.values())), factor, expected)
    return [edit], value


def _is_rate_name(name: str | None) -> bool:
    """Also of an option that is passed on, and of one rate of several: `optimizer__lr`, `swa_lrs`."""
    one = (name or "").removesuffix("s")
    return one in RATES or one.endswith(("_lr", "_learning_rate", *(f"__{rate}" for rate in RATES)))


def rate_of(call: ast.Call) -> ast.expr | None:
    """The learning rate among the arguments of an optimizer's constructor."""
    given = next((k.value for k in call.keywords if k.arg in RATES), None)
    return given if given is not None else call.args[1] if len(call.args) > 1 else None


def _is_shared(setup: OptimizerSetup, rate: Location[ast.expr]) -> bool:
    """Whether another optimizer has its rate from the same name: a change of its number would change both."""
    if setup.call is None or not isinstance(rate.node, ast.Name | ast.Attribute):
        return False
    source, own = setup.call
    kind = source.called(own)
    others = [
        c for c in source.calls if c is not own and source.called(c).rpartition(".")[0] == kind.rpartition(".")[0]
    ]
    wanted = ast.unparse(rate.node)
    rates = [given for c in others if source.called_name(c)[:1].isupper() and (given := rate_of(c)) is not None]
    read = {ast.unparse(n) for given in rates for n in ast.walk(given) if isinstance(n, ast.Name | ast.Attribute)}
    return wanted in read


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
