"""Where the program sets its learning rates, and whether its loop does so before its update: asked after a failure."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.engine.turn import Turn
from firstnan.observe.sites import Ownership, function_site
from firstnan.records import History, OptimizerHistory, Site
from firstnan.repair.context import SourceFiles
from firstnan.repair.rates import assigned_rates, changed_at, manual_rates, schedule_calls
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import learning_rate_of


def with_rate_sites(history: History, optimizers: list[Any], ownership: Ownership) -> History:
    """The history, and those of the other optimizers, with the place that sets each one's learning rate.

    `optimizers` are theirs, in the same order; None for updates by hand.
    """
    files = SourceFiles()
    names = _own_files(ownership)
    sites = [
        _rate_site(h, o, files, names, ownership) for h, o in zip((history, *history.others), optimizers, strict=True)
    ]
    others = tuple(replace(h, rate_set_at=site) for h, site in zip(history.others, sites[1:], strict=True))
    return replace(history, rate_set_at=sites[0], others=others)


def _own_files(ownership: Ownership) -> list[str]:
    """The files of the program that are loaded; the main one first."""
    loaded = [sys.modules.get("__main__"), *list(sys.modules.values())]
    found = [name for m in loaded if isinstance(name := getattr(m, "__file__", None), str) and name.endswith(".py")]
    return [name for name in dict.fromkeys(found) if ownership.owns_file(name)]


def _rate_site(
    history: OptimizerHistory, optimizer: Any, files: SourceFiles, names: list[str], ownership: Ownership
) -> Site | None:
    if optimizer is None:
        by_hand = manual_rates(files, [*([history.backward_at.file] if history.backward_at else []), *names])
        moved = len({record.lr for record in history.steps if record.lr is not None}) > 1
        changed = changed_at(by_hand[0]) if by_hand and moved else None
        return (changed or by_hand[0]).site if by_hand else None
    assigned = assigned_rates(files, names, history.name)
    schedules = _schedules(optimizer)
    if schedules and (not assigned or _follows(schedules, optimizer)):
        return _site_of_schedule(schedules, files, names, ownership)
    return assigned[0].site if assigned else None


def _schedules(optimizer: Any) -> list[Any]:
    return [s for s in find_live_objects(LRScheduler) if vars(s).get("optimizer") is optimizer]


def _follows(schedules: list[Any], optimizer: Any) -> bool:
    """Whether the optimizer has the rate that one of its schedules has set last."""
    rate = learning_rate_of(optimizer)
    return any(rate in [float(r) for r in vars(s).get("_last_lr", ())] for s in schedules)


def _site_of_schedule(schedules: list[Any], files: SourceFiles, names: list[str], ownership: Ownership) -> Site | None:
    """The function of the user's that computes the rate; else where the schedule is made."""
    for schedule in schedules:
        given = [*vars(schedule).get("lr_lambdas", ()), vars(schedule).get("_scale_fn_custom")]
        for function in (*given, type(schedule).get_lr):
            code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
            if code is None and callable(function):  # an object that is called
                code = getattr(inspect.getattr_static(type(function), "__call__", None), "__code__", None)
            if code is not None and ownership.owns(code):
                return function_site(code)
    kinds = {type(s).__name__ for s in schedules}
    made = schedule_calls(files, names, kinds)
    return made[0].site if made else None


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
