"""The literal that a setting comes from: through names, defaults, command line options, fields and dictionaries."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator

from firstnan.records import Edit
from firstnan.repair.context import Location, SourceFiles
from firstnan.repair.source import Function, SourceFile, literal_value, parameter_names, parenthesized, replace_node

MOST_LEVELS = 8
NONFINITE = frozenset(f"{module}.{name}" for module in ("math", "torch", "numpy") for name in ("inf", "nan"))


def find_literal(
    files: SourceFiles, at: Location[ast.expr], expected: float | None = None
) -> Location[ast.expr] | None:
    """The literal that gives an expression its value; None if it is computed, or is not the `expected` number."""
    seen: set[ast.AST] = set()
    level = [at]
    for _ in range(MOST_LEVELS):
        for location in level:
            value = literal_value(location.node)
            if value is not None and (expected is None or _close(value, expected)):
                return location
        seen.update(one.node for one in level)
        computed = [one for one in level if literal_value(one.node) is None]
        level = [value for one in computed for value in _assigned(files, one) if value.node not in seen]
    return None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6) or (math.isnan(b) or a == b)


def _assigned(files: SourceFiles, at: Location[ast.expr]) -> Iterator[Location[ast.expr]]:
    """The expressions that may have given this one its value, the likeliest first."""
    source, node = at.source, at.node
    if isinstance(node, ast.Name):
        yield from _assigned_to_name(files, source, node)
    elif isinstance(node, ast.Attribute):
        yield from _members(source, node)
        if isinstance(node.value, ast.Name):
            yield from _in_modules(_imported_modules(files, source, node.value.id), node.attr)
        for other in files.imported(source):
            yield from _members(other, node)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        yield from dictionary_values(source, node.slice.value)
        for other in files.imported(source):
            yield from dictionary_values(other, node.slice.value)
    elif isinstance(node, ast.Call):
        called = source.called(node)
        if called in ("float", "int") and node.args:
            yield Location(source, node.args[0])
        elif called in (".get", ".pop", "getattr") and node.args:
            key = node.args[1] if called == "getattr" and len(node.args) > 1 else node.args[0]
            if isinstance(key, ast.Constant):
                yield from dictionary_values(source, key.value)
            if len(node.args) > 1 and node.args[-1] is not key:
                yield Location(source, node.args[-1])
    elif isinstance(node, ast.BoolOp):
        yield from (Location(source, v) for v in reversed(node.values))
    elif isinstance(node, ast.IfExp):
        yield from (Location(source, v) for v in (node.body, node.orelse))


def _assigned_to_name(files: SourceFiles, source: SourceFile, node: ast.Name) -> Iterator[Location[ast.expr]]:
    found = source.assigned(node)
    if found is not None and found.value is not None:
        yield Location(source, found.value)
        return
    around = source.parents(node)
    loops = [g for n in around for g in getattr(n, "generators", ())] + [n for n in around if isinstance(n, ast.For)]
    for loop in loops:
        parts = list(_turns(source, loop.target, loop.iter, node.id))
        if parts:
            yield from parts
            return
    for function in (f for f in around if isinstance(f, Function)):
        if node.id in parameter_names(function):
            yield from _passed(source, function, node.id)
            return
    for statement in source.nodes:
        if not isinstance(source.parent(statement), ast.Module | ast.If | ast.Try):
            continue
        for target, value in _bound(statement):
            if isinstance(target, ast.Name) and target.id == node.id:
                yield Location(source, value)
    for name, modules in _imported_from(files, source, node.id):
        yield from _in_modules(modules, name)


def _turns(source: SourceFile, target: ast.expr, values: ast.expr, name: str) -> Iterator[Location[ast.expr]]:
    """What a loop over a written list gives to one of its names, turn by turn; also through `zip`."""
    if isinstance(target, ast.Name) and target.id == name and isinstance(values, ast.Tuple | ast.List):
        yield from (Location(source, value) for value in values.elts)
    elif isinstance(target, ast.Tuple) and isinstance(values, ast.Call) and source.called(values) == "zip":
        for part, one in zip(target.elts, values.args, strict=False):
            yield from _turns(source, part, source.value(one), name)
    elif isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple | ast.List):
        for row in (r for r in values.elts if isinstance(r, ast.Tuple | ast.List)):
            parts = zip(target.elts, row.elts, strict=False)
            yield from (Location(source, v) for part, v in parts if isinstance(part, ast.Name) and part.id == name)


def _bound(statement: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with its value; `a, b = 1, 2` has two."""
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        yield statement.target, statement.value
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            pairs = [(target, statement.value)]
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                pairs = list(zip(target.elts, statement.value.elts, strict=False))
            yield from pairs


def _passed(source: SourceFile, function: Function, name: str) -> Iterator[Location[ast.expr]]:
    """The arguments that calls pass for one parameter of a function, then its default."""
    positional = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    called = getattr(function, "name", "")
    home = source.parent(function)
    method = isinstance(home, ast.ClassDef) and positional[:1] in (["self"], ["cls"])
    called = home.name if isinstance(home, ast.ClassDef) and called == "__init__" else called
    for call in (c for c in source.calls if called and source.called_name(c) == called):
        keyword = next((k.value for k in call.keywords if k.arg == name), None)
        position = positional.index(name) - method if name in positional else -1
        if keyword is not None:
            yield Location(source, keyword)
        elif 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
            yield Location(source, call.args[position])
        elif any(k.arg is None for k in call.keywords):
            yield from dictionary_values(source, name)
    default = default_of(function, name)
    if default is not None:
        yield Location(source, default)


def default_of(function: Function, name: str) -> ast.expr | None:
    given = function.args
    positional = [a.arg for a in (*given.posonlyargs, *given.args)]
    pairs = [*zip(reversed(positional), reversed(given.defaults), strict=False)]
    pairs += [(a.arg, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is not None]
    return next((d for n, d in pairs if n == name), None)


def _members(source: SourceFile, node: ast.Attribute) -> Iterator[Location[ast.expr]]:
    """`self.rate`, `args.lr`, `config.lr`: attributes assigned in this file, options of a parser, fields of a class."""
    for other in source.nodes:
        for target, value in _bound(other):
            if isinstance(target, ast.Attribute) and target.attr == node.attr:
                yield Location(source, value)
            elif isinstance(source.parent(other), ast.ClassDef) and getattr(target, "id", None) == node.attr:
                yield from _field(source, value)
        if isinstance(other, ast.Call):
            yield from _option(source, other, node.attr)
    yield from dictionary_values(source, node.attr)


def _field(source: SourceFile, value: ast.expr) -> Iterator[Location[ast.expr]]:
    """The default of a field of a dataclass, also inside `field(default=...)`."""
    inside = next((k.value for k in getattr(value, "keywords", ()) if k.arg == "default"), None)
    yield Location(source, value if inside is None else inside)


def _option(source: SourceFile, call: ast.Call, name: str) -> Iterator[Location[ast.expr]]:
    """The default of a command line option (argparse, click), or a keyword of that name (`Config(lr=...)`)."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    flags = [text.lstrip("-").replace("-", "_") for text in texts]
    given = {k.arg: k.value for k in call.keywords}
    destination = given.get("dest")
    if isinstance(destination, ast.Constant):
        flags = [str(destination.value)]
    if name in flags and "default" in given:
        yield Location(source, given["default"])
    called = source.called_name(call)
    if name in given and (called[:1].isupper() or called in ("dict", "set_defaults", "Namespace", "replace")):
        yield Location(source, given[name])


def dictionary_values(source: SourceFile, key: object) -> Iterator[Location[ast.expr]]:
    """The values of a key in the dictionaries of a file: `{"lr": 0.1}`, `dict(lr=0.1)`, `config["lr"] = 0.1`."""
    for node in source.nodes:
        if isinstance(node, ast.Dict):
            for k, value in zip(node.keys, node.values, strict=True):
                if isinstance(k, ast.Constant) and k.value == key:
                    yield Location(source, value)
        elif isinstance(node, ast.Call) and source.called(node) == "dict":
            yield from (Location(source, k.value) for k in node.keywords if k.arg == key)
        else:
            for target, value in _bound(node):
                at = target.slice if isinstance(target, ast.Subscript) else None
                if isinstance(at, ast.Constant) and at.value == key and not isinstance(value, ast.Subscript):
                    yield Location(source, value)


def _imported_from(files: SourceFiles, source: SourceFile, name: str) -> Iterator[tuple[str, list[SourceFile]]]:
    """What a name stands for that `from module import name` has bound: its name there, and the module."""
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in (a for a in node.names if (a.asname or a.name) == name):
                other = files.module(source, node.module, node.level)
                yield alias.name, [other] if other is not None else []


def _imported_modules(files: SourceFiles, source: SourceFile, name: str) -> list[SourceFile]:
    """The module that a name stands for: `import config`, `from . import config`, `from package import config as c`."""
    found: list[SourceFile | None] = []
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found += [files.module(source, a.name) for a in node.names if (a.asname or a.name) == name]
        elif isinstance(node, ast.ImportFrom):
            before = f"{node.module}." if node.module else ""
            bound = [a.name for a in node.names if (a.asname or a.name) == name]
            found += [files.module(source, before + one, node.level) for one in bound]
    return [other for other in found if other is not None]


def _in_modules(modules: list[SourceFile], name: str) -> Iterator[Location[ast.expr]]:
    """The values of a name in other files."""
    for other in modules:
        for statement in other.tree.body:
            for target, value in _bound(statement):
                if isinstance(target, ast.Name) and target.id == name:
                    yield Location(other, value)


def scale_number(
    files: SourceFiles, at: Location[ast.expr], factor: float, expected: float | None = None
) -> tuple[Edit, float | None]:
    """The expression times a factor: its literal is changed, or the factor is written after it; and the new value."""
    found = find_literal(files, at, expected)
    if found is not None:
        value = (literal_value(found.node) or 0.0) * factor
        return replace_node(found.source, found.node, format_number(value)), value
    return replace_node(at.source, at.node, f"{parenthesized(at.source, at.node)} * {format_number(factor)}"), None


def replace_number(files: SourceFiles, at: Location[ast.expr], value: float, expected: float | None = None) -> Edit:
    """Another number for an expression: its literal is changed, or the expression itself."""
    found = find_literal(files, at, expected) or at
    return replace_node(found.source, found.node, format_number(value))


def format_number(value: float) -> str:
    """A number as a person would write it."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        plain = f"{value:.6g}"
        return plain if "." in plain else f"{plain}.0"
    mantissa, _, exponent = f"{value:.5e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


# --- infinities and NaN ------------------------------------------------------------------------------------------


def nonfinite_constant(source: SourceFile, node: ast.AST) -> float | None:
    """The value of `float("-inf")`, `-math.inf`, `torch.nan`...; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = nonfinite_constant(source, node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float" and node.args:
        text = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        try:
            value = float(text) if isinstance(text, str) else 0.0
        except ValueError:
            return None
        return None if math.isfinite(value) else value
    if isinstance(node, ast.Attribute | ast.Name):
        parts = ast.unparse(node).split(".")
        base = source.imported(parts[0], node)
        full = ".".join([base, *parts[1:]]) if base else ""
        return float(full.rsplit(".", 1)[1]) if full in NONFINITE else None
    return None


def nonfinite_constants(source: SourceFile, root: ast.AST) -> list[tuple[ast.expr, float]]:
    """The outermost such constants below a node, and those assigned to names in it."""
    value = nonfinite_constant(source, root)
    if value is not None and isinstance(root, ast.expr):
        return [(root, value)]
    if isinstance(root, ast.Name | ast.Attribute) and isinstance(root.ctx, ast.Load):
        statement = source.assigned(root)
        given = statement.value if statement is not None else _constant(source, root)
        found = nonfinite_constant(source, given) if given is not None else None
        if given is not None and found is not None:
            return [(given, found)]
    return [pair for child in ast.iter_child_nodes(root) for pair in nonfinite_constants(source, child)]


def _constant(source: SourceFile, name: ast.expr) -> ast.expr | None:
    """The value of a module constant, a class attribute or `self.x` that is assigned only once in the file."""
    text = ast.unparse(name)
    assignments = [n for n in source.nodes if isinstance(n, ast.Assign)]
    given = [a.value for a in assignments if any(ast.unparse(t) == text for t in a.targets)]
    return given[0] if len(given) == 1 else None
