"""Changes of source text: a span is replaced, all the rest stays as it was; several of them become one unified diff."""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from firstnan.repair.source import Source

CONTEXT = 3
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List, ast.Dict)


@dataclass(frozen=True)
class Edit:
    """`text` in place of what stands between two offsets."""

    source: Source
    start: int
    end: int
    text: str


def put(source: Source, node: ast.expr, text: str) -> Edit:
    """`text` in place of an expression, in parentheses where it needs them there."""
    start, end = source.span(node)
    around = _parentheses(source, node)
    if _is_atom(text) and around is not None and "\n" not in text:
        return Edit(source, *around, text)
    return Edit(source, start, end, text if around is not None or _fits_bare(source, node, text) else f"({text})")


def remove(source: Source, statement: ast.stmt) -> Edit | None:
    """A statement taken away with its lines, where nothing else stands on them."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    start, end = source.line_start(first), source.line_start(last + 1)
    lines = source.text[start:end]
    alone = lines.strip() == source.code(statement).strip()
    return Edit(source, start, end, "") if alone and end <= len(source.text) else None


def atom(source: Source, node: ast.expr) -> str:
    """The code of an expression so that a dot, a power or a sign may follow or precede it."""
    text = source.code(node)
    return text if _is_atom(text) else f"({text})"


def before(source: Source, node: ast.AST, *lines: str) -> Edit:
    """Whole lines in front of the node's statement, with its indentation."""
    statement = source.statement(node)
    at = source.line_start(statement.lineno)
    return Edit(source, at, at, _block(source, node, lines))


def after(source: Source, node: ast.AST, *lines: str) -> Edit:
    """Whole lines behind the node's statement, with its indentation."""
    last = source.statement(node).end_lineno or source.statement(node).lineno
    at = source.line_start(last + 1)
    block = _block(source, node, lines)
    if at > len(source.text):  # the statement is the last line, and nothing ends it
        return Edit(source, len(source.text), len(source.text), _newline(source) + block.removesuffix(_newline(source)))
    return Edit(source, at, at, block)


def argument(source: Source, call: ast.Call, name: str, text: str) -> Edit:
    """A keyword argument of a call: its value replaced, or it is added at the end."""
    given = next((k for k in call.keywords if k.arg == name), None)
    if given is not None:
        start, end = source.span(given.value)
        return Edit(source, start, end, text)
    return _last(source, call, f"{name}={text}")


def without(source: Source, call: ast.Call, keyword: ast.keyword) -> Edit:
    """A keyword argument taken away, with the comma before it (or after, if it is the first)."""
    start, end = source.span(keyword)
    left = source.text[:start].rstrip()
    if left.endswith(","):
        return Edit(source, len(left) - 1, end, "")
    rest = re.match(r"\s*,?\s*", source.text[end:])
    return Edit(source, start, end + (rest.end() if rest else 0), "")


def _last(source: Source, call: ast.Call, text: str) -> Edit:
    end = source.span(call)[1] - 1
    inside: list[ast.AST] = [*call.args, *call.keywords]
    if not inside:
        return Edit(source, end, end, text)
    last = max(source.span(n)[1] for n in inside)
    # Behind the last argument there may stand parentheses of its own and a comma.
    tail = re.match(r"[\s)]*", source.text[last:end])
    closed = last + len(tail.group().rstrip()) if tail else last
    return Edit(source, closed, closed, f", {text}")


def diff(edits: Iterable[Edit]) -> str:
    """All edits as one unified diff; "" where they change nothing, overlap or would not be Python."""
    by_source: dict[str, list[Edit]] = {}
    for edit in edits:
        by_source.setdefault(edit.source.file, []).append(edit)
    parts = [_file_diff(group[0].source, group) for group in by_source.values()]
    return "".join(p for p in parts if p) if all(parts) else ""


def _file_diff(source: Source, edits: list[Edit]) -> str:
    new = _applied(source, [*edits, *_import_of_torch(source, edits)])
    if new is None or new == source.text:
        return ""
    try:
        ast.parse(new)
    except (SyntaxError, ValueError):
        return ""
    # A way through `..` is no name for a file in a diff, and one through links must not be cut short.
    name = os.path.realpath(source.file) if os.pardir in source.file.split(os.sep) else source.file
    lines = difflib.unified_diff(_split(source.text), _split(new), f"a/{name}", f"b/{name}", n=CONTEXT, lineterm="\n")
    return "".join(text if text.endswith("\n") else f"{text}\n\\ No newline at end of file\n" for text in lines)


def _applied(source: Source, edits: list[Edit]) -> str | None:
    text, limit = source.text, len(source.text) + 1
    for edit in sorted(edits, key=lambda e: (e.start, e.end), reverse=True):
        if edit.end > limit:
            return None
        text = text[: edit.start] + edit.text.replace("\r\n", "\n").replace("\n", _newline(source)) + text[edit.end :]
        limit = edit.start
    return text


def _import_of_torch(source: Source, edits: list[Edit]) -> list[Edit]:
    """`import torch` at the head of a file, where new code needs it and nothing there is called so."""
    if not any(re.search(r"(?<![\w.])torch\.", e.text) for e in edits):
        return []
    if source.imported("torch", source.tree):
        return []
    body = source.tree.body
    documented = bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    future = [n for n in body if isinstance(n, ast.ImportFrom) and n.module == "__future__"]
    first = next((n for n in body[documented:] if n not in future), None)
    if first is None:
        return []
    at = source.line_start(first.lineno)
    return [Edit(source, at, at, "import torch\n")]


def _split(text: str) -> list[str]:
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _newline(source: Source) -> str:
    return "\r\n" if "\r\n" in source.text else "\n"


def _block(source: Source, node: ast.AST, lines: Iterable[str]) -> str:
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


def _fits_bare(source: Source, node: ast.expr, text: str) -> bool:
    parent = source.parent(node)
    if isinstance(parent, ast.stmt):
        return "\n" not in text
    if _is_atom(text) or isinstance(parent, ast.keyword):
        return True
    if isinstance(parent, ast.Call) and node in parent.args:
        return True
    return isinstance(parent, ast.Subscript) and node is parent.slice


def _parentheses(source: Source, node: ast.expr) -> tuple[int, int] | None:
    """Where the parentheses around an expression begin and end, if it has any of its own (a call's are not)."""
    start, end = source.span(node)
    left, right = source.text[:start].rstrip(), source.text[end:]
    parent = source.parent(node)
    if isinstance(parent, ast.Call) and node in parent.args and not left.endswith("(("):
        return None
    if not left.endswith("(") or not right.lstrip().startswith(")"):
        return None
    return len(left) - 1, end + len(right) - len(right.lstrip()) + 1
