"""One turn of the program's own loop, or one call of a function: run again from its source, with its variables.

Only for a forked child, since it runs the program's code on the program's own objects.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import gc
import inspect
import linecache
import os
import sys
from collections import UserDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from firstnan.engine.isolation import is_of_isolation
from firstnan.observe.forked import NotContinued
from firstnan.observe.loop_iterator import latest_value, running_iterator
from firstnan.records import LoopTurn
from firstnan.records.syntax import parse
from firstnan.tensors.finite import same_numbers, tensors_in

_OURS = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
_STANDARD = os.path.dirname(os.path.realpath(os.__file__)) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_RUNNERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("_pytest", "pluggy", "ipykernel", "IPython"))
"""Packages that run a program and have loops of their own, as the standard library has."""
_MOST_STARTS = 12
_MOST_FUNCTIONS = 8
_PAUSE = "__firstnan_pause__"
_ITERATE = "__firstnan_iterate__"
_EXCUSE = "__firstnan_excuse__"
_ONCE = "__firstnan_once__"
_AWAITED = 5.0
"""Seconds after which a body that awaits something is given up: the other tasks are not in the child."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Loop = ast.For | ast.While | ast.AsyncFor
_Binding = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor
_Block = ast.With | ast.AsyncWith | ast.Try | ast.If
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass(frozen=True)
class Turn:
    """The loop around the failing call, or a function that made it: where it is, and the names that its body uses."""

    file: str
    loop: _Loop | ast.FunctionDef
    at: int
    """The line in its body that was running."""
    code: CodeType
    """The function, or module, whose loop it is."""
    names: dict[str, Any]
    """The variables; in a module its own, in a function a copy together with the module's."""
    of_step: tuple[dict[str, Any], ...] = ()
    """The loop's own variables in each turn of a step that takes several, this one included."""

    @property
    def is_function(self) -> bool:
        return isinstance(self.loop, ast.FunctionDef)

    @property
    def given(self) -> set[str]:
        """The variables that the body starts with: the arguments of a function, or what the loop itself assigns."""
        if isinstance(self.loop, ast.FunctionDef):
            return set(_arguments(self.code))
        return {n.id for n in _stored([self.loop.target])} if isinstance(self.loop, ast.For | ast.AsyncFor) else set()

    @property
    def line(self) -> int:
        """The line of the loop itself."""
        return self.loop.lineno

    @property
    def lines(self) -> range:
        """The lines of the loop."""
        return range(self.line, (self.loop.end_lineno or self.line) + 1)

    @property
    def starts(self) -> list[int]:
        """The places in the body where a replay may begin: at its first statement, or at a later one."""
        return list(range(min(len(_cuts(self.loop.body, self.at)), _MOST_STARTS)))

    def first_line(self, start: int) -> int:
        """The line of the first statement that `start` does not leave out."""
        statement = _cuts(self.loop.body, self.at)[start][0]
        if not start or not isinstance(statement, _Block):
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

    def statement(self, start: int) -> ast.stmt:
        """The statement that a replay from `start` begins with."""
        body, index = _places(self.loop.body, self.at)[start]
        return body[index]

    def read(self) -> set[str]:
        """What the body reads without assigning it: variables, and attributes as `name.attribute`."""
        names = {n.id for n in ast.walk(self.loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        # A body that only calls a function reads what that reads from its module.
        for _ in range(2):
            functions = [f for name in names if isinstance(f := self.names.get(name), FunctionType)]
            names |= {n for f in functions if f.__globals__ is self.names for n in f.__code__.co_names}
        members = {
            f"{n.value.id}.{n.attr}"
            for n in ast.walk(self.loop)
            if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
        }
        return (names | members) - self.assigned

    def subscripted(self) -> set[str]:
        """Variables of which the loop reads only some rows: `x` where it has nothing but `x[i]`, and their number."""
        nodes = list(ast.walk(self.loop))
        parts = [n.value for n in nodes if isinstance(n, ast.Subscript) and not _has_all_rows(n.slice)]
        lengths = [n.value for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("shape", "size")]
        lengths += [n.args[0] for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == "len" and n.args]
        inside = {id(n) for n in (*parts, *lengths)}
        loads = [n for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        return {n.id for n in parts if isinstance(n, ast.Name)} - {n.id for n in loads if id(n) not in inside}

    def selected(self) -> dict[str, ast.expr]:
        """Those of them with the same index everywhere, which the body does not compute itself."""
        found: dict[str, dict[str, ast.expr]] = {}
        for n in ast.walk(self.loop):
            if isinstance(n, ast.Subscript) and isinstance(n.value, ast.Name):
                found.setdefault(n.value.id, {})[ast.unparse(n.slice)] = n.slice
        computed = {n.id for n in _stored(self.loop.body)}
        return {
            name: index
            for name in self.subscripted() - self.assigned
            if len(found[name]) == 1
            for index in found[name].values()
            if computed.isdisjoint(n.id for n in ast.walk(index) if isinstance(n, ast.Name))
        }

    def compiled(
        self,
        source: str | None = None,
        line: int = 0,
        at: int = 0,
        start: int = 0,
        *,
        rest: bool = False,
        pauses: Callable[[int], None] | None = None,
    ) -> CodeType | None:
        """The code of one turn, or of its `rest` after the statement that was running.

        `source` is that of a changed file, in which the loop is on `line`. `pauses` is called before each statement
        where a replay may begin, with the number of that place.
        """
        loop: Any = self.loop if source is None else find_loop(parsed(source), line)
        if loop is None:
            return None
        loop = copy.deepcopy(loop)  # it is adapted below
        if pauses is not None:
            self.names[_PAUSE] = pauses
            for number, (inside, index) in reversed(list(enumerate(_places(loop.body, at or self.at)))):
                if number >= start:
                    call = ast.Expr(ast.Call(ast.Name(_PAUSE, ast.Load()), [ast.Constant(number)], []))
                    call.lineno = call.end_lineno = inside[index].lineno
                    inside.insert(index, call)
        body = _cuts(loop.body, at or self.at)[start] if start else loop.body
        if rest:
            body = _after(loop.body, at or self.at) or [ast.copy_location(ast.Pass(), loop)]
        owner = self.code.co_qualname.rpartition(".")[0].rpartition(".")[2]
        once = ast.For(ast.Name(_ONCE, ast.Store()), ast.Tuple([ast.Constant(None)], ast.Load()), list(body), [])
        first = next(iter(_arguments(self.code)), "")
        tree = _Adapted(owner, first, before=at or self.at).visit(ast.Module([once], []))
        ast.copy_location(once, loop)
        tree = ast.fix_missing_locations(tree)
        code: CodeType = compile(tree, self.file, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return code.replace(co_name=self.code.co_name, co_qualname=self.code.co_qualname)

    def restore_given(self, handout: Any) -> None:
        """Gives the loop's own variables what the turn began with, where its body has assigned something else since."""
        self.names.update(self._given_at_first(handout))

    def take_back_counts(self) -> None:
        """Lowers what the body has counted (`i += 1`) before its failing statement: it counts that again."""
        for node in _done_before(self.loop.body, self.at) if not self.is_function else ():
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and _is_one_more(node):
                value = self.names.get(node.target.id)
                if type(value) is int:
                    self.names[node.target.id] = value - 1

    def batch_given(self, handout: Any) -> list[torch.Tensor]:
        """The tensors in the variables that the body starts with, as they were then."""
        first = self._given_at_first(handout)
        return [t for name in self.given for t in data_in(first.get(name, self.names.get(name)))]

    def _given_at_first(self, handout: Any) -> dict[str, Any]:
        """What the loop's own variables held at first, where the body has assigned something else since."""
        loop = self.loop
        overwritten = {n.id for n in _stored(loop.body)} & self.given if isinstance(loop, ast.For) else set()
        if not overwritten or not isinstance(loop, ast.For):
            return {}
        given = unpacked(loop.target, handout.batch, handout.batch, self.names) if handout is not None else None
        if given is None:
            given = self._latest_of_loop(loop)
        # What the body has not assigned shows whether this is what the loop has given it.
        if any(self.names.get(name) is not value for name, value in given.items() if name not in overwritten):
            return {}
        return {name: value for name, value in given.items() if name in overwritten}

    def with_step(self, count: int) -> Turn | None:
        """The same with the turns of its step before it, `count` in all; None if they cannot be known."""
        found = [self._own_before(before) for before in reversed(range(count))]
        known = tuple(names for names in found if names is not None)
        return replace(self, of_step=known) if len(known) == count else None

    def _own_before(self, before: int) -> dict[str, Any] | None:
        """The loop's own variables so many turns before this one."""
        loop = self.loop
        if isinstance(loop, ast.While):
            counted = _counted(self)
            if counted is None:
                return None
            name = counted[0]
            done = any(
                isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name) and n.target.id == name
                for n in _own_nodes(loop)
                if n.__dict__.get("lineno", self.at) < self.at
            )
            return {name: self.names[name] - before - done}
        if not isinstance(loop, ast.For):
            return None
        counter = _counter(loop)
        if counter is None:
            return self._latest_of_loop(loop, before) or None
        values, now = self._range(counter[1]), self.names.get(counter[0])
        if values is None or not isinstance(now, int) or now not in values or values.index(now) < before:
            return None
        return {counter[0]: values[values.index(now) - before]}

    def _range(self, expression: ast.expr) -> range | None:
        try:
            values = eval(compile(ast.Expression(expression), self.file, "eval"), self.names)
        except Exception:
            return None
        return values if isinstance(values, range) else None

    def _latest_of_loop(self, loop: ast.For, before: int = 0) -> dict[str, Any]:
        """The loop's own variables as its iterator has given them, or so many turns before, if that can tell."""
        tree = parsed("".join(linecache.getlines(self.file)))
        iterator = running_iterator(tree, loop, self.code) if tree is not None else None
        found, names = latest_value(iterator, before), dict[str, Any]()
        if found is None or not all(
            isinstance(n, ast.Name | ast.Tuple | ast.List | ast.expr_context) for n in ast.walk(loop.target)
        ):
            return names
        assign = ast.copy_location(ast.Assign([loop.target], ast.Name("__firstnan_given__", ast.Load())), loop.target)
        code = compile(ast.fix_missing_locations(ast.Module([assign], [])), self.file, "exec")
        exec(code, {"__firstnan_given__": found[0]}, names)
        return names

    def has_begun_since(self, before: dict[str, Any]) -> bool:
        """Whether this turn began after the function had these variables, as its loop's own ones show."""
        counted = _counted(self) if isinstance(self.loop, ast.While) else None
        names = self.given if isinstance(self.loop, ast.For) else {counted[0]} if counted is not None else set()
        return any(name in before and not same_values(before[name], self.names.get(name)) for name in names)

    def run_step(self, code: CodeType) -> None:
        """Runs the turn, and before it those of the same step."""
        for names in self.of_step[:-1]:
            self.names.update(names)
            self.run(code)
        self.names.update(self.of_step[-1] if self.of_step else {})
        self.run(code)

    def run(self, code: CodeType) -> None:
        """Runs one turn; raises what the body raises, and `LeftLoop` if it leaves its loop."""
        self.names["__firstnan_left__"], self.names[_ITERATE] = LeftLoop, _iterated
        self.names.setdefault(_EXCUSE, Excuses(self.names)).begin()
        with torch._C._EnableTorchFunction():  # it is off while we work inside of a mode of the program's
            body = eval(code, self.names)
            if inspect.iscoroutine(body):
                _awaited(body)

    @property
    def returns(self) -> bool:
        """Whether its body may leave the function, not only the loop."""
        return any(isinstance(node, ast.Return) for node in _own_nodes(self.loop))

    @property
    def counts(self) -> bool:
        """Whether the loop goes through a range."""
        return isinstance(self.loop, ast.For) and _counter(self.loop) is not None

    def following(self) -> Iterator[dict[str, Any]]:
        """The loop's own variables in its next turns, as far as they can be known: numbers from a range go on."""
        asked = self.loop.test if isinstance(self.loop, ast.While) else None
        if isinstance(self.loop, ast.AsyncFor) or is_suspended(asked):
            raise NotContinued("what the loop would go through next is not known")
        if isinstance(self.loop, ast.While):
            test = compile(ast.Expression(self.loop.test), self.file, "eval")
            while eval(test, self.names):
                yield {}
            return
        counter = _counter(self.loop) if isinstance(self.loop, ast.For) else None
        if counter is None:
            return
        name, expression = counter
        values, now = self._range(expression), self.names.get(name)
        if values is not None and isinstance(now, int) and now in values:
            for value in values[values.index(now) + 1 :]:
                yield {name: value}


class Excuses:
    """Which errors of statements that are there for their effects alone come from nobody answering in the child.

    In the failing turn such a statement has raised nothing before the failing one: where it does so now, the program
    would have gone on. The same error is excused later, too, and so is one that says that nobody answers.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._places: set[tuple[CodeType, int]] = set()
        self._turns = 0

    def begin(self) -> None:
        self._turns += 1

    def __call__(self, before: bool) -> bool:
        """Whether the error that is handled is excused; `before`: its statement comes before the failing one."""
        error = sys.exc_info()[1]
        at = error.__traceback__ if error is not None else None
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        if at is None:
            return False
        place = at.tb_frame.f_code, at.tb_lineno
        if before and self._turns == 1:
            self._places.add(place)
        return place in self._places or is_of_isolation(error)

    def answer(self, *names: str) -> bool:
        """Whether variables keep what the last turn has assigned to them, since nobody answers here.

        Never data: in the failing turn a number or a status, in later turns only a status.
        """
        error, kept = sys.exc_info()[1], [self._names.get(name, ...) for name in names]
        kinds = (bool, str, type(None), int, float) if self._turns == 1 else (bool, str, type(None))
        return all(isinstance(value, kinds) for value in kept) and is_of_isolation(error)


def _iterated(values: Any) -> Any:
    """What `yield from` evaluates to, without anybody who takes the values."""
    iterator = iter(values)
    while True:
        try:
            next(iterator)
        except StopIteration as stop:
            return stop.value


def _awaited(body: Coroutine[Any, Any, None]) -> None:
    """Runs a body that awaits something, in an event loop of its own: the program's has its tasks and connections."""
    for one in gc.get_objects():
        if issubclass(type(one), asyncio.mixins._LoopBoundMixin):  # a queue or a lock; it belongs to one event loop
            one._loop = None

    async def limited() -> None:
        limit = asyncio.timeout(_AWAITED)
        try:
            async with limit:
                await body
        except TimeoutError:
            if limit.expired():
                raise NotContinued("there the program waits for another task") from None
            raise

    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(limited())
    finally:
        asyncio._set_running_loop(running)


def is_suspended(node: ast.AST | None) -> bool:
    """Whether something here waits for others, or hands a value to them."""
    return node is not None and any(isinstance(n, ast.Await | ast.Yield | ast.YieldFrom) for n in ast.walk(node))


class LeftLoop(BaseException):  # the program must not catch it
    """The body has left its loop."""


class _Adapted(ast.NodeTransformer):
    """The body outside its loop or function: `break` and `return` leave it, nobody takes what it yields, private names
    get their class's prefix, and `super()` its arguments."""

    def __init__(self, owner: str, first: str = "", before: int = 0) -> None:
        """`first`: the name of the function's first argument. `before`: the line of the failing statement."""
        self._before = before
        self._prefix = f"_{owner.lstrip('_')}" if owner and owner != "<locals>" else ""
        self._first = first
        self._depth = 0

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._inner_loop(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._inner_loop(node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self._inner_loop(node)

    def _inner_loop(self, node: _Loop) -> ast.AST:
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

    def visit_Yield(self, node: ast.Yield) -> ast.AST:
        self.generic_visit(node)
        parts = ast.Tuple([node.value or ast.Constant(None), ast.Constant(None)], ast.Load())
        return ast.copy_location(ast.Subscript(parts, ast.Constant(1), ast.Load()), node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Call(ast.Name(_ITERATE, ast.Load()), [node.value], []), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """A statement for its effect alone, such as a message to a server, may fail where nobody answers."""
        self.generic_visit(node)
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or (isinstance(call.func, ast.Name) and call.func.id == _PAUSE):
            return node
        return self._excused(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """The test may ask somebody who does not answer: `assert server.recv() == "ok"`."""
        self.generic_visit(node)
        fails = node.lineno <= self._before <= (node.end_lineno or node.lineno)
        return node if fails else self._excused(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """What a server or another process answers after the failing statement: `ok = server.send(loss)`."""
        self.generic_visit(node)
        names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        asks = any(isinstance(one, ast.Call) for one in ast.walk(node.value))
        if node.lineno <= self._before or len(names) < len(node.targets) or not asks:
            return node
        answer = ast.Attribute(ast.Name(_EXCUSE, ast.Load()), "answer", ast.Load())
        given: list[ast.expr] = [ast.Constant(name) for name in names]
        return self._unless(ast.Call(answer, given, []), node)

    def _excused(self, node: ast.Expr | ast.Assert) -> ast.AST:
        before = ast.Constant((node.end_lineno or node.lineno) < self._before)
        return self._unless(ast.Call(ast.Name(_EXCUSE, ast.Load()), [before], []), node)

    def _unless(self, excuse: ast.expr, node: ast.stmt) -> ast.AST:
        """The statement; an error is raised unless it is excused."""
        otherwise = ast.If(ast.UnaryOp(ast.Not(), excuse), [ast.Raise(None, None)], [])
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [otherwise])
        return ast.copy_location(ast.Try([node], [handler], [], []), node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)  # the variables are in one place here

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args and self._first:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self._first, ast.Load())]
        return node

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
        return parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def find_loop(tree: ast.Module | None, line: int) -> _Loop | None:
    """The loop that begins on this line."""
    return next((n for n in ast.walk(tree) if isinstance(n, _Loop) and n.lineno == line), None) if tree else None


def _arguments(code: CodeType) -> tuple[str, ...]:
    """The names of a function's arguments, `*args` and `**kwargs` included."""
    many = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + many]


def _function(tree: ast.Module, code: CodeType) -> ast.FunctionDef | None:
    """The function whose code this is."""
    return next((n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and _is(n, code)), None)


def _is(function: ast.FunctionDef, code: CodeType) -> bool:
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    return (function.name, first) == (code.co_name, code.co_firstlineno)


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


def _has_all_rows(index: ast.expr) -> bool:
    """Whether an index leaves the rows as they are: `[:, 0]`, `[:]`, `[...]`."""
    first = index.elts[0] if isinstance(index, ast.Tuple) and index.elts else index
    if isinstance(first, ast.Slice):
        return not (first.lower or first.upper or first.step)
    return isinstance(first, ast.Constant) and first.value in (None, Ellipsis)


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
            if isinstance(statement, _Block) and inner:
                found += [[_with_body(statement, rest), *body[i + 1 :]] for rest in _cuts(inner, line)[1:]]
            break
    return found


def _done_before(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements of a body that were certainly run before its statement on this line."""
    for statement in body:
        if statement.lineno > line:
            return
        leaves = (ast.Continue, ast.Break, ast.Return, ast.Raise)
        tried = isinstance(statement, ast.Try) and all(isinstance(h.body[-1], leaves) for h in statement.handlers)
        if tried or isinstance(statement, ast.With | ast.AsyncWith):
            yield from _done_before(statement.body, line)  # type: ignore[attr-defined]
        if (statement.end_lineno or statement.lineno) < line:
            yield statement


def _after(body: list[ast.stmt], line: int) -> list[ast.stmt]:
    """What a body does after its statement on this line; also inside a `with`, `try` or `if`."""
    for i, statement in enumerate(body):
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            inner = statement.body if isinstance(statement, _Block) else []
            left = _after(inner, line)
            return [*([_with_body(statement, left)] if left else []), *body[i + 1 :]]
    return []


def _places(body: list[ast.stmt], line: int) -> list[tuple[list[ast.stmt], int]]:
    """Where each part of `_cuts` begins: a list of statements, and the index in it."""
    found: list[tuple[list[ast.stmt], int]] = []
    for i, statement in enumerate(body):
        found.append((body, i))
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            inner = getattr(statement, "body", None)
            if isinstance(statement, _Block) and inner:
                found += _places(inner, line)[1:]
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


def loops_of(turns: Sequence[Turn], owns: Callable[[CodeType], bool]) -> tuple[LoopTurn, ...]:
    """How far the user's loops were, the outermost first; those without a variable that counts are left out."""
    found = []
    for turn in reversed(turns):
        counted = _counted(turn) if owns(turn.code) else None
        if counted is not None:
            name, first = counted
            value = turn.names[name]
            turns_made = max(value - first, 0) if first is not None else None
            found.append(LoopTurn(turn.file, turn.line, name, value, turns_made))
    return tuple(found)


def _counted(turn: Turn) -> tuple[str, int | None] | None:
    """The variable that counts the turns of a loop, and the number it began with."""
    loop = turn.loop
    if isinstance(loop, ast.While):
        steps = [n for n in _own_nodes(loop) if isinstance(n, ast.AugAssign) and _is_one_more(n)]
        inner = {id(n) for other in _own_nodes(loop) if isinstance(other, _Loop) for n in ast.walk(other)}
        names = [n.target.id for n in steps if isinstance(n.target, ast.Name) and id(n) not in inner]
        known = [name for name in names if type(turn.names.get(name)) is int and turn.names[name] >= 0]
        return (known[0], None) if known else None
    if not isinstance(loop, ast.For):
        return None
    call = loop.iter
    while isinstance(call, ast.Call) and not (isinstance(call.func, ast.Name) and call.func.id in _COUNTING):
        if not call.args:
            return None
        call = call.args[0]
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple | ast.List) and loop.target.elts else loop.target
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or not isinstance(target, ast.Name):
        return None
    value = turn.names.get(target.id)
    if type(value) is not int or value < 0:
        return None
    return target.id, _COUNTING[call.func.id](call, value)


def _is_one_more(node: ast.AugAssign) -> bool:
    return isinstance(node.op, ast.Add) and isinstance(node.value, ast.Constant) and node.value.value == 1


def _begin_of_enumerate(call: ast.Call, value: int) -> int | None:
    given = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "start")]
    return _whole(given[0]) if given else 0


def _begin_of_range(call: ast.Call, value: int) -> int | None:
    """The number that is to be subtracted from the value to have the number of the turn."""
    if len(call.args) == 1:
        return 0
    first, step = _whole(call.args[0]), _whole(call.args[2]) if len(call.args) > 2 else 1
    return None if first is None or not step else value - (value - first) // step


def _whole(node: ast.expr) -> int | None:
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


_COUNTING = {"range": _begin_of_range, "enumerate": _begin_of_enumerate, "trange": _begin_of_range}


def turns_around(frame: FrameType | None, owns: Callable[[CodeType], bool]) -> list[Turn]:
    """The loops around a frame that is running, innermost first; those of torch itself are left out."""
    frames: list[tuple[FrameType, int]] = []
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _turns_in(frames, owns)


def calls_around(frame: FrameType | None, owns: Callable[[CodeType], bool]) -> list[Turn]:
    """The functions that are running inside the innermost loop, innermost first, without those that only pass on
    what was computed outside of them."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    # Outside of the user's code it is what runs the program.
    users = [i for i, one in enumerate(frames) if owns(one.f_code)]
    found: list[Turn] = []
    for one in frames[: users[-1] + 1] if users else []:
        if is_left_out(one.f_code):
            continue
        if _turns_of(one, one.f_lineno) or len(found) == _MOST_FUNCTIONS:
            break
        turn = _call_of(one)
        if turn is not None:
            found.append(turn)
    return found


def _call_of(frame: FrameType) -> Turn | None:
    code = frame.f_code
    if code.co_flags & _SUSPENDED or code.co_name.startswith("<"):
        return None
    values = [frame.f_locals.get(name) for name in _arguments(code)]
    values = [value for value in values if isinstance(value, torch.Tensor | list | tuple | dict)]
    if any(t.grad_fn is not None for value in values for _, t in tensors_in(value, depth=1)):
        return None  # the step began before this call
    tree = parsed("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    function = _function(tree, code) if tree is not None else None
    if function is None:
        return None
    return Turn(code.co_filename, function, frame.f_lineno, code, {**frame.f_globals, **frame.f_locals})


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
        yield from _values_of(frame)
        frame = frame.f_back


def values_needed(frame: FrameType | None) -> Iterator[Any]:
    """Those of these variables that the running statements depend on, as the source shows."""
    while frame is not None:
        code = frame.f_code
        if not is_left_out(code) and (body := _body_of(code, frame.f_globals)) is not None:
            wanted = _needed(body, frame.f_lineno)
            yield from (value for name, value in _data_of(frame) if name in wanted)
        frame = frame.f_back


def _body_of(code: CodeType, names: dict[str, Any]) -> ast.AST | None:
    tree = parsed("".join(linecache.getlines(code.co_filename, names)))
    return tree if tree is None or code.co_name == "<module>" else _function(tree, code)


def _needed(body: ast.AST, line: int) -> set[str]:
    """The names whose present values the statement on a line, or a backward call before it, has been computed from.

    The source is followed backward: `batch, ahead = ahead, next(it)` reads an `ahead` that is gone."""
    parts = [n for n in _own_nodes(body) if isinstance(n, _Binding | ast.Expr | ast.Return)]
    before = sorted((n for n in parts if _line_of(n) <= line), key=_line_of, reverse=True)
    read, needed, written = set[str](), set[str](), set[str]()
    for node in before:
        stored, loaded = _names(node, ast.Store), _names(node, ast.Load)
        if isinstance(node, ast.AugAssign):
            loaded |= stored
        ends = getattr(node, "end_lineno", None) or _line_of(node)
        if ends >= line or not read.isdisjoint(stored) or _calls_backward(node):
            written |= stored
            read |= loaded
            needed |= loaded - written
        written |= stored
    return needed


def _line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The names that a statement stores or loads; of a loop, those of its first line."""
    parts = [node.target, node.iter] if isinstance(node, ast.For | ast.AsyncFor) else [node]
    inside = (n for part in parts for n in ast.walk(part) if isinstance(n, ast.Name))
    return {n.id for n in inside if isinstance(n.ctx, context)}


def _calls_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and any(
        isinstance(n, ast.Attribute) and n.attr == "backward" for n in ast.walk(node)
    )


def values_in_traceback(error: BaseException) -> Iterator[Any]:
    """The same of the functions that an exception has left, innermost first."""
    frames, at = list[FrameType](), error.__traceback__
    while at is not None:
        frames.append(at.tb_frame)
        at = at.tb_next
    for frame in reversed(frames):
        yield from _values_of(frame)


def _values_of(frame: FrameType) -> Iterator[Any]:
    if not frame.f_code.co_filename.startswith(_OURS):
        yield from (value for _, value in _data_of(frame))


def _data_of(frame: FrameType) -> Iterator[tuple[str, Any]]:
    for name, value in list(frame.f_locals.items()):
        if isinstance(value, torch.Tensor | list | tuple | dict | UserDict):
            yield name, value


def _turns_in(frames: list[tuple[FrameType, int]], owns: Callable[[CodeType], bool]) -> list[Turn]:
    """A library's loops count only where the user's code has called it: who runs the program has loops too."""
    users = [i for i, (frame, _) in enumerate(frames) if owns(frame.f_code)]
    inside = frames[: users[-1] + 1] if users else []
    return [turn for frame, line in inside for turn in _turns_of(frame, line)]


def _turns_of(frame: FrameType, line: int) -> list[Turn]:
    code = frame.f_code
    if is_left_out(code):
        return []
    tree = parsed("".join(linecache.getlines(code.co_filename, frame.f_globals)))
    loops = _loops_around(tree, code, line) if tree is not None and line else []
    is_module = frame.f_locals is frame.f_globals
    names = frame.f_globals if is_module else {**frame.f_globals, **frame.f_locals}
    return [Turn(code.co_filename, loop, line, code, names) for loop in loops]


def turn_at(code: CodeType, line: int, variables: dict[str, Any], names: dict[str, Any]) -> Turn | None:
    """The innermost loop of a function around a line, or the function itself, with these names."""
    tree = parsed("".join(linecache.getlines(code.co_filename, variables)))
    loops = _loops_around(tree, code, line) if tree is not None else []
    loop = loops[0] if loops else _function(tree, code) if tree is not None else None
    return Turn(code.co_filename, loop, line, code, names) if loop is not None else None


def is_left_out(code: CodeType) -> bool:
    """Whether this is code of torch, of Python or of ours, or of what runs the program."""
    path = os.path.realpath(code.co_filename)
    if path.startswith((_OURS, _TORCH)) and not path.startswith(_programs()):
        return True
    return (path.startswith(_STANDARD) and _INSTALLED not in path) or any(part in path for part in _RUNNERS)


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
        return same_numbers(one, other)
    try:
        return bool(one == other)
    except Exception:  # an object of the program that cannot be compared
        return False


# --- the batch in a turn's variables --------------------------------------------------------------------------------


def data_in(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a variable that may hold a batch."""
    if isinstance(value, torch.Tensor | list | tuple | dict | UserDict):
        yield from (t for _, t in tensors_in(value, depth=depth))


def names_in(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def unpacked(target: ast.expr, batch: Any, before: Any, names: dict[str, Any]) -> dict[str, Any] | None:
    """The variables of the loop for a batch: where the batch before was taken apart, or kept whole."""
    if isinstance(target, ast.Name):
        held = names.get(target.id)
        if type(held) is tuple and held is not before and any(one is before for one in held):  # of enumerate or zip
            return {target.id: tuple(batch if one is before else one + 1 if type(one) is int else one for one in held)}
        return {target.id: batch} if type(held) is not int else None
    if not isinstance(target, ast.Tuple | ast.List):
        return None
    parts = target.elts
    whole = [p for p in parts if isinstance(p, ast.Name) and names.get(p.id) is before]
    if whole and isinstance(whole[0], ast.Name):
        return {whole[0].id: batch}
    for part in parts:
        if isinstance(part, ast.Tuple | ast.List):
            inner = unpacked(part, batch, before, names)
            if inner is not None:
                return inner
    if isinstance(batch, list | tuple) and len(batch) == len(parts) and all(isinstance(p, ast.Name) for p in parts):
        return {p.id: value for p, value in zip(parts, batch, strict=True) if isinstance(p, ast.Name)}
    rest = [p for p in parts if isinstance(p, ast.Name) and type(names.get(p.id)) is not int]
    return {rest[0].id: batch} if len(rest) == 1 and isinstance(rest[0], ast.Name) else None


def with_batch_first(calls: Sequence[Turn], handout: Any) -> list[Turn]:
    """The same functions, first those that were called with the batch: they can be called with other samples too."""
    batch = {id(t) for _, t in tensors_in(handout.batch)} if handout is not None else set()
    return sorted(calls, key=lambda c: all(id(t) not in batch for n in c.given for t in data_in(c.names.get(n))))


def holds_batch(turn: Turn, handout: Any) -> bool | None:
    """Whether the body has the batch in the variables it begins with; None if they hold something made of it."""
    known = {id(t): t for _, t in tensors_in(handout.batch)}
    lengths = {t.shape[0] for t in known.values() if t.dim()}
    held = turn.batch_given(handout)
    if any(id(t) not in known and not t.requires_grad and t.dim() and t.shape[0] in lengths for t in held):
        return None
    return any(id(t) in known for t in held)


def with_batch(turn: Turn, old: Any, new: Any) -> dict[str, Any]:
    """The variables with another batch, of the same form, in place of the old one."""
    pairs = zip(tensors_in(old), tensors_in(new), strict=True)
    others = {id(one): other for (_, one), (_, other) in pairs}
    found = {name: turn.names[name] for name in turn.assigned | turn.given if name in turn.names}
    return {name: _exchanged(value, others) for name, value in found.items()}


def _exchanged(value: Any, others: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if all(id(t) not in others for t in data_in(value)):
        return value
    if isinstance(value, dict | UserDict):
        make: Any = type(value)
        return make({key: _exchanged(one, others) for key, one in value.items()})
    parts = [_exchanged(one, others) for one in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
