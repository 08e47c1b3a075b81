"""How the program trains, as its source shows it: where the optimizer is created, and where it steps."""

from __future__ import annotations

import ast
from functools import cached_property

from firstnan.records import Edit
from firstnan.repair.context import FailureContext, Location
from firstnan.repair.literals import default_of, dictionary_values, format_number
from firstnan.repair.source import Function, SourceFile, insert_before, parameter_names


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
