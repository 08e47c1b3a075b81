"""One turn of the program's own loop, taken from its source: run again with the variables as they are now.

Only for a forked child, since it runs the program's code on the program's own objects.
"""

from __future__ import annotations

import ast
import copy
import linecache
import os
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch

_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_STANDARD = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_RUNNERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy", "ipykernel", "IPython"))
"""Packages that run a program and have loops of their own, as the standard library has."""
_MOST_STARTS = 12
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Loop = ast.For | ast.While


@dataclass(frozen=True)
class Turn:
    """The loop around the failing call: where it is, and the names that its body uses."""

    file: str
    loop: _Loop
    at: int
    """The line in its body that was running."""
    code: CodeType
    """The function, or module, whose loop it is."""
    names: dict[str, Any]
    """The variables; in a module its own, in a function a copy together with the module's."""

    @property
    def line(self) -> int:
        """The line of the loop itself."""
        return self.loop.lineno

    @property
    def starts(self) -> list[int]:
        """The places in the body where a replay may begin: at its first statement, or at a later one."""
        return list(range(min(len(_cuts(self.loop.body, self.at)), _MOST_STARTS)))

    def first_line(self, start: int) -> int:
        """The line of the first statement that `start` does not leave out."""
        statement = _cuts(self.loop.body, self.at)[start][0]
        if not start or not isinstance(statement, ast.With | ast.Try | ast.If):
            return statement.lineno
        return min(n.lineno for n in ast.walk(statement) if isinstance(n, ast.stmt) and n is not statement)

    def assigned_before(self, start: int) -> set[str]:
        """The variables that the statements left out by `start` assign."""
        kept = {id(node) for statement in _cuts(self.loop.body, self.at)[start] for node in ast.walk(statement)}
        return {n.id for n in _stored(self.loop.body) if id(n) not in kept}

    @property
    def assigned(self) -> set[str]:
        """The variables that the body assigns."""
        return {n.id for n in _stored([self.loop])}

    def compiled(self, source: str | None = None, line: int = 0, at: int = 0, start: int = 0) -> CodeType | None:
        """The code of one turn; `source` is that of a changed file, in which the loop is on `line`."""
        loop = self.loop if source is None else find_loop(parsed(source), line)
        if loop is None:
            return None
        loop = copy.deepcopy(loop)  # it is adapted below
        body = _cuts(loop.body, at or self.at)[start] if start else loop.body
        owner = self.code.co_qualname.rpartition(".")[0].rpartition(".")[2]
        once = ast.For(ast.Name("_", ast.Store()), ast.Tuple([ast.Constant(None)], ast.Load()), list(body), [])
        tree = _Adapted(owner).visit(ast.Module([once], []))
        ast.copy_location(once, loop)
        code = compile(ast.fix_missing_locations(tree), self.file, "exec", dont_inherit=True)
        return code.replace(co_name=self.code.co_name, co_qualname=self.code.co_qualname)

    def run(self, code: CodeType) -> None:
        """Runs one turn; raises what the body raises, and `LeftLoop` if it leaves its loop."""
        self.names["__firstnan_left__"] = LeftLoop
        exec(code, self.names)

    @property
    def counts(self) -> bool:
        """Whether the loop goes through a range."""
        return isinstance(self.loop, ast.For) and _counter(self.loop) is not None

    def following(self) -> Iterator[dict[str, Any]]:
        """The loop's own variables in its next turns, as far as they can be known: numbers from a range go on."""
        if isinstance(self.loop, ast.While):
            test = compile(ast.Expression(self.loop.test), self.file, "eval")
            while eval(test, self.names):
                yield {}
            return
        counter = _counter(self.loop)
        if counter is None:
            return
        name, expression = counter
        try:
            values = eval(compile(ast.Expression(expression), self.file, "eval"), self.names)
        except Exception:
            return
        now = self.names.get(name)
        if isinstance(values, range) and isinstance(now, int) and now in values:
            for value in values[values.index(now) + 1 :]:
                yield {name: value}


class LeftLoop(BaseException):  # the program must not catch it
    """The body has left its loop."""


class _Adapted(ast.NodeTransformer):
    """The body outside its loop: `break` and `return` leave it, and private names get their class's prefix."""

    def __init__(self, owner: str) -> None:
        self._prefix = f"_{owner.lstrip('_')}" if owner and owner != "<locals>" else ""
        self._depth = 0

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._inner_loop(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._inner_loop(node)

    def _inner_loop(self, node: ast.For | ast.While) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Break(self, node: ast.Break) -> ast.AST:
        if self._depth > 1:  # an inner loop's own; the first is the one around the turn
            return node
        return ast.copy_location(ast.Raise(ast.Name("__firstnan_left__", ast.Load()), None), node)

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return ast.copy_location(ast.Raise(ast.Name("__firstnan_left__", ast.Load()), None), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if self._prefix and node.attr.startswith("__") and not node.attr.endswith("__"):
            node.attr = self._prefix + node.attr
        return node


def parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def find_loop(tree: ast.Module | None, line: int) -> _Loop | None:
    """The loop that begins on this line."""
    return next((n for n in ast.walk(tree) if isinstance(n, _Loop) and n.lineno == line), None) if tree else None


def _loops_around(tree: ast.Module, code: CodeType, line: int) -> list[_Loop]:
    """The loops of this function whose bodies contain the line, innermost first."""
    found: list[_Loop] = []

    def look(node: ast.AST, mine: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if not child.__dict__.get("lineno", line) <= line <= child.__dict__.get("end_lineno", line):
                continue
            if isinstance(child, _Function):
                first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", ()))])
                if first == code.co_firstlineno:
                    found.clear()
                look(child, first == code.co_firstlineno)
                continue
            if mine and isinstance(child, _Loop) and child.body[0].lineno <= line <= (child.body[-1].end_lineno or 0):
                found.insert(0, child)
            look(child, mine)

    look(tree, code.co_name == "<module>")
    return found


def _stored(nodes: Sequence[ast.AST]) -> Iterator[ast.Name]:
    """The names that these statements assign, where they do."""
    for node in nodes:
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                yield name


def _cuts(body: list[ast.stmt], line: int) -> list[list[ast.stmt]]:
    """The body from each of its statements on, up to the one on this line; also inside a `with`, `try` or `if`."""
    found: list[list[ast.stmt]] = []
    for i, statement in enumerate(body):
        found.append(body[i:])
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            inner = getattr(statement, "body", None)
            if isinstance(statement, ast.With | ast.Try | ast.If) and inner:
                found += [[_with_body(statement, rest), *body[i + 1 :]] for rest in _cuts(inner, line)[1:]]
            break
    return found


def _with_body(statement: Any, body: list[ast.stmt]) -> Any:
    if isinstance(statement, ast.If):
        return ast.copy_location(ast.If(ast.Constant(True), body, []), statement)
    fields = dict(ast.iter_fields(statement))
    return ast.copy_location(type(statement)(**{**fields, "body": body}), statement)


def _counter(loop: ast.For) -> tuple[str, ast.expr] | None:
    """The name and the range of a loop that counts."""
    call = loop.iter
    while isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and call.func.id == "range"):
        if not call.args:  # a progress bar around the range
            return None
        call = call.args[0]
    if isinstance(call, ast.Call) and isinstance(loop.target, ast.Name):
        return loop.target.id, call
    return None


def turns_around(frame: FrameType | None, owns: Callable[[CodeType], bool]) -> list[Turn]:
    """The loops around a frame that is running, innermost first; those of torch itself are left out."""
    frames: list[tuple[FrameType, int]] = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _turns_in(frames, owns)


def turns_in_traceback(error: BaseException, owns: Callable[[CodeType], bool]) -> list[Turn]:
    """The same for the frames that an exception has left."""
    frames: list[tuple[FrameType, int]] = []
    at = error.__traceback__
    while at is not None:
        frames.insert(0, (at.tb_frame, at.tb_lineno))
        at = at.tb_next
    return _turns_in(frames, owns)


def values_around(frame: FrameType | None) -> Iterator[Any]:
    """The variables that may hold a batch: tensors, and containers of them, of the functions that are running."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_OURS):
            for value in list(frame.f_locals.values()):
                if isinstance(value, torch.Tensor | list | tuple | dict | UserDict):
                    yield value
        frame = frame.f_back


def _turns_in(frames: list[tuple[FrameType, int]], owns: Callable[[CodeType], bool]) -> list[Turn]:
    """A library's loops count only where the user's code has called it: who runs the program has loops too."""
    users = [i for i, (frame, _) in enumerate(frames) if owns(frame.f_code)]
    inside = frames[: users[-1] + 1] if users else []
    return [turn for frame, line in inside for turn in _turns_of(frame, line)]


def _turns_of(frame: FrameType, line: int) -> list[Turn]:
    code = frame.f_code
    path = os.path.realpath(code.co_filename)
    if path.startswith((_OURS, _TORCH)) and not path.startswith(_programs()):
        return []
    if (path.startswith(_STANDARD) and _INSTALLED not in path) or any(part in path for part in _RUNNERS):
        return []
    tree = parsed("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    loops = _loops_around(tree, code, line) if tree is not None and line else []
    is_module = frame.f_locals is frame.f_globals
    names = frame.f_globals if is_module else {**frame.f_globals, **frame.f_locals}
    return [
        Turn(code.co_filename, loop, line, code, names)
        for loop in loops
        if not any(isinstance(n, ast.Yield | ast.YieldFrom | ast.Await) for n in _own_nodes(loop))
    ]


def _programs() -> tuple[str, ...]:
    """Programs in our own package that are run as a user's would be."""
    return tuple(os.path.join(_OURS, *parts, "") for parts in (("cli", "demos"), ("diagnose", "causes", "examples")))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, without those of functions defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def line_in(code: CodeType, frame: FrameType | None) -> int | None:
    """The line that is running in a turn that is run again."""
    while frame is not None:
        if frame.f_code is code:
            return frame.f_lineno
        frame = frame.f_back
    return None


def same_values(one: Any, other: Any) -> bool:
    """Whether two values of a variable are equal; a NaN equals a NaN."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    try:
        return bool(one == other)
    except Exception:  # an object of the program that cannot be compared
        return False
