"""Edits of a user's file: expressions replaced, statements and arguments added or removed, all else left alone."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from firstnan.records import Edit
from firstnan.repair.diff import PatchError, render
from firstnan.repair.files import by_file, edited
from firstnan.repair.source import SourceFile

ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


def replace_node(source: SourceFile, node: ast.expr, text: str) -> Edit:
    """Another expression in place of this one, in parentheses if it needs them there."""
    start, end = source.span(node)
    around = _parentheses(source, node)
    if _is_atom(text) and around is not None and "\n" not in text:
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
    return text if _is_atom(text) else f"({text})"


def insert_before(source: SourceFile, node: ast.AST, *lines: str) -> Edit:
    """New statements before the node's statement; on its line if other statements come first on that line."""
    statement = source.statement(node)
    start, at = source.span(statement)[0], source.line_start(statement.lineno)
    if source.text[at:start].strip():
        return source.edit(start, start, "; ".join(lines) + "; ")
    return source.edit(at, at, _block(source, node, lines))


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
    # The last argument may have parentheses of its own and a comma after it.
    tail = re.match(r"[\s)]*", source.text[last:end])
    closed = last + len(tail.group().rstrip()) if tail else last
    return source.edit(closed, closed, f", {name}={text}")


def changed_call(source: SourceFile, call: ast.Call, edit: Edit) -> str:
    """The code of a call with one edit inside it made."""
    (start, end), (a, b) = source.span(call), source.edit_span(edit)
    return source.text[start:a] + edit.new + source.text[b:end]


def as_patch(edits: Iterable[Edit], source_of: Callable[[str], SourceFile | None]) -> tuple[tuple[Edit, ...], str]:
    """The edits with the imports they need, and their diff; empty if they overlap, change nothing or break the code."""
    whole: list[Edit] = []
    diff = ""
    for file, group in by_file(edits).items():
        source = source_of(file)
        if source is None:
            return (), ""
        group = [*_import_of_torch(source, group), *group]
        try:
            new = edited(source.content, group)
            ast.parse(new)
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


def _import_of_torch(source: SourceFile, edits: list[Edit]) -> list[Edit]:
    """`import torch` at the top of the file if new code needs it and the file does not bind the name."""
    if not any(re.search(r"(?<![\w.])torch\.", e.new) for e in edits) or source.imported("torch", source.tree):
        return []
    body = source.tree.body
    documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    first = next((n for n in body[documented:] if n not in future), None)
    if first is None:
        return []
    at = source.line_start(first.lineno)
    return [source.edit(at, at, "import torch\n")]


def _block(source: SourceFile, node: ast.AST, lines: Iterable[str]) -> str:
    return "".join(source.indent(node) + line + "\n" for line in lines)


def _is_atom(text: str) -> bool:
    try:
        node = ast.parse(f"({text})", mode="eval").body
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
    if _is_atom(text) or isinstance(parent, ast.keyword):
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
