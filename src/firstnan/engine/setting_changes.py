"""Where the body of a loop steps its schedulers or sets a rate by hand: before its update, or after it.

A loop without a loader does not show where a turn begins, so it is read from its source.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.engine.turn import Turn

_GROUPS = "param_groups"
_DEPTH = 2


def come_first(turns: Sequence[Turn], calls: Sequence[Turn]) -> bool:
    """Whether settings change only before the statements that are running: in the innermost loop, or in functions
    that it has called."""
    before = after = False
    for turn in (*turns[:1], *calls):
        for statement in turn.loop.body:
            for line in _changes([statement], turn.names):
                before, after = before or line < turn.at, after or line > turn.at
    return before and not after


def _changes(body: Sequence[ast.AST], names: dict[str, Any]) -> Iterator[int]:
    """The lines that may change a setting."""
    for node in (n for statement in body for n in ast.walk(statement)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                yield node.lineno
        elif isinstance(node, ast.Call) and _changes_settings(node, names):
            yield node.lineno


def _changes_settings(call: ast.Call, names: dict[str, Any]) -> bool:
    function = _value(call.func, names)
    if isinstance(function, MethodType) and isinstance(function.__self__, LRScheduler):
        return function.__name__ == "step"
    return isinstance(function, FunctionType | MethodType) and _touches(function, _DEPTH)


def _touches(function: Any, depth: int) -> bool:
    """Whether a function of the program mentions the groups of an optimizer, or a scheduler."""
    owner = getattr(function, "__self__", None)
    function = getattr(function, "__func__", function)
    if isinstance(owner, Optimizer) or not isinstance(code := getattr(function, "__code__", None), CodeType):
        return False
    if str(function.__module__).partition(".")[0] == "torch":
        return False
    for name in code.co_names:
        held = _member(owner, name) if owner is not None else None
        held = function.__globals__.get(name) if held is None else held
        if name == _GROUPS or isinstance(held, LRScheduler):
            return True
        if depth > 1 and isinstance(held, FunctionType | MethodType) and _touches(held, depth - 1):
            return True
    return False


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return _member(_value(node.value, names), node.attr)
    return None


def _member(owner: Any, name: str) -> Any:
    """An attribute, without running a property."""
    found = inspect.getattr_static(owner, name, None)
    return MethodType(found, owner) if isinstance(found, FunctionType) and not inspect.ismodule(owner) else found
