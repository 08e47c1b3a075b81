"""How the program trains, as its source shows it: the call that makes the optimizer, the one that steps it."""

from __future__ import annotations

import ast
from functools import cached_property

from firstnan.repair.base import Job
from firstnan.repair.edits import Edit, before
from firstnan.repair.numbers import Spelled, entries, written
from firstnan.repair.source import Function, Source


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
