"""Where the number stands that a setting gets: through names, defaults, options, fields and tables to its literal."""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from firstnan.repair.base import Desk
from firstnan.repair.edits import Edit, atom, put
from firstnan.repair.source import Function, Source, number

DEEPEST = 8


@dataclass(frozen=True)
class Spelled:
    """An expression in one of the user's files."""

    source: Source
    node: ast.expr


def literal(desk: Desk, at: Spelled, expected: float | None = None) -> Spelled | None:
    """The literal behind an expression; None where it is computed, or where it is not the `expected` number."""
    seen: set[ast.AST] = set()
    wave = [at]
    for _ in range(DEEPEST):
        for spelled in wave:
            value = number(spelled.node)
            if value is not None and (expected is None or _close(value, expected)):
                return spelled
        seen.update(s.node for s in wave)
        wave = [s for w in wave if number(w.node) is None for s in _behind(desk, w) if s.node not in seen]
    return None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(b) or a == b)


def _behind(desk: Desk, at: Spelled) -> Iterator[Spelled]:
    """What may have given the expression its value, the likeliest first."""
    source, node = at.source, at.node
    if isinstance(node, ast.Name):
        yield from _behind_name(desk, source, node)
    elif isinstance(node, ast.Attribute):
        yield from _members(source, node)
        if isinstance(node.value, ast.Name) and (path := source.imported(node.value.id, node)):
            yield from _in_module(desk, source, path, node.attr)
        for other in _imported_files(desk, source):
            yield from _members(other, node)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield from entries(source, node.slice.value)
        for other in _imported_files(desk, source):
            yield from entries(other, node.slice.value)
    elif isinstance(node, ast.Call):
        called = source.called(node)
        if called in ("float", "int") and node.args:
            yield Spelled(source, node.args[0])
        elif called in (".get", ".pop", "getattr") and node.args:
            key = node.args[1] if called == "getattr" and len(node.args) > 1 else node.args[0]
            if isinstance(key, ast.Constant):
                yield from entries(source, key.value)
            if len(node.args) > 1 and node.args[-1] is not key:
                yield Spelled(source, node.args[-1])
    elif isinstance(node, ast.BoolOp):
        yield from (Spelled(source, v) for v in reversed(node.values))
    elif isinstance(node, ast.IfExp):
        yield from (Spelled(source, v) for v in (node.body, node.orelse))


def _behind_name(desk: Desk, source: Source, node: ast.Name) -> Iterator[Spelled]:
    found = source.assigned(node)
    if found is not None and found.value is not None:
        yield Spelled(source, found.value)
        return
    for function in (f for f in source.parents(node) if isinstance(f, Function)):
        if node.id in _names(function):
            yield from _passed(desk, source, function, node.id)
            return
    for statement in ast.walk(source.tree):
        if not isinstance(source.parent(statement), ast.Module | ast.If | ast.Try):
            continue
        for target, value in _bound(statement):
            if isinstance(target, ast.Name) and target.id == node.id:
                yield Spelled(source, value)
    path = source.imported(node.id, node)
    if path is not None and "." in path:
        yield from _in_module(desk, source, *path.rsplit(".", 1))


def _bound(statement: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names that a statement binds with what each is given, `a, b = 1, 2` taken apart."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=False))
            yield from pairs


def _names(function: Function) -> list[str]:
    given = function.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def _passed(desk: Desk, source: Source, function: Function, name: str) -> Iterator[Spelled]:
    """What the calls of a function hand over for one of its parameters, then its default."""
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    title = getattr(function, "name", "")
    home = source.parent(function)
    method = isinstance(home, ast.ClassDef) and positional[:1] in (["self"], ["cls"])
    title = home.name if isinstance(home, ast.ClassDef) and title == "__init__" else title
    for call in ast.walk(source.tree):
        if not isinstance(call, ast.Call) or not title or source.called(call).rsplit(".", 1)[-1] != title:
            continue
        keyword = next((k.value for k in call.keywords if k.arg == name), None)
        position = positional.index(name) - method if name in positional else -1
        if keyword is not None:
            yield Spelled(source, keyword)
        elif 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
            yield Spelled(source, call.args[position])
        elif any(k.arg is None for k in call.keywords):
            yield from entries(source, name)
    default = default_of(function, name)
    if default is not None:
        yield Spelled(source, default)


def default_of(function: Function, name: str) -> ast.expr | None:
    given = function.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    pairs = [*zip(reversed(positional), reversed(given.defaults), strict=False)]
    pairs += [(a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None]
    return next((d for n, d in pairs if n == name), None)


def _members(source: Source, node: ast.Attribute) -> Iterator[Spelled]:
    """`self.rate`, `args.lr`, `config.lr`: attributes given in this file, options of a parser, fields of a class."""
    for other in ast.walk(source.tree):
        for target, value in _bound(other):
            if isinstance(target, ast.Attribute) and target.attr == node.attr:
                yield Spelled(source, value)
            elif isinstance(source.parent(other), ast.ClassDef) and getattr(target, "id", None) == node.attr:
                yield from _field(source, value)
        if isinstance(other, ast.Call):
            yield from _option(source, other, node.attr)
    yield from entries(source, node.attr)


def _field(source: Source, value: ast.expr) -> Iterator[Spelled]:
    """The default of a field of a dataclass, also inside `field(default=...)`."""
    inside = next((k.value for k in getattr(value, "keywords", ()) if k.arg == "default"), None)
    yield Spelled(source, value if inside is None else inside)


def _option(source: Source, call: ast.Call, name: str) -> Iterator[Spelled]:
    """The default of a command line option (argparse, click), or a keyword of that name (`Config(lr=...)`)."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    flags = [text.lstrip("-").replace("-", "_") for text in texts]
    given = {k.arg: k.value for k in call.keywords}
    destination = given.get("dest")
    if isinstance(destination, ast.Constant):
        flags = [str(destination.value)]
    if name in flags and "default" in given:
        yield Spelled(source, given["default"])
    called = source.called(call).rsplit(".", 1)[-1]
    if name in given and (called[:1].isupper() or called in ("dict", "set_defaults", "Namespace", "replace")):
        yield Spelled(source, given[name])


def entries(source: Source, key: object) -> Iterator[Spelled]:
    """The values of that key in the tables of the file: `{"lr": 0.1}`, `dict(lr=0.1)`, `config["lr"] = 0.1`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Dict):
            for k, value in zip(node.keys, node.values, strict=True):
                if isinstance(k, ast.Constant) and k.value == key:
                    yield Spelled(source, value)
        elif isinstance(node, ast.Call) and source.called(node) == "dict":
            yield from (Spelled(source, k.value) for k in node.keywords if k.arg == key)
        else:
            for target, value in _bound(node):
                at = target.slice if isinstance(target, ast.Subscript) else None
                if isinstance(at, ast.Constant) and at.value == key and not isinstance(value, ast.Subscript):
                    yield Spelled(source, value)


def _in_module(desk: Desk, source: Source, module: str, name: str) -> Iterator[Spelled]:
    """A name of another file of the user's, beside this one."""
    other = _beside(desk, source, module)
    for statement in other.tree.body if other is not None else ():
        for target, value in _bound(statement):
            if isinstance(target, ast.Name) and target.id == name and other is not None:
                yield Spelled(other, value)


def _beside(desk: Desk, source: Source, module: str) -> Source | None:
    here = os.path.dirname(source.file)
    path = os.path.join(here, *module.split("."))
    return next((s for p in (f"{path}.py", os.path.join(path, "__init__.py")) if (s := desk.source(p))), None)


def _imported_files(desk: Desk, source: Source) -> list[Source]:
    """The user's other files that this one imports from its own folder."""
    names: list[str] = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    found = [_beside(desk, source, n) for n in dict.fromkeys(names)]
    return [s for s in found if s is not None and s is not source]


def times(desk: Desk, at: Spelled, factor: float, expected: float | None = None) -> tuple[Edit, float | None]:
    """The expression made smaller (or larger): its literal where it stands, else a factor behind it."""
    found = literal(desk, at, expected)
    if found is not None:
        value = (number(found.node) or 0.0) * factor
        return put(found.source, found.node, written(value)), value
    return put(at.source, at.node, f"{atom(at.source, at.node)} * {written(factor)}"), None


def replaced(desk: Desk, at: Spelled, value: float, expected: float | None = None) -> Edit:
    """Another number in place of the expression: its literal where it stands, else the expression itself."""
    found = literal(desk, at, expected) or at
    return put(found.source, found.node, written(value))


def written(value: float) -> str:
    """A number as a person would write it."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        plain = f"{value:.6g}"
        return plain if "." in plain else f"{plain}.0"
    mantissa, _, exponent = f"{value:.5e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
