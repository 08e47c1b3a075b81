"""The iterator that a running `for` loop goes through, so that a forked child can go on with it.

Python keeps it on the stack of the function and gives no access to it. It is read from memory here, only in a child
that may fail, and only if it is known to be an object that is in use.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from types import CodeType, FrameType
from typing import Any

from firstnan.tensors.live_objects import live_iterator

_WORD = ctypes.sizeof(ctypes.c_void_p)
_HEADER = 10 if sys.version_info >= (3, 14) else 9
"""Words of an `_PyInterpreterFrame` before its variables, which the stack follows."""
_WITH = 2 if sys.version_info >= (3, 14) else 1
"""Places on the stack that a `with` takes while its body runs."""


def running_iterator(tree: ast.Module, loop: ast.For, code: CodeType) -> Any:
    """The iterator of this loop in the function that is running, `code`; None if it cannot be had."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_code is code and loop.lineno <= (frame.f_lineno or 0) <= (loop.end_lineno or 0)
    ):
        frame = frame.f_back
    place = _place(tree, loop)
    if frame is None or place is None or not _is_readable():
        return None
    return live_iterator(_on_stack(frame, place))


def _place(tree: ast.Module, loop: ast.For) -> int | None:
    """How many values are on the stack below the iterator of a loop; None if that is not certain."""
    place = 0
    for node, part in _way_to(tree, loop):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            place = 0
        elif isinstance(node, ast.For):
            place += part == "body"
        elif isinstance(node, ast.With):
            place += _WITH * len(node.items)
        elif isinstance(node, ast.Try):
            if part not in ("body", "orelse"):
                return None
        elif not isinstance(node, ast.Module | ast.If | ast.While):
            return None
    return place


def _way_to(tree: ast.AST, loop: ast.For) -> list[tuple[ast.AST, str]]:
    """The statements around a loop, outermost first, with the part of each that holds it."""
    for part, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.For) and (child.lineno, child.col_offset) == (loop.lineno, loop.col_offset):
                return [(tree, part)]
            if isinstance(child, ast.AST) and (found := _way_to(child, loop)):
                return [(tree, part), *found]
    return []


def _on_stack(frame: FrameType, place: int) -> int:
    """The address of the object that is in this place of the stack; 0 if there is none."""
    code = frame.f_code
    if place >= code.co_stacksize:
        return 0
    variables = len({*code.co_varnames, *code.co_cellvars}) + len(code.co_freevars)
    inner = ctypes.c_void_p.from_address(id(frame) + object.__basicsize__ + _WORD).value
    if not inner:
        return 0
    return (ctypes.c_size_t.from_address(inner + _WORD * (_HEADER + variables + place)).value) & ~7


@cache
def _is_readable() -> bool:
    """Whether the stack of this Python looks as expected: tried on a loop of our own."""

    def probe(first: Iterator[int], second: Iterator[int]) -> bool:
        frame = sys._getframe()
        for _ in first:
            with contextlib.nullcontext():
                for _ in second:
                    return _on_stack(frame, 0) == id(first) and _on_stack(frame, 1 + _WITH) == id(second)
        return False

    return sys.implementation.name == "cpython" and probe(iter([1]), iter([2]))


def latest_value(iterator: Any, before: int = 0) -> tuple[Any] | None:
    """The value that an iterator has given last, or so many `before` it, in a tuple; None if it cannot tell."""
    kind = type(iterator)
    if kind in (type(iter([])), type(iter(()))):
        _, (values, *_), *index = iterator.__reduce__()
        return (values[index[0] - 1 - before],) if index and index[0] > before else None
    if kind is enumerate:
        inner, count = iterator.__reduce__()[1]
        latest = latest_value(inner, before)
        return ((count - 1 - before, *latest),) if latest is not None else None
    if kind is zip:
        parts = [latest_value(inner, before) for inner in iterator.__reduce__()[1]]
        return (tuple(value for part in parts if part is not None for value in part),) if None not in parts else None
    return None
