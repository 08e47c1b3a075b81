"""What sets the learning rate in the source: assignments to parameter groups, schedules, updates written by hand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from firstnan.records import Site
from firstnan.repair.context import Location, SourceFiles
from firstnan.repair.source import Function, SourceFile, parameter_names

RATES = ("lr", "learning_rate", "rate", "step_size", "eta", "stepsize", "learningrate")
UPDATES = ("add_", "sub_", "addcdiv_", "addcmul_")
_ASSIGNS_RATE = r"""["']lr["']\s*\][\s\\)]*([-+*/%@&|^]|//|\*\*|>>|<<)?=(?!=)"""
"""The text of every assignment that `_owner` looks for."""


@dataclass(frozen=True)
class RateSetter:
    """An expression whose value is the learning rate, and the statement or call that puts it to use."""

    at: Location[ast.AST]
    value: Location[ast.expr]

    @property
    def site(self) -> Site:
        """Its place in source."""
        source, node = self.at.source, self.at.node
        statement = source.statement(node)
        lines = tuple(source.line(n) for n in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
        function = source.function(node)
        name = getattr(function, "name", "<lambda>") if function is not None else "<module>"
        first, last = source.span(node)
        place = source.edit(first, last, "")
        return Site(
            source.file,
            place.line,
            place.column,
            place.end_line,
            place.end_column,
            name,
            " ".join(source.code(node).split()),
            lines[:8],
            statement.lineno,
        )


def assigned_rates(files: SourceFiles, names: Iterable[str], optimizer: str) -> list[RateSetter]:
    """The assignments to `group["lr"]` in these files that may concern the optimizer, by what it is called."""
    names, found = list(names), list[tuple[int, RateSetter]]()
    for source in files.with_text(names, _ASSIGNS_RATE):
        for node in source.statements:
            owner = _owner(source, node)
            if owner is not None and isinstance(node, ast.Assign | ast.AugAssign):
                setter = RateSetter(Location(source, node), Location(source, node.value))
                found += _through_callers(files, names, setter, owner, optimizer)
    best = min((fit for fit, _ in found), default=0)
    return [setter for fit, setter in found if fit == best]


def _owner(source: SourceFile, node: ast.AST) -> str | None:
    """The optimizer whose groups an assignment gives a rate: `opt` of `opt.param_groups[0]["lr"] = rate`.

    Empty if it is not seen; None if the node is not such an assignment.
    """
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    for target in targets:
        if is_rate(target) and isinstance(target, ast.Subscript):
            owner = _owner_in(source, target.value)
            if owner is None and isinstance(target.value, ast.Name):
                loops = [p for p in source.parents(node) if isinstance(p, ast.For)]
                bound = [p.iter for p in loops if target.value.id in _names(p.target)]
                owner = _owner_in(source, bound[0]) if bound else None
                if owner is None and "group" in target.value.id:
                    owner = ""
            if owner is not None:
                return owner
    return None


def is_rate(node: ast.expr) -> bool:
    """Whether this is `...["lr"]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "lr"


def _owner_in(source: SourceFile, node: ast.AST) -> str | None:
    groups = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "param_groups"]
    return source.code(groups[0].value) if groups else None


def _names(target: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}


def _through_callers(
    files: SourceFiles, names: list[str], setter: RateSetter, owner: str, optimizer: str
) -> Iterator[tuple[int, RateSetter]]:
    """How well an assignment fits the optimizer (0 is best); one in a function is followed to the calls of it."""
    source, function = setter.at.source, setter.at.source.function(setter.at.node)
    given = parameter_names(function) if function is not None else set()
    if owner in given and isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        sources = files.with_text(names, re.escape(function.name))
        calls = [(s, c) for s in sources for c in s.calls if s.called_name(c) == function.name]
        for other, call in calls[:8]:
            passed = _passed(function, call)
            fit = _fit(other.code(passed[owner]) if owner in passed else "", optimizer)
            value = source.value(setter.value.node)
            name = value.id if isinstance(value, ast.Name) else ""
            if name in passed and name in given:
                yield fit, RateSetter(Location(other, call), Location(other, passed[name]))
            else:
                yield fit, setter
        if calls:
            return
    yield _fit(owner, optimizer), setter


def _passed(function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """The arguments of a call by the names that they have in the function."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute) else names
    return {**dict(zip(names, call.args, strict=False)), **{k.arg: k.value for k in call.keywords if k.arg}}


def _fit(owner: str, optimizer: str) -> int:
    if not owner or not optimizer:
        return 1
    if owner == optimizer:
        return 0
    return 1 if owner.rpartition(".")[2] == optimizer.rpartition(".")[2] else 2


# --- functions of schedules --------------------------------------------------------------------------------------


def schedule_calls(files: SourceFiles, names: Iterable[str], kinds: set[str]) -> list[RateSetter]:
    """The calls that make schedules of these classes."""
    sources = files.with_text(names, "|".join(map(re.escape, kinds)))
    calls = [(s, c) for s in sources for c in s.calls if s.called_name(c) in kinds]
    return [RateSetter(Location(s, c), Location(s, c)) for s, c in calls]


def function_at(source: SourceFile, line: int) -> Function | None:
    """The function, or lambda, that begins on this line."""
    found = [n for n in source.nodes if isinstance(n, Function)]
    decorated = [n for n in found if min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", ()))]) == line]
    return decorated[0] if decorated else None


def returned(function: Function) -> list[ast.expr]:
    """The expressions that a function returns."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value is not None]


# --- updates written by hand -------------------------------------------------------------------------------------


def manual_rates(files: SourceFiles, names: Iterable[str]) -> list[RateSetter]:
    """The learning rates of updates that the program writes itself: `w -= rate * w.grad`."""
    found = []
    for source in files.with_text(names, "|".join(("grad", "data", *UPDATES))):  # each kind of update has one of them
        for node in source.nodes:
            factor = _update_factor(source, node)
            if factor is not None:
                found.append(RateSetter(Location(source, node), Location(source, factor)))
    return sorted(found, key=_likeness)


def _likeness(setter: RateSetter) -> int:
    """0 for what is called a learning rate, 2 for a number: that may be the weight of a moving average."""
    node = setter.value.node
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    if name.strip("_").lower() in RATES:
        return 0
    return 2 if isinstance(node, ast.Constant) else 1


def is_computed(value: Location[ast.expr]) -> bool:
    """Whether an attribute is also assigned something that is computed: then no literal is its value."""
    node = value.node
    if not isinstance(node, ast.Attribute):
        return False
    given = [n.value for n in value.source.nodes if isinstance(n, ast.Assign) and _assigns(n, node.attr)]
    changed = [n for n in value.source.nodes if isinstance(n, ast.AugAssign) and _is_attribute(n.target, node.attr)]
    return bool(changed) or any(isinstance(v, ast.BinOp | ast.Call | ast.IfExp) for v in given)


def changed_at(setter: RateSetter) -> RateSetter | None:
    """The only statement that multiplies or divides the rate, `lr /= 4`; None if there is none, or several."""
    source, rate = setter.value.source, setter.value.node
    around = (
        source.within(rate) if isinstance(rate, ast.Name) else source.nodes if isinstance(rate, ast.Attribute) else []
    )
    found = [n for n in around if isinstance(n, ast.AugAssign) and source.code(n.target) == source.code(rate)]
    if len(found) != 1 or not isinstance(found[0].op, ast.Mult | ast.Div):
        return None
    return RateSetter(Location(source, found[0]), Location(source, found[0].value))


def _assigns(statement: ast.Assign, name: str) -> bool:
    return any(_is_attribute(target, name) for target in statement.targets)


def _is_attribute(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _update_factor(source: SourceFile, node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub | ast.Add):
        return _factor(node.value) if _writes_weights(source, node, node.target) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UPDATES:
        given = next((k.value for k in node.keywords if k.arg in ("alpha", "value")), None)
        if given is not None:
            return given.operand if isinstance(given, ast.UnaryOp) else given
        if node.args and _writes_weights(source, node, node.func.value):
            return _factor(node.args[0])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and _is_step_of(source, node):
        return _factor(node.right)
    return None


def _is_step_of(source: SourceFile, node: ast.BinOp) -> bool:
    """Whether this is `w - rate * gradient`, with a gradient of the weight or one that `autograd.grad` returned."""
    if any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(node.right)):
        return True
    calls = [c for c in source.calls if source.called(c) in ("torch.autograd.grad", "torch.autograd.functional.vjp")]
    around = [n for n in (source.statement(c) for c in calls) if isinstance(n, ast.Assign)]
    returned_names = {name for n in around for target in n.targets for name in _names(target)}
    bound = _bound_from(source, node, returned_names)
    return isinstance(node.left, ast.Name) and any(name in bound | returned_names for name in _names(node.right))


def _bound_from(source: SourceFile, node: ast.AST, names: set[str]) -> set[str]:
    """The variables of the loops and comprehensions around a node that go through one of these names."""
    found: set[str] = set()
    for around in source.parents(node):
        pairs: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(around, ast.For):
            pairs = [(around.target, around.iter)]
        elif isinstance(around, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp):
            pairs = [(g.target, g.iter) for g in around.generators]
        for target, iterated in pairs:
            if not _names(iterated).isdisjoint(names):
                found |= _names(target)
    return found


def _writes_weights(source: SourceFile, node: ast.AST, target: ast.expr) -> bool:
    around = source.parents(node)
    guarded = [i.context_expr for w in around if isinstance(w, ast.With) for i in w.items]
    guarded += [d for f in around if isinstance(f, ast.FunctionDef) for d in f.decorator_list]
    return "data" in source.code(target) or any("no_grad" in source.code(text) for text in guarded)


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
    computed = [s for s in sides if not _mentions_grad(s) and isinstance(s, ast.Call | ast.BinOp | ast.Subscript)]
    return (plain or computed or [None])[0]
