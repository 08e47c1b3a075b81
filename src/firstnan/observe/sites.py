"""Places in source: an instruction's line and expression, whose code it is, and where training is set up."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any

from firstnan.records import Site
from firstnan.records.errors import NonFiniteError
from firstnan.records.syntax import parse

Spot = tuple[CodeType, int]
Spots = tuple[Spot | None, Spot | None, bool]
_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_LIBRARY = tuple(
    {os.path.realpath(p) + os.sep for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")) if p}
    | {p + os.sep for p in (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")) if p}
)
_MAX_SOURCE_LINES = 8
ENGINE = "_engine_run_backward"
"""torch's function that runs the autograd engine."""
_ON_OUR_OWN = "_run_on_our_own"
"""The function of ours that calls the user's model by itself; its callers are not where a value is made."""
_BOUNDARIES = (ENGINE, _ON_OUR_OWN)
# Frames between an operator and a dispatch mode, in every stack.
_INTERNAL = (f"torch{os.sep}_dynamo{os.sep}", f"torch{os.sep}_compile.py")


def directories(frame: FrameType) -> list[str]:
    """The folders of the user's code: those of the main program and of this frame's file."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if frame.f_code.co_filename.startswith(_PACKAGE):  # a callback of ours: the user's code is whoever trains with it
        plain, at = Ownership(), frame.f_back
        while at is not None and not plain.owns(at.f_code):
            at = at.f_back
        frame = at or frame
    names = (main, frame.f_code.co_filename)
    folders = (_folder(name) for name in names if name and not name.startswith(_PACKAGE))
    return [folder for folder in folders if folder is not None]


@lru_cache(maxsize=64)
def _folder(name: str) -> str | None:
    """The folder of an existing file, with links resolved."""
    return os.path.dirname(os.path.realpath(name)) if os.path.exists(name) else None


class Ownership:
    """Decides which code is the user's: everything outside the standard library and installed packages,
    and the program itself wherever it is."""

    def __init__(self, program_dirs: tuple[str, ...] = ()) -> None:
        self._dirs, self._known = _decided(program_dirs)

    def owns(self, code: CodeType) -> bool:
        return self.owns_file(code.co_filename)

    def owns_file(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._decide(name)
        return known

    def _decide(self, name: str) -> bool:
        if name.startswith("<"):
            # Notebook cells and standard input are the user's; "<string>" is generated code.
            return name.startswith(("<ipython", "<stdin"))
        path = real_path(name)
        if os.path.dirname(path) + os.sep in self._dirs:
            return True
        # The folder nearest to the file decides: a program may be inside site-packages, and a virtual environment, an
        # interpreter or this package inside the program's folder.
        user = max((len(d) for d in self._dirs if path.startswith(d)), default=0)
        library = max((len(d) for d in (_PACKAGE, *_LIBRARY) if path.startswith(d)), default=0)
        installed = max(path.rfind(mark) + len(mark) if mark in path else 0 for mark in _INSTALLED)
        return user > max(library, installed) if user else not (library or installed)

    def spots(self, frame: FrameType | None) -> Spots:
        """The nearest user frame; the innermost frame, if that is a library's; and whether the autograd engine is
        between them (then the user frame is only the one that called backward)."""
        inner: Spot | None = None
        engine = False
        known = self._known
        wrapper: tuple[Spot, Spot | None, bool] | None = None
        while frame is not None:  # Few instructions for each frame: this runs for every operator.
            code = frame.f_code
            own = known.get(code.co_filename)
            if own or (own is None and self.owns(code)):
                lasti = frame.f_lasti
                may_pass_on = code.co_name in _PASSING_ON or code.co_freevars
                if not may_pass_on or not passes_on(code.co_filename, code, lasti):
                    return (code, lasti), inner, engine
                wrapper = wrapper or ((code, lasti), inner, engine)
            elif code.co_name in _BOUNDARIES:
                if code.co_name == _ON_OUR_OWN:
                    return None, inner, engine
                if wrapper is not None:
                    break
                engine = True
            elif inner is None and not _is_internal(code.co_filename):
                inner = (code, frame.f_lasti)
            frame = frame.f_back
        return wrapper or (None, inner, engine)


@lru_cache(maxsize=64)
def _decided(program_dirs: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, bool]]:
    """These folders with links resolved, and the shared cache for them: file name -> whether it is the user's."""
    return tuple(os.path.realpath(d).rstrip(os.sep) + os.sep for d in program_dirs if d), {}


def real_path(name: str) -> str:
    """The file with links resolved. Thousands of modules share a few hundred folders: each is resolved once."""
    folder, file = os.path.split(name)
    if not os.path.isabs(folder) or file in ("", os.curdir, os.pardir):
        return os.path.realpath(name)
    path = os.path.join(_real_folder(folder), file)
    return os.path.realpath(path) if os.path.islink(path) else path


@lru_cache(maxsize=1024)
def _real_folder(folder: str) -> str:
    return os.path.realpath(folder)


@lru_cache(maxsize=1024)
def _is_internal(name: str) -> bool:
    return real_path(name).startswith(_PACKAGE) or any(mark in name for mark in _INTERNAL)


def resolve(spot: Spot) -> Site:
    """The source position of one instruction, with the expression it belongs to."""
    code, lasti = spot
    return _resolve(code.co_filename, code, lasti)


def _expression(lines: list[str], line: int, column: int, end_line: int, end_column: int) -> tuple[int, int, str]:
    """The columns of an expression in characters, and its code."""
    # The compiler counts columns in UTF-8 bytes, not characters.
    column = len(lines[line - 1].encode()[:column].decode(errors="replace"))
    end_column = len(lines[end_line - 1].encode()[:end_column].decode(errors="replace"))
    if line == end_line:
        text = lines[line - 1][column:end_column].rstrip("\n")
    else:
        text = " ".join(
            s.strip() for s in [lines[line - 1][column:], *lines[line : end_line - 1], lines[end_line - 1][:end_column]]
        )
    return column, end_column, text


# The name is part of the key: Python treats equal code objects from two files as equal.
@lru_cache(maxsize=4096)
def _resolve(name: str, code: CodeType, lasti: int) -> Site:
    line, end_line, column, end_column = _positions(code, lasti)
    lines = linecache.getlines(name)
    if line is None:
        return Site(name, code.co_firstlineno, function=code.co_name)
    first, last = _statement(name, line, end_line or line)
    if end_line is not None and end_line > last:
        # The instruction that fetches a `for` loop's next item spans the whole loop; only its first line is meant.
        head = lines[last - 1].rstrip() if last <= len(lines) else ""
        end_line, end_column = last, len(head.encode())
    source = tuple(text.rstrip("\n") for text in lines[first - 1 : last])[:_MAX_SOURCE_LINES]
    if not lines or column is None or end_column is None or end_line is None or end_line > len(lines):
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return Site(name, line, function=code.co_name, code=text, source=source, source_line=first)
    column, end_column, text = _expression(lines, line, column, end_line, end_column)
    return Site(name, line, column, end_line, end_column, code.co_name, text, source, first)


def site_on_line(file: str, line: int, function: str, name: str) -> Site:
    """A place of which only the line is known: the call of this name there, if there is one, or the statement."""
    first, last = _statement(file, line, line)
    source = tuple(text.rstrip("\n") for text in linecache.getlines(file)[first - 1 : last])[:_MAX_SOURCE_LINES]
    site, tree = Site(file, line, function=function, source=source, source_line=first), _tree(file)
    calls = [
        node
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.Call)
        and first <= node.lineno <= last
        and node.lineno == node.end_lineno
        and getattr(node.func, "attr", getattr(node.func, "id", None)) == name
    ]
    if len(calls) != 1 or not source:
        return whole_statement(site)
    [call], lines = calls, linecache.getlines(file)
    column, end = (
        len(lines[call.lineno - 1].encode()[:n].decode()) for n in (call.col_offset, call.end_col_offset or 0)
    )
    text = lines[call.lineno - 1][column:end]
    return replace(site, line=call.lineno, column=column, end_line=call.lineno, end_column=end, code=text)


def function_site(code: CodeType) -> Site:
    """The place of a function, or of a lambda: its first line."""
    line = code.co_firstlineno
    text = linecache.getline(code.co_filename, line).strip()
    return Site(code.co_filename, line, function=code.co_name, code=text.rstrip(":"), source_line=line)


def _positions(code: CodeType, lasti: int) -> tuple[int | None, int | None, int | None, int | None]:
    try:
        return list(code.co_positions())[lasti // 2]
    except IndexError:
        return code.co_firstlineno, None, None, None


@lru_cache(maxsize=64)
def _tree(name: str) -> ast.Module | None:
    try:
        return parse("".join(linecache.getlines(name)))
    except (SyntaxError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=4096)
def _statement(name: str, line: int, end_line: int) -> tuple[int, int]:
    """First and last line of the smallest statement around these lines, without the body of a compound statement."""
    tree = _tree(name)
    first, last = line, end_line
    depth = 0
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.stmt) and depth < node.lineno <= line and (node.end_lineno or 0) >= end_line:
            body = getattr(node, "body", None)
            end = max(body[0].lineno - 1, node.lineno) if body else node.end_lineno or node.lineno
            if line <= end:
                first, last, depth = node.lineno, end, node.lineno
    return first, last


def statement_at(spot: Spot) -> ast.stmt | None:
    """The statement with this instruction; None if it has others inside, or shares its line with others."""
    code, lasti = spot
    line, end_line, _, _ = _positions(code, lasti)
    return _simple_statement(code.co_filename, line, end_line or line) if line is not None else None


@lru_cache(maxsize=1024)
def _simple_statement(name: str, line: int, end_line: int) -> ast.stmt | None:
    tree, (first, last) = _tree(name), _statement(name, line, end_line)
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno == first] if tree else []
    return nodes[0] if len(nodes) == 1 and nodes[0].end_lineno == last and not hasattr(nodes[0], "body") else None


def names_read(spot: Spot) -> frozenset[str]:
    """The variables, and attributes of variables, that the statement with this instruction reads."""
    code, lasti = spot
    line, end_line, _, _ = _positions(code, lasti)
    return _names_read(code.co_filename, line, end_line or line) if line is not None else frozenset()


def names_read_on(site: Site) -> frozenset[str]:
    """The same for a place in the source."""
    return _names_read(site.file, site.line, site.end_line or site.line)


@lru_cache(maxsize=4096)
def _names_read(name: str, line: int, end_line: int) -> frozenset[str]:
    tree, (first, last) = _tree(name), _statement(name, line, end_line)
    names = set()
    for node in ast.walk(tree) if tree else ():
        if not first <= getattr(node, "lineno", 0) <= last:
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return frozenset(names)


def columns_read(spot: Spot) -> Mapping[str, frozenset[str]]:
    """The columns, as they are written, that the statement reads of variables which it reads only by columns."""
    code, lasti = spot
    line, end_line, _, _ = _positions(code, lasti)
    return _columns_read(code.co_filename, line, end_line or line) if line is not None else {}


@lru_cache(maxsize=4096)
def _columns_read(name: str, line: int, end_line: int) -> Mapping[str, frozenset[str]]:
    tree, (first, last) = _tree(name), _statement(name, line, end_line)
    found: dict[str, set[str]] = {}
    whole: set[str] = set()
    by_column: set[ast.expr] = set()
    for node in ast.walk(tree) if tree else ():  # a parent comes before its parts
        if not first <= getattr(node, "lineno", 0) <= last:
            continue
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
            found.setdefault(ast.unparse(node.target.value), set()).update(_constants(node.target.slice) or ())
        if isinstance(node, ast.Subscript):
            table, key = node.value, node.slice
            if isinstance(table, ast.Attribute) and table.attr in ("loc", "at") and isinstance(key, ast.Tuple):
                by_column.add(table)
                table, key = table.value, key.elts[-1]
            columns = _constants(key)
            if columns is not None:
                by_column.add(table)
                read = columns if isinstance(node.ctx, ast.Load) else ()
                found.setdefault(ast.unparse(table), set()).update(read)
        elif isinstance(node, ast.Name | ast.Attribute) and node not in by_column and isinstance(node.ctx, ast.Load):
            whole.add(ast.unparse(node))
    return {table: frozenset(columns) for table, columns in found.items() if table not in whole}


def _constants(node: ast.expr) -> set[str] | None:
    """The literals that this is, or is a list of."""
    parts = node.elts if isinstance(node, ast.List) else [node]
    found = {repr(part.value) for part in parts if isinstance(part, ast.Constant)}
    return found if all(isinstance(part, ast.Constant) for part in parts) else None


def names_assigned(spot: Spot) -> frozenset[str]:
    """The variables that the statement with this instruction assigns, also by `+=` and the like."""
    statement = statement_at(spot)
    nodes = ast.walk(statement) if statement is not None else ()
    return frozenset(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def names_written(spot: Spot) -> frozenset[str]:
    """The variables, and attributes of variables, into whose value the statement with this instruction writes."""
    code, lasti = spot
    line, end_line, _, _ = _positions(code, lasti)
    return _names_written(code.co_filename, line, end_line or line) if line is not None else frozenset()


@lru_cache(maxsize=4096)
def _names_written(name: str, line: int, end_line: int) -> frozenset[str]:
    tree, (first, last) = _tree(name), _statement(name, line, end_line)
    found: list[ast.expr] = []
    for node in ast.walk(tree) if tree else ():
        if not first <= getattr(node, "lineno", 0) <= last:
            continue
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.append(node.value)
        elif isinstance(node, ast.AugAssign):
            found.append(node.target)
        elif isinstance(node, ast.keyword) and node.arg == "out":
            found.append(node.value)
    return frozenset(ast.unparse(node) for node in found if isinstance(node, ast.Name | ast.Attribute))


_OVERRIDES = ("__torch_function__", "__torch_dispatch__")
_PASSING_ON = (*_OVERRIDES, "__call__")
"""Methods that may only pass on a call; of other functions, those that are given one by the function around them."""


@lru_cache(maxsize=1024)
def passes_on(name: str, code: CodeType, lasti: int) -> bool:
    """Whether this instruction only calls what the function was given, with the arguments that it was given.

    Decorators, function modes and tensor subclasses do so; the line that is meant is their caller's.
    """
    line, end_line, column, end_column = _positions(code, lasti)
    place = (line, column, end_line, end_column)
    tree = _tree(name)
    call = next((n for n in ast.walk(tree) if isinstance(n, ast.Call) and _place(n) == place), None) if tree else None
    if call is None:
        return False
    given = code.co_argcount + code.co_kwonlyargcount
    given += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    parameters = code.co_varnames[:given]
    called = call.func
    if isinstance(called, ast.Attribute):
        own = isinstance(called.value, ast.Name) and called.value.id in parameters[:1] and code.co_name == "__call__"
        if not own and called.attr not in _OVERRIDES:
            return False
    elif not (isinstance(called, ast.Name) and called.id in (*parameters, *code.co_freevars)):
        return False
    spread = {a.value.id for a in call.args if isinstance(a, ast.Starred) and isinstance(a.value, ast.Name)}
    plain = {a.id for a in call.args if isinstance(a, ast.Name)} if called.__dict__.get("attr") in _OVERRIDES else set()
    return not (spread | plain).isdisjoint(parameters)


def _place(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def whole_statement(site: Site) -> Site:
    """The site of the whole statement, for when no single expression in it is meant."""
    if not site.source or site.source_line is None:
        return site
    first, last = site.source[0], site.source[-1]
    return replace(
        site,
        line=site.source_line,
        column=len(first) - len(first.lstrip()),
        end_line=site.source_line + len(site.source) - 1,
        end_column=len(last.rstrip()),
        code=" ".join(text.strip() for text in site.source),
    )


def site_of_expression(site: Site, node: ast.expr) -> Site:
    """The site of an expression in the statement of another site."""
    lines, last = linecache.getlines(site.file), node.end_lineno or node.lineno
    if last > len(lines) or node.end_col_offset is None:
        return site
    column, end_column, code = _expression(lines, node.lineno, node.col_offset, last, node.end_col_offset)
    return replace(site, line=node.lineno, column=column, end_line=last, end_column=end_column, code=code)


_DEEPEST = 64
_TELLING = 6
_NAME = r"([A-Za-z_][\w.]*(?:\[[^\]]*\])?)"
_STEPPED, _SCALED = re.compile(rf"{_NAME}\.step\(.*", re.DOTALL), re.compile(rf"scaler\.step\(\s*{_NAME}\s*[,)]")
Chain = tuple[Spot, ...]
"""The callers at that moment, innermost first. Which of them are the user's code is decided for the report."""


class CallSites:
    """Remembers callers as code positions, not frames, so no object of the program is kept alive."""

    def __init__(self) -> None:
        self.backward: Chain = ()
        self._made: dict[int, Chain] = {}
        self._stepped: dict[int, Chain] = {}

    def made(self, optimizer: Any, frame: FrameType | None) -> None:
        """Records the caller of an optimizer's constructor, skipping the constructors of its base classes."""
        while frame is not None and _constructs(frame, optimizer):
            frame = frame.f_back
        self._made[id(optimizer)] = _chain(frame)
        self._stepped.pop(id(optimizer), None)  # a deleted optimizer may have had this id

    def knows_step_of(self, optimizer: Any) -> bool:
        return id(optimizer) in self._stepped

    def stepped(self, optimizer: Any, frame: FrameType | None) -> None:
        self._stepped[id(optimizer)] = _chain(frame)

    def called_backward(self, frame: FrameType | None) -> None:
        self.backward = _chain(frame)

    def of(self, optimizer: Any, ownership: Ownership) -> tuple[Site | None, Site | None, Site | None]:
        """Where the user's code creates this optimizer, steps it, and calls backward."""
        chains = (self._made.get(id(optimizer), ()), self._stepped.get(id(optimizer), ()), self.backward)
        made, stepped, backward = (next((s for s in c if ownership.owns(s[0])), None) for c in chains)
        return made and resolve(made), stepped and resolve(stepped), backward and resolve(backward)


def _chain(frame: FrameType | None) -> Chain:
    found: list[Spot] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def optimizer_name(stepped_at: Site | None) -> str:
    """What the program calls the optimizer that it steps there: `opt_d` for `opt_d.step()`; empty if it is not seen."""
    code = stepped_at.code if stepped_at is not None else ""
    scaled = _SCALED.search(code)
    found = scaled or _STEPPED.fullmatch(code)
    return found[1] if found else ""


def place_of(frame: FrameType | None) -> object:
    """The position of a call, with those of its callers: enough of them to tell two calls of a helper apart."""
    found: list[Spot] = []
    while frame is not None and len(found) < _TELLING:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _constructs(frame: FrameType, optimizer: Any) -> bool:
    code = frame.f_code
    return code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is optimizer


def ends_at_origin(error: NonFiniteError) -> NonFiniteError:
    """The error with a traceback that ends where the value originated, in the program, and not in our own code."""
    site = error.report.origin.site if error.report.origin is not None else None
    if site is None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
            frame = frame.f_back
        return error.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))
    error.with_traceback(None)
    with suppress(Exception):  # an error without its last line is better than none
        _raise_at(site, error)
    return error


def _raise_at(site: Site, error: NonFiniteError) -> None:
    """Gives the error the traceback that it would have if this expression had raised it."""
    lines = linecache.getlines(site.file)
    start, end = site.column or 0, site.end_column or 0
    if 0 < site.line <= len(lines):  # the compiler counts columns in bytes
        start = len(lines[site.line - 1][:start].encode())
        end = len(lines[min(site.end_line or site.line, len(lines)) - 1][:end].encode())
    where = {"lineno": site.line, "col_offset": start, "end_lineno": site.end_line or site.line, "end_col_offset": end}
    statement = ast.Raise(ast.Name("error", ast.Load(), **where), None, **where)
    code = compile(ast.Module([statement], []), site.file, "exec").replace(co_name=site.function or "<module>")
    try:
        exec(code, {"error": error})
    except NonFiniteError:
        own = error.__traceback__
        error.with_traceback(own.tb_next if own is not None else None)
