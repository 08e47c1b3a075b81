"""The user's file as text and syntax tree, and edits of it: a span is replaced, all the rest stays."""

from __future__ import annotations

import ast
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from firstnan.records import Edit, Site
from firstnan.records.syntax import parse
from firstnan.repair.patch import LINE_END, FileOnDisk, PatchError, by_file, edited, line_starts, render

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.USub: "neg",
}
ALIASES = {
    "divide": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "power": "pow",
    "float_power": "pow",
    "arccos": "acos",
    "arcsin": "asin",
    "arctanh": "atanh",
    "expit": "sigmoid",
    "mm": "matmul",
    "bmm": "matmul",
    "vector_norm": "norm",
    "negative": "neg",
    "absolute": "abs",
}
"""Other names of the same operator."""
USUAL_NAMES = {"torch": "torch", "F": "torch.nn.functional", "nn": "torch.nn", "np": "numpy", "math": "math"}
"""What these names mean in a file that uses them without binding them, after `from common import *`."""
MOST_ASSIGNMENTS = 6


@dataclass(frozen=True)
class Expr:
    """One operation in the source, however it is spelled: `torch.log(x)`, `x.log()`, `a / b`, `a /= b`."""

    op: str
    """The name in aten, without the underscore of an in-place method; "" if it is not an operation."""
    args: tuple[ast.expr, ...] = ()
    """The positional arguments, the receiver of a method first."""
    keywords: dict[str, ast.expr] = field(default_factory=dict)
    called: str = ""
    """`torch.nn.functional.softmax`; `.softmax` for a method; `self.layer`; `own_function`; "" for an operator."""
    node: ast.AST | None = None

    def arg(self, index: int, name: str) -> ast.expr | None:
        return self.args[index] if index < len(self.args) else self.keywords.get(name)

    @property
    def library(self) -> str:
        """`torch`, `numpy`...; "" for a method, an operator or a function of the user's."""
        return self.called.split(".")[0] if "." in self.called else ""


_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""The fields that hold statements, in the order of `ast`."""


_WRITING = ("all_reduce", "broadcast", "reduce", "recv", "scatter")
"""Functions of torch.distributed that write their result into the tensor that they are given."""


class SourceFile:
    """One file; offsets count characters of `text`, whose lines all end with a newline character."""

    def __init__(self, file: str, content: str) -> None:
        self.file, self.content = file, content
        self.text = LINE_END.sub("\n", content)
        self.tree = parse(self.text)
        self._lines = self.text.split("\n")
        self._starts = line_starts(self.text)
        self._found: dict[tuple[int | None, ...], ast.AST | None] = {}
        self._within: dict[ast.AST, list[ast.AST]] = {}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes, in the order of `ast.walk`."""
        return [self.tree, *self._parents]

    @cached_property
    def _parents(self) -> dict[ast.AST, ast.AST]:
        """Node -> the one around it. The only walk through the tree: `ast.walk` takes longer for the nodes alone."""
        found: dict[ast.AST, ast.AST] = {}
        waiting: list[ast.AST] = [self.tree]
        for node in waiting:
            for name in node._fields:
                value = getattr(node, name, None)
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST):
                        found[child] = node
                        waiting.append(child)
        return found

    @cached_property
    def statements(self) -> list[ast.AST]:
        """All statements, in the same order; a tenth of the nodes."""
        waiting: list[ast.AST] = [self.tree]
        for node in waiting:
            for name in _BLOCKS:
                waiting += getattr(node, name, ())
        return [node for node in waiting if isinstance(node, ast.stmt)]

    @classmethod
    def read(cls, file: str) -> SourceFile | None:
        """The file on disk, or the cell of a notebook; None if there is none or it is not Python."""
        text = cls.text_of(file)
        return cls.parsed(file, text) if text is not None else None

    @staticmethod
    def text_of(file: str) -> str | None:
        """The text alone, which takes a hundredth of the time."""
        try:
            return FileOnDisk.read(file).text
        except PatchError:
            return None

    @classmethod
    def parsed(cls, file: str, text: str) -> SourceFile | None:
        """The file with this text; None if that is not Python."""
        try:
            return cls(file, text)
        except (SyntaxError, ValueError, RecursionError):
            return None

    def edit(self, start: int, end: int, new: str) -> Edit:
        """`new` in place of the text between two offsets."""
        line, end_line = bisect_right(self._starts, start), bisect_right(self._starts, end)
        column, end_column = start - self._starts[line - 1], end - self._starts[end_line - 1]
        return Edit(self.file, line, column, end_line, end_column, self.text[start:end], new)

    # --- positions ---------------------------------------------------------------------------------------------

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The offsets of a node, without parentheses around it."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.alias)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        # The compiler counts columns in UTF-8 bytes.
        text = self._lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode("utf-8")))

    def edit_span(self, edit: Edit) -> tuple[int, int]:
        """The offsets between which an edit of this file replaces text."""
        return self.line_start(edit.line) + edit.column, self.line_start(edit.end_line) + edit.end_column

    def code(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def line(self, number: int) -> str:
        return self._lines[number - 1]

    def line_start(self, number: int) -> int:
        """The offset of a line; for the line after the last one the end of the text."""
        return self._starts[number - 1] if number <= len(self._starts) else len(self.text)

    def node_at(self, site: Site) -> ast.AST | None:
        """The expression or statement that an instruction belongs to."""
        key = (site.line, site.column, site.end_line, site.end_column)
        if key not in self._found:
            self._found[key] = self._find(site)
        return self._found[key]

    def _find(self, site: Site) -> ast.AST | None:
        nodes = [n for n in self.nodes if isinstance(n, ast.expr | ast.stmt)]
        if site.column is None or site.end_line is None or site.end_column is None:
            return self._statement_at(site.line)
        if site.line > len(self._lines) or site.end_line > len(self._lines):
            return None
        start = self._starts[site.line - 1] + site.column
        end = self._starts[site.end_line - 1] + site.end_column
        exact = [n for n in nodes if self.span(n) == (start, end)]
        if exact:
            return next((n for n in exact if isinstance(n, ast.expr)), exact[0])
        # The site of a method call over several lines starts at the name of the method.
        ending = [n for n in nodes if isinstance(n, ast.expr) and self.span(n)[1] == end and self.span(n)[0] < start]
        if ending:
            return min(ending, key=lambda n: start - self.span(n)[0])
        return self._statement_at(site.line)

    def _statement_at(self, line: int) -> ast.stmt | None:
        around = [n for n in self.nodes if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or n.lineno)]
        return max(around, key=lambda n: n.lineno, default=None)

    # --- surroundings ------------------------------------------------------------------------------------------

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def parents(self, node: ast.AST) -> list[ast.AST]:
        """Everything around the node, innermost first."""
        out: list[ast.AST] = []
        at = self._parents.get(node)
        while at is not None:
            out.append(at)
            at = self._parents.get(at)
        return out

    def statement(self, node: ast.AST) -> ast.stmt:
        return next(n for n in (node, *self.parents(node)) if isinstance(n, ast.stmt))

    def function(self, node: ast.AST) -> Function | None:
        return next((n for n in self.parents(node) if isinstance(n, Function)), None)

    def scope(self, node: ast.AST) -> ast.AST:
        """The function around the node, else the module."""
        return self.function(node) or self.tree

    def within(self, node: ast.AST) -> list[ast.AST]:
        """All nodes of the function around the node; for the module those outside of functions."""
        scope = self.scope(node)
        if scope not in self._within:
            self._within[scope] = list(ast.walk(scope)) if scope is not self.tree else _outside_functions(self.tree)
        return self._within[scope]

    def reads(self, name: str, node: ast.AST) -> int:
        """How often the name is read in the scope of the node."""
        around = self.within(node) if self.function(node) is not None else self.nodes
        return sum(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in around)

    def is_for_effect(self, node: ast.AST) -> bool:
        """Whether nothing reads the result of a call: `dist.all_reduce(x)` and `x.exp_()` write into x."""
        return isinstance(node, ast.Call) and isinstance(self.parent(node), ast.Expr)

    def is_written_by_call(self, use: ast.Name) -> bool:
        """Whether a call that is there for its effect writes into the value: `dist.all_reduce(n)`, `n.clamp_(1)`."""
        parent = self.parent(use)
        call = self.parent(parent) if isinstance(parent, ast.Attribute) else parent
        if not isinstance(call, ast.Call) or not self.is_for_effect(call):
            return False
        name = ast.unparse(call.func).rpartition(".")[2]
        return name.endswith("_") or (name in _WRITING and use in call.args)

    def indent(self, node: ast.AST) -> str:
        """The indentation of the node's statement."""
        line = self.line(self.statement(node).lineno)
        return line[: len(line) - len(line.lstrip())]

    # --- names -------------------------------------------------------------------------------------------------

    def assigned(self, name: ast.expr, before: ast.AST | None = None) -> ast.Assign | ast.AnnAssign | None:
        """The last assignment to `name` before it in the same function; None if that is ambiguous.

        `name` may be dotted (`self.scale`); names are compared by spelling."""
        text, here = ast.unparse(name), self.statement(before or name)
        around = set(self.parents(here))
        nearest: ast.stmt | None = None
        for node in self.within(before or name):
            if not isinstance(node, ast.stmt) or node.lineno >= here.lineno or node in around:
                continue
            if any(ast.unparse(t) == text for t in stored_targets(node)) and (
                nearest is None or node.lineno > nearest.lineno
            ):
                nearest = node
        if not isinstance(nearest, ast.Assign | ast.AnnAssign) or nearest.value is None:
            return None
        if self._is_assigned_again(text, here, nearest):
            return None
        alone = nearest.target if isinstance(nearest, ast.AnnAssign) else nearest.targets[0]
        return nearest if ast.unparse(alone) == text else None

    def _is_assigned_again(self, text: str, here: ast.stmt, nearest: ast.stmt) -> bool:
        """Whether a loop around `here`, but not around the assignment, assigns the name too, in the turn before."""
        inner = [n for n in self.parents(here) if isinstance(n, ast.For | ast.While) and n not in self.parents(nearest)]
        scope = self.scope(here)
        inside = [n for loop in inner if self.scope(loop) is scope for n in ast.walk(loop) if isinstance(n, ast.stmt)]
        return any(ast.unparse(t) == text for n in inside for t in stored_targets(n))

    def value(self, node: ast.expr) -> ast.expr:
        """The expression that was assigned to a name, followed through other names; otherwise the node itself."""
        for _ in range(MOST_ASSIGNMENTS):
            found = self.assigned(node) if isinstance(node, ast.Name) else None
            if found is None or found.value is None:
                return node
            node = found.value
        return node

    def unchanged(self, node: ast.expr, use: ast.AST) -> bool:
        """Whether no name in `node` is assigned again before `use`, in the same function."""
        first, last = self.statement(node).lineno, self.statement(use).lineno
        if self.scope(node) is not self.scope(use):
            return False
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        between = [n for n in self.within(use) if isinstance(n, ast.stmt) and first <= n.lineno < last]
        return not any(isinstance(t, ast.Name) and t.id in names for n in between for t in stored_targets(n))

    @cached_property
    def _imports(self) -> dict[str, list[tuple[str, ast.AST]]]:
        found: dict[str, list[tuple[str, ast.AST]]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    # `import torch.nn` binds `torch`; with `as` it binds the whole path.
                    path = alias.name if alias.asname else alias.name.split(".")[0]
                    found.setdefault(alias.asname or path, []).append((path, self.scope(node)))
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    entry = (f"{node.module}.{alias.name}", self.scope(node))
                    found.setdefault(alias.asname or alias.name, []).append(entry)
        for name, path in USUAL_NAMES.items():
            if name in self._read - self._bound and name not in found:
                found[name] = [(path, self.tree)]
        return found

    @cached_property
    def _read(self) -> set[str]:
        return {n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

    @cached_property
    def _bound(self) -> set[str]:
        names = {n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return names | {a.arg for a in self.nodes if isinstance(a, ast.arg)}

    def imported(self, name: str, at: ast.AST) -> str | None:
        """The full path of an imported name (`torch.nn.functional` for `F`); None if a parameter hides it."""
        scopes: list[ast.AST] = [n for n in self.parents(at) if isinstance(n, Function)]
        for scope in scopes:
            if isinstance(scope, Function) and name in parameter_names(scope):
                return None
        return next((path for path, scope in self._imports.get(name, []) if scope in (*scopes, self.tree)), None)

    def reach(self, path: str, at: ast.AST) -> str | None:
        """The shortest spelling of a module or function at this node, `F.softplus`; None if it is not imported."""
        spellings = []
        for name in self._imports:
            full = self.imported(name, at)
            if full and (path == full or path.startswith(full + ".")):
                spellings.append(name + path[len(full) :])
        return min(spellings, key=lambda text: (text.count("."), len(text)), default=None)

    def spell(self, path: str, at: ast.AST) -> str:
        """As `reach`, else the full path, for which `as_patch` adds an import."""
        return self.reach(path, at) or path

    # --- expressions -------------------------------------------------------------------------------------------

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    def called_name(self, call: ast.Call) -> str:
        """The last part of the function's name: `softmax` for `torch.nn.functional.softmax`."""
        return self.called(call).rsplit(".", 1)[-1]

    def called(self, call: ast.Call) -> str:
        """The function of a call; see `Expr.called`."""
        parts: list[str] = []
        at: ast.expr = call.func
        while isinstance(at, ast.Attribute):
            parts.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name):
            base = self.imported(at.id, call)
            if base is not None:
                return ".".join([base, *reversed(parts)])
            if not parts:
                return at.id
            if at.id in ("self", "cls") and len(parts) == 1:  # a layer or method of the user's class
                return f"self.{parts[0]}"
        return f".{parts[0]}" if parts else ""

    def expr(self, node: ast.AST | None) -> Expr:
        """The operation at a node."""
        if isinstance(node, ast.Call):
            called = self.called(node)
            name = called.rsplit(".", 1)[-1]
            args = [a for a in node.args if not isinstance(a, ast.Starred)]
            if called.startswith(".") and isinstance(node.func, ast.Attribute):
                args.insert(0, node.func.value)
            plain = name.rstrip("_") if not name.startswith("_") else name
            keywords = {k.arg: k.value for k in node.keywords if k.arg}
            if called.startswith("self."):
                return Expr("", tuple(args), keywords, called, node)
            return Expr(ALIASES.get(plain, plain), tuple(args), keywords, called, node)
        if isinstance(node, ast.BinOp):
            return Expr(OPERATORS.get(type(node.op), ""), (node.left, node.right), node=node)
        if isinstance(node, ast.UnaryOp):
            return Expr(OPERATORS.get(type(node.op), ""), (node.operand,), node=node)
        if isinstance(node, ast.AugAssign):
            return Expr(OPERATORS.get(type(node.op), ""), (node.target, node.value), node=node)
        return Expr("", node=node)

    def meaning(self, node: ast.expr | None) -> Expr:
        """As `expr`, with a name replaced by what was assigned to it."""
        return self.expr(self.value(node)) if node is not None else Expr("")


def stored_targets(node: ast.stmt) -> list[ast.expr]:
    """All targets of a statement, tuples unpacked."""
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For):
        found = [node.target]
    elif isinstance(node, ast.With):
        found = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        return []
    out: list[ast.expr] = []
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        else:
            out.append(target.value if isinstance(target, ast.Starred) else target)
    return out


def _outside_functions(tree: ast.Module) -> list[ast.AST]:
    out: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        out.append(node)
        waiting += [n for n in ast.iter_child_nodes(node) if not isinstance(n, Function)]
    return out


def parameter_names(function: Function) -> set[str]:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return {a.arg for a in named if a is not None}


def literal_value(node: ast.AST | None) -> float | None:
    """The value of a number literal, also of `-1`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = literal_value(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


def replace_node(source: SourceFile, node: ast.expr, text: str) -> Edit:
    """Another expression in place of this one, in parentheses if it needs them there."""
    start, end = source.span(node)
    around = _parentheses(source, node)
    if is_atom(text) and around is not None and "\n" not in text:
        return source.edit(*around, text)
    return source.edit(start, end, text if around is not None or _fits_bare(source, node, text) else f"({text})")


def delete_statement(source: SourceFile, statement: ast.stmt) -> Edit | None:
    """The lines of a statement removed; None if they hold anything else."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    start, end = source.line_start(first), source.line_start(last + 1)
    alone = source.text[start:end].strip() == source.code(statement).strip()
    return source.edit(start, end, "") if alone else None


def parenthesized(source: SourceFile, node: ast.expr) -> str:
    """The code of an expression, in parentheses if a dot, a power or a sign next to it would split it."""
    text = source.code(node)
    return text if is_atom(text) else f"({text})"


def insert_before(source: SourceFile, node: ast.AST, *lines: str) -> Edit:
    """New statements before the node's statement; on its line if other statements come first on that line."""
    statement = source.statement(node)
    start, at = source.span(statement)[0], source.line_start(statement.lineno)
    if source.text[at:start].strip():
        return source.edit(start, start, "; ".join(lines) + "; ")
    return source.edit(at, at, _block(source, node, lines))


_LONGEST_INLINE = 16
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)


def named_before(source: SourceFile, node: ast.expr, name: str) -> tuple[str, str, list[Edit]]:
    """The expression as code in a sum and before a dot; a long expression gets a name on a line before."""
    code = source.code(node)
    inside = source.parents(node)
    around = inside[: inside.index(source.statement(node))]
    movable = not any(isinstance(n, ast.Lambda | ast.comprehension | ast.ListComp | ast.IfExp) for n in around)
    if len(code) <= _LONGEST_INLINE or "\n" in code or not movable or not isinstance(source.statement(node), _SIMPLE):
        return code, parenthesized(source, node), []
    return name, name, [insert_before(source, node, f"{name} = {code}")]


def insert_after(source: SourceFile, node: ast.AST, *lines: str) -> Edit:
    """New lines after the node's statement, with its indentation."""
    statement = source.statement(node)
    at = source.line_start((statement.end_lineno or statement.lineno) + 1)
    block = _block(source, node, lines)
    if not source.text[:at].endswith("\n"):  # the file ends without a newline
        block = "\n" + block.removesuffix("\n")
    return source.edit(at, at, block)


def set_argument(source: SourceFile, call: ast.Call, name: str, text: str) -> Edit:
    """A keyword argument of a call: its value replaced, or the argument added at the end."""
    given = next((k for k in call.keywords if k.arg == name), None)
    if given is not None:
        return source.edit(*source.span(given.value), text)
    end = source.span(call)[1] - 1
    inside: list[ast.AST] = [*call.args, *call.keywords]
    if not inside:
        return source.edit(end, end, f"{name}={text}")
    last = max(source.span(n)[1] for n in inside)
    # The last argument may be in parentheses and have a comma after it.
    tail = re.match(r"[\s)]*", source.text[last:end])
    closed = last + len(tail.group().rstrip()) if tail else last
    return source.edit(closed, closed, f", {name}={text}")


def changed_text(source: SourceFile, node: ast.expr, edit: Edit) -> str:
    """The code of an expression with one edit inside it made."""
    (start, end), (a, b) = source.span(node), source.edit_span(edit)
    return source.text[start:a] + edit.new + source.text[b:end]


def as_patch(edits: Iterable[Edit], source_of: Callable[[str], SourceFile | None]) -> tuple[tuple[Edit, ...], str]:
    """The edits with the imports they need, and their diff; empty if they overlap, change nothing or break the code."""
    whole: list[Edit] = []
    diff = ""
    for file, group in by_file(edits).items():
        source = source_of(file)
        if source is None:
            return (), ""
        group = [*_missing_imports(source, group), *group]
        try:
            new = edited(source.content, group)
            parse(new)
        except (PatchError, SyntaxError, ValueError):
            return (), ""
        # `..` is not allowed in a diff, and a path through links must not be shortened by hand.
        name = os.path.realpath(file) if os.pardir in file.split(os.sep) else file
        part = render(name, source.content, new)
        if not part:
            return (), ""
        whole += [replace(edit, file=name) for edit in group]
        diff += part
    return tuple(whole), diff


def _missing_imports(source: SourceFile, edits: list[Edit]) -> list[Edit]:
    """Imports at the top of the file for modules that new code needs and whose names the file does not bind."""
    used = [name for name in ("math", "torch") if any(re.search(rf"(?<![\w.]){name}\.", e.new) for e in edits)]
    missing = [name for name in used if not source.imported(name, source.tree)]
    body = source.tree.body
    documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    first = next((n for n in body[documented:] if n not in future), None)
    if first is None or not missing:
        return []
    at = source.line_start(first.lineno)
    return [source.edit(at, at, "".join(f"import {name}\n" for name in missing))]


def _block(source: SourceFile, node: ast.AST, lines: Iterable[str]) -> str:
    return "".join(source.indent(node) + line + "\n" for line in lines)


def is_atom(text: str) -> bool:
    """Whether no operator next to the code could split it."""
    try:
        node = parse(f"({text})", "eval").body
    except SyntaxError:
        return False
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float | int)
    return isinstance(node, ATOMS) or (text.startswith("(") and _closes_at_end(text))


def _closes_at_end(text: str) -> bool:
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return i == len(text) - 1
    return False


def _fits_bare(source: SourceFile, node: ast.expr, text: str) -> bool:
    parent = source.parent(node)
    if isinstance(parent, ast.stmt):
        return "\n" not in text
    if is_atom(text) or isinstance(parent, ast.keyword):
        return True
    if isinstance(parent, ast.Call) and node in parent.args:
        return True
    return isinstance(parent, ast.Subscript) and node is parent.slice


def _parentheses(source: SourceFile, node: ast.expr) -> tuple[int, int] | None:
    """The span of the parentheses around an expression, unless they belong to a call."""
    start, end = source.span(node)
    left, right = source.text[:start].rstrip(), source.text[end:]
    parent = source.parent(node)
    if isinstance(parent, ast.Call) and node in parent.args and not left.endswith("(("):
        return None
    if not left.endswith("(") or not right.lstrip().startswith(")"):
        return None
    return len(left) - 1, end + len(right) - len(right.lstrip()) + 1
