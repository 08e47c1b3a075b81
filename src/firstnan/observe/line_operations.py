"""Which numpy operation of a statement made a value non-finite out of finite ones, and what it read."""

from __future__ import annotations

import ast
import contextlib
import math
import operator
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firstnan.records.operator_families import words

_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("add", operator.add),
    ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul),
    ast.Div: ("div", operator.truediv),
    ast.Pow: ("pow", operator.pow),
}
_NAMES = {"divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "power": "pow"}
_NAMES |= {"arccos": "acos", "arcsin": "asin", "arccosh": "acosh", "arctanh": "atanh", "absolute": "abs"}
_REDUCTIONS = words("all any argmax argmin cumsum max mean min prod ptp std sum var")
_METHODS = _REDUCTIONS | words("astype clip copy flatten item ravel repeat reshape round squeeze transpose")
_FUNCTIONS = _REDUCTIONS | words("amax amin array asarray clip diff expand_dims median norm quantile where")
_ATTRIBUTES = ("T", "dtype", "ndim", "shape", "size")
_BUILTINS: dict[str, Any] = {"abs": abs, "float": float, "int": int, "len": len, "max": max, "min": min, "sum": sum}
_BUILTINS |= {"enumerate": enumerate, "range": range, "zip": zip}
_LARGE = 1 << 20
"""Elements up to which an array is computed again."""


class LineOperation(NamedTuple):
    """An operation whose result is non-finite, although everything it read is finite."""

    name: str
    read: tuple[tuple[str, Tensor], ...]
    node: ast.expr | None
    """None for `x /= y`, which is a statement."""


def line_operation(statement: ast.stmt | None, variables: Mapping[str, Any]) -> LineOperation | None:
    """The first such operation of a statement, which is computed again as far as that has no other effect.

    `variables` holds what the statement read, not what it wrote over it.
    """

    def compute(again: _Again) -> None:
        if isinstance(statement, ast.AugAssign):
            again.binary(None, statement.op, statement.target, statement.value)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return) and statement.value is not None:
            again.value(statement.value)

    return _found(compute, variables)


def operation_of_comprehension(
    statement: ast.stmt | None, variables: Mapping[str, Any], at: int | None
) -> LineOperation | None:
    """The same for the element of the comprehension in a statement: the one `at` this place in the list that it made,
    or of a generator the one that `variables` holds."""
    kinds = ast.ListComp | ast.GeneratorExp
    nodes = [n for n in ast.walk(statement) if isinstance(n, kinds)] if statement is not None else []
    if len(nodes) != 1 or len(nodes[0].generators) != 1 or nodes[0].generators[0].ifs:
        return None
    loop, element = nodes[0].generators[0], nodes[0].elt

    def compute(again: _Again) -> None:
        if at is not None:
            again.assign(loop.target, list(again.value(loop.iter))[at])
        again.value(element)

    return _found(compute, variables)


def _found(compute: Callable[[_Again], None], variables: Mapping[str, Any]) -> LineOperation | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    again = _Again(numpy, dict(variables))
    with numpy.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # whatever the program's own numbers raise: nothing is known then
            compute(again)
    return again.found


class _UnknownError(Exception):
    """A part of a statement that is not computed again."""


class _Again:
    """Computes expressions of numbers and arrays again; the first that became non-finite is `found`."""

    def __init__(self, numpy: Any, variables: dict[str, Any]) -> None:
        self.numpy, self.variables = numpy, variables
        self.found: LineOperation | None = None

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.variables:
                return self.variables[node.id]
            case ast.Attribute():
                return self._attribute(self.value(node.value), node.attr)
            case ast.Subscript():
                return self._part(self.value(node.value), self.value(node.slice))
            case ast.Slice():
                parts = (node.lower, node.upper, node.step)
                return slice(*(None if part is None else self.value(part) for part in parts))
            case ast.Tuple() | ast.List():
                return tuple(self.all(node.elts))
            case ast.UnaryOp(op=ast.USub()):
                return -self._numbers(self.value(node.operand))
            case ast.BinOp():
                return self.binary(node, node.op, node.left, node.right)
            case ast.Call():
                return self._call(node)
        raise _UnknownError

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Tuple):
            for part, one in zip(target.elts, value, strict=True):
                self.assign(part, one)
        elif isinstance(target, ast.Name):
            self.variables[target.id] = value

    def all(self, nodes: list[ast.expr]) -> list[Any]:
        """The values of all of them; each is tried, because the operation may be in a later one."""
        values, known = [], True
        for node in nodes:
            try:
                values.append(self.value(node))
            except _UnknownError:
                known = False
        if not known:
            raise _UnknownError
        return values

    def binary(self, node: ast.expr | None, op: ast.operator, left: ast.expr, right: ast.expr) -> Any:
        one, other = map(self._numbers, self.all([left, right]))
        if type(op) not in _BINARY:
            raise _UnknownError
        name, compute = _BINARY[type(op)]
        return self._checked(node, name, compute(one, other), [("self", one), ("other", other)])

    def _call(self, node: ast.Call) -> Any:
        function, owner = self._function(node.func)
        given = self.all([*node.args, *(k.value for k in node.keywords)])
        if function is None or any(k.arg in (None, "out") for k in node.keywords):
            raise _UnknownError
        arguments = given[: len(node.args)]
        keywords = {k.arg: v for k, v in zip(node.keywords, given[len(node.args) :], strict=True) if k.arg is not None}
        result = function(*arguments, **keywords)
        name = str(getattr(function, "__name__", ""))
        numbers = [v for v in ([] if owner is None else [owner]) + arguments if self._is_number(v)]
        read = list(zip(("self", "other"), numbers, strict=False))
        return self._checked(node, _NAMES.get(name, name), result, read) if self._is_number(result) and read else result

    def _function(self, node: ast.expr) -> tuple[Any, Any]:
        """A function without effects, and the array whose method it is; None if it is another function."""
        if isinstance(node, ast.Name) and node.id not in self.variables:
            return _BUILTINS.get(node.id), None
        if not isinstance(node, ast.Attribute):
            return None, None
        try:
            owner = self.value(node.value)
        except _UnknownError:
            return None, None
        if isinstance(owner, ModuleType):
            found = getattr(owner, node.attr, None) if owner.__name__ in ("numpy", "numpy.linalg", "math") else None
            known = isinstance(found, self.numpy.ufunc) or node.attr in _FUNCTIONS or owner is math
            return (found if known else None), None
        is_method = isinstance(owner, self.numpy.ndarray | self.numpy.generic) and node.attr in _METHODS
        return (getattr(owner, node.attr), owner) if is_method else (None, None)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, ModuleType):
            return getattr(owner, name)
        if isinstance(owner, self.numpy.ndarray | self.numpy.generic) and name in _ATTRIBUTES:
            return getattr(owner, name)
        members = getattr(owner, "__dict__", None)
        if isinstance(members, dict) and name in members:  # a property may do anything
            return members[name]
        raise _UnknownError

    def _part(self, whole: Any, at: Any) -> Any:
        if isinstance(whole, self.numpy.ndarray) or type(whole) in (list, tuple, dict):
            return whole[at]
        raise _UnknownError

    def _is_number(self, value: Any) -> bool:
        if isinstance(value, self.numpy.ndarray):
            return value.dtype.kind in "biuf" and value.size <= _LARGE
        return isinstance(value, int | float | self.numpy.number | self.numpy.bool_)

    def _numbers(self, value: Any) -> Any:
        if not self._is_number(value):
            raise _UnknownError
        return value

    def _checked(self, node: ast.expr | None, name: str, result: Any, read: list[tuple[str, Any]]) -> Any:
        finite = self.numpy.isfinite
        if self.found is None and not finite(result).all() and all(finite(v).all() for _, v in read):
            self.found = LineOperation(name, tuple((n, self._as_tensor(v)) for n, v in read), node)
        return result

    def _as_tensor(self, value: Any) -> Tensor:
        array = self.numpy.array(value)
        return torch.as_tensor(array if array.dtype in (self.numpy.float32, self.numpy.float64) else array.astype("f8"))
