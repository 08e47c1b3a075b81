"""Follows the user's code line by line, to find the lines that make a value non-finite out of finite ones."""

from __future__ import annotations

import inspect
import itertools
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import thread_time
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from firstnan.observe.line_operations import LineOperation, line_operation, operation_of_comprehension
from firstnan.observe.sites import (
    Ownership,
    Spot,
    columns_read,
    names_assigned,
    names_read,
    names_written,
    resolve,
    statement_at,
)
from firstnan.tensors.finite import is_finite, readable

_MOST_PARTS = 1024
_MOST_VALUES = 8
"""As many values are kept of one line that makes bad ones again and again."""
_SMALL = 4096
"""Elements up to which an array is read again after each line, since a write into it leaves no other trace."""
_LARGE = 1 << 20
_MOST_OBJECTS = 256
_MOST_ROWS = 64
_MOST_COLUMNS = 256
_WITH_GAPS = "fmM"
"""The kinds of numbers that may be missing: floats, times and dates."""
RETURNED = "returned"
_LITERAL = re.compile(r"(^|[^a-z_])(nan|inf|infinity)([^a-z_]|$)", re.IGNORECASE)


class BadLine(NamedTuple):
    """A line that made a value non-finite, although everything it read was finite."""

    spot: Spot
    name: str
    """The variable."""
    value: Tensor
    wrapped: tuple[tuple[str, Tensor], ...] = ()
    """Arrays of integers that it read and that probably hold a product too large for their type."""
    operation: LineOperation | None = None
    """The operation of numpy that made it, if it is found."""

    @property
    def is_number(self) -> bool:
        """An infinite number is often only the start of a minimum, so any other line is preferred."""
        return self.value.dim() == 0 and bool(torch.isinf(self.value))

    @property
    def is_literal(self) -> bool:
        """Whether the source of the line asks for it."""
        return bool(_LITERAL.search(" ".join(resolve(self.spot).source)))


@dataclass(slots=True)
class _Frame:
    """What is known of one function that runs."""

    spot: Spot
    bad: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Its non-finite variables -> the lines, as numbers, that their values come from."""
    held: dict[str, int] = field(default_factory=dict)
    """The same variables -> the identity of their value; another one was assigned by the last line."""
    seen: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Identity and version of what was finite when it was read last."""
    writes: Counter[str] = field(default_factory=Counter)
    """How often something was written into its large arrays."""
    line: int = 0
    noted: int = 0
    """How many values were noted before the statement that runs: what it calls notes more."""
    returned: tuple[int, ...] | None = None
    """The lines that a non-finite value comes from that a function has returned to the statement that runs."""
    around: tuple[int, ...] | None = None
    """In a comprehension: the lines that what the statement around it reads comes from."""
    trail: deque[Spot] = field(default_factory=lambda: deque(maxlen=3))
    """The last lines before."""
    before: dict[str, Any] = field(default_factory=dict)
    """The variables that the statement which runs reads and assigns, as they were before it."""
    module: _Frame | None = None
    """What is known of the module whose variables a function reads as globals."""


class LineWatch:
    """Checks the variables of user code after each line, and what functions return.

    That may take so many `seconds` in all. What the program takes itself (importing a framework) does not count.
    """

    def __init__(
        self,
        ownership: Ownership,
        seconds: float = math.inf,
        unseen: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`unseen`: a context that hides our own reads from a tracer that records the same code."""
        self.ownership = ownership
        self._unseen = unseen
        self.lines: list[BadLine] = []
        self._frames: dict[int, _Frame] = {}
        self._modules: dict[int, _Frame] = {}
        """The same for modules, by the identity of their variables."""
        self._made_at: dict[Spot, list[int]] = {}
        self._sources: dict[tuple[str, int], tuple[int, ...]] = {}
        """File and line of a statement that made or passed on a non-finite value -> where that comes from."""
        self._values: list[tuple[Tensor, tuple[int, ...]]] = []
        """Some of these values, and where they come from."""
        self._objects: dict[int, tuple[Any, tuple[int, ...]]] = {}
        """Some non-finite objects by their identity, and where they come from: a method finds them in its object."""
        self._kept: Counter[Spot] = Counter()
        self._reassigned: dict[tuple[int, int], frozenset[str]] = {}
        """The variables that the statement with an instruction both reads and assigns."""
        self._left = seconds
        self.is_reading = False
        """Whether we read variables of the program just now: it does not read them."""

    @property
    def first(self) -> BadLine | None:
        """The first line that made a value non-finite."""
        return min(self.lines, key=lambda line: line.is_number, default=None)

    def source_of(self, file: str, line: int) -> BadLine | None:
        """The first line that the non-finite values come from which the statement on this line has assigned."""
        found = [self.lines[i] for i in self._sources.get((file, line), ())]
        return min((f for f in found if not f.is_literal), key=lambda f: f.is_number, default=None)

    def source_in(self, tensors: Iterable[Tensor]) -> BadLine | None:
        """The line that made what one of these tensors holds, as a whole or in a row; None if several may have."""
        tensors = list(tensors)
        came = {i for t in tensors for i in self._noted_in(t, 0) or ()}
        found = [self.lines[i] for i in sorted(came) if not self.lines[i].is_literal]
        return found[0] if len({line.spot for line in found}) == 1 else None

    def arrived(self, tensors: Iterable[Tensor]) -> None:
        """A library hands these to the program: the statement that takes them has not made what is bad in them."""
        for t in tensors:
            if not is_finite(t):
                self._objects[id(t)] = t, self._noted_in(t, 0) or ()

    def _noted_in(self, value: Any, since: int) -> tuple[int, ...] | None:
        """The lines that made what a tensor holds, as a whole or in a row; None if none of those noted `since` did."""
        if not isinstance(value, Tensor):
            return None
        notes = self._values[since:]
        return tuple(dict.fromkeys(i for noted, came in notes for i in came if _holds(value, noted))) or None

    @contextmanager
    def watching(self) -> Iterator[None]:
        previous = sys.gettrace()
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(previous)

    def begin(self) -> None:
        """Watches this thread from here on, in the functions that run already too."""
        frame = sys._getframe(1)
        sys.settrace(self._call)
        at: FrameType | None = frame
        while at is not None:
            if self.ownership.owns(at.f_code):
                at.f_trace = self._line
            at = at.f_back

    def end(self) -> None:
        if getattr(sys.gettrace(), "__self__", None) is self:
            sys.settrace(None)
        self._frames.clear()

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self.ownership.owns(frame.f_code) or self._left < 0:
            return None
        began = thread_time()
        with self._reading():
            self._called(frame)
        self._left -= thread_time() - began
        return self._line

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self.is_reading = True
        try:
            with self._unseen():
                yield
        finally:
            self.is_reading = False

    def _called(self, frame: FrameType) -> None:
        before = self._frames.get(id(frame))
        goes_on = frame.f_code.co_flags & _GENERATORS and before is not None and before.spot[0] is frame.f_code
        if not goes_on:
            known = self._new(frame)
            # What comes in bad is what the statement that calls has read, or what another function returned to it.
            caller = self._frames.get(id(frame.f_back))
            came = None if caller is None else self._read_by(caller)
            came = caller.returned if came is None and caller is not None else came
            known.around = came if frame.f_code.co_name in _COMPREHENSIONS else None
            self._begin(frame, known, came or ())

    def _new(self, frame: FrameType) -> _Frame:
        known = self._frames[id(frame)] = _Frame((frame.f_code, frame.f_lasti))
        if frame.f_locals is frame.f_globals:
            self._modules[id(frame.f_globals)] = known
        known.module = self._modules.get(id(frame.f_globals))
        return known

    def _begin(self, frame: FrameType, known: _Frame, came: tuple[int, ...]) -> None:
        """Notes what is non-finite before the first line of a function that is watched."""
        found = self._bad(frame, known)
        known.bad = {name: self._objects.get(_identity(value), (None, came))[1] for name, value in found.items()}
        known.held = {name: _identity(value) for name, value in found.items()}

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            return self._line
        if self._left < 0:
            self.end()
            return None
        began = thread_time()
        with self._reading():
            self._reached(frame, event, arg)
        self._left -= thread_time() - began
        return self._line

    def _reached(self, frame: FrameType, event: str, arg: Any) -> None:
        """A line, or a function, has ended."""
        known = self._frames.get(id(frame))
        if known is None:
            known = self._new(frame)
            self._begin(frame, known, ())
        self._assigned(frame, known)
        if event == "return":
            known.trail.append(known.spot)
            self._returns(frame, known, arg)
        known.trail.append(known.spot)
        known.spot = frame.f_code, frame.f_lasti
        known.before = self._overwritten(frame, known.spot) if event == "line" else known.before
        if known.line != frame.f_lineno:  # each turn of a comprehension is an event of the same line
            known.line, known.noted, known.returned = frame.f_lineno, len(self._values), None

    def _overwritten(self, frame: FrameType, spot: Spot) -> dict[str, Any]:
        """The variables that a statement reads and assigns, before it runs; a copy of an array that it writes into."""
        key = id(spot[0]), spot[1]  # hashing a code object reads all of it
        names = self._reassigned.get(key)
        if names is None:
            names = self._reassigned[key] = names_read(spot) & names_assigned(spot)
        kept = {}
        for name in names:
            if name in frame.f_locals:
                value = frame.f_locals[name]
                if type(value).__name__ == "ndarray" and name in names_written(spot):
                    if value.size > _SMALL:
                        continue
                    value = value.copy()
                kept[name] = value
        return kept

    def _assigned(self, frame: FrameType, known: _Frame) -> None:
        """Notes which variables the last line has made bad."""
        bad = self._bad(frame, known)
        new = [name for name in bad if known.held.get(name) != _identity(bad[name])]
        known.held = {name: _identity(value) for name, value in bad.items()}
        found: dict[str, tuple[int, ...]] = {}
        for name in new:
            came = self._source(known, bad[name], name)
            if came is None:
                came = self._made(known, known.spot, name, bad[name], frame)
            found[name] = came
            self._note(known.spot, came, bad[name])
            if len(self._objects) < _MOST_OBJECTS:
                self._objects[_identity(bad[name])] = bad[name], came
        known.bad.update(found)
        for name in [name for name in known.bad if name not in bad]:
            del known.bad[name]

    def _returns(self, frame: FrameType, known: _Frame, value: Any) -> None:
        part = _first_bad(value)
        if part is not None:
            # Leaving a `with` comes after the statement that returns.
            spots = [(frame.f_code, frame.f_lasti), *reversed(known.trail)]
            spot = next((s for s in spots if _is_return(s)), spots[0])
            held = [came for name, came in known.bad.items() if frame.f_locals.get(name) is value]
            known.spot = spot
            came = held[0] if held else self._source(known, part)
            if came is None:
                at = next((i for i, one in enumerate(value) if holds_bad(one)), None) if type(value) is list else None
                came = self._made(known, spot, RETURNED, part, frame, at)
            self._note(spot, came, part)
            back = self._frames.get(id(frame.f_back))
            if back is not None:
                back.returned = (*(back.returned or ()), *came)
        if not frame.f_code.co_flags & _GENERATORS:  # those will go on
            self._frames.pop(id(frame), None)

    def _made(
        self, known: _Frame, spot: Spot, name: str, value: Any, frame: FrameType, at: int | None = None
    ) -> tuple[int, ...]:
        before = self._made_at.setdefault(spot, [])
        if len(before) < _MOST_VALUES:
            operation = None
            if not isinstance(value, Tensor):
                names = {**frame.f_globals, **frame.f_locals, **known.before}
                operation = line_operation(statement_at(spot), names)
                if frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
                    names = {**frame.f_globals, **frame.f_back.f_locals, **frame.f_locals}
                    operation = operation_of_comprehension(statement_at(spot), names, at)
            self.lines.append(BadLine(spot, name, _as_tensor(value), tuple(_wrapped(frame, spot)), operation))
            before.append(len(self.lines) - 1)
        return (before[-1],)

    def _note(self, spot: Spot, came: tuple[int, ...], value: Any) -> None:
        self._kept[spot] += 1
        if self._kept[spot] <= _MOST_VALUES:
            self._values.append((_as_tensor(value), came))
        site = resolve(spot)
        for line in {site.line, site.source_line or site.line}:
            before = self._sources.get((site.file, line), ())
            self._sources[site.file, line] = tuple(dict.fromkeys((*before, *came)))

    def _source(self, known: _Frame, value: Any, name: str = "") -> tuple[int, ...] | None:
        """Where a bad value of a statement comes from; None if all that it has read was finite."""
        came = known.returned
        if came is None and _identity(value) in self._objects:
            return self._objects[_identity(value)][1]
        if came is None and known.bad:
            came = self._read_by(known, _in_table(name)[1])
        if came is None:
            came = known.around
        if came is None and known.module is not None and known.module is not known:
            globals_read = set(names_read(known.spot)) & known.module.bad.keys() - set(known.spot[0].co_varnames)
            came = tuple(dict.fromkeys(i for n in sorted(globals_read) for i in known.module.bad[n])) or None
        if came is None:
            return self._noted_in(value, known.noted)
        # A table is passed on with all its columns, and this may be one of them.
        return tuple(i for i in came if len(came) > 1 and _is_same(self.lines[i].value, value)) or came

    def _read_by(self, known: _Frame, column: str = "") -> tuple[int, ...] | None:
        """The same without what functions have returned to it; a `column` comes from that of the same name, if read."""
        names, columns = names_read(known.spot), columns_read(known.spot)
        read: dict[str, list[tuple[int, ...]]] = {}
        for name, came in known.bad.items():
            table, one = _in_table(name)
            if table in names and (not one or one in columns.get(table, (one,))):
                read.setdefault(one, []).append(came)
        all_of_them = read.get(column) if column else None
        found = all_of_them or [came for several in read.values() for came in several]
        return tuple(dict.fromkeys(i for came in found for i in came)) if found else None

    def _bad(self, frame: FrameType, known: _Frame) -> dict[str, Any]:
        """The non-finite variables of a function, and attributes of the object whose method it is."""
        bad, written = {}, names_written(known.spot)
        for name, value in _variables(frame):
            if type(value) in _PLAIN:
                continue
            version, identity = _version(value), _identity(value)
            was_read = version is not None and known.seen.get(name) == (identity, version)
            changed = not isinstance(value, Tensor) and _in_table(name)[0] in written
            if was_read and not (changed and self._reads_again(known, name)):
                continue
            part = _first_bad(value)
            if part is not None:
                bad[name] = part
                known.seen.pop(name, None)
            elif version is not None:
                known.seen[name] = (identity, version)
        return bad

    def _reads_again(self, known: _Frame, name: str) -> bool:
        """Whether to read a large array that was written into: always would take too long in a loop."""
        known.writes[name] += 1
        return known.writes[name].bit_count() == 1 or self._read_by(known) is not None


_PLAIN = frozenset({int, str, bool, bytes, type(None), type, ModuleType, FunctionType, BuiltinFunctionType})
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Variables and attributes by their names; of a table, each of its columns."""
    for name, value in _plain_variables(frame):
        if _is_table(value):
            yield from ((f"{name}[{column!r}]", values) for column, values in _columns(value))
        else:
            yield name, value


def _in_table(name: str) -> tuple[str, str]:
    """The table and the column that a name means; no column if it is no table."""
    table, _, column = name.partition("[")
    return table, column.removesuffix("]")


def _is_table(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns")


def _columns(table: Any) -> Iterator[tuple[Any, Any]]:
    for column, values in itertools.islice(table.items(), _MOST_COLUMNS):
        array = _array(values)
        if getattr(getattr(array, "dtype", None), "kind", "") in _WITH_GAPS:
            yield column, array


def _array(value: Any) -> Any:
    """The numpy array in a column of a table, the same each time; anything else as it is."""
    return getattr(getattr(value, "array", None), "_ndarray", value) if hasattr(value, "__array__") else value


def _identity(value: Any) -> int:
    """A number for the object; for an array that of its memory: a column is another object each time it is read."""
    if type(value).__name__ == "ndarray":
        return int(value.__array_interface__["data"][0])
    return id(value)


def _plain_variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    code = frame.f_code
    yield from list(frame.f_locals.items())
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_name != "<module>" else None
    if isinstance(owner, torch.nn.Module):
        yield from ((f"{code.co_varnames[0]}.{k}", v) for k, v in owner.__dict__.get("_buffers", {}).items())
    if owner is not None and type(owner) not in _PLAIN and not isinstance(owner, Tensor | list | tuple | dict):
        members = getattr(owner, "__dict__", None)
        for name, value in list(members.items()) if isinstance(members, dict) else ():
            if not isinstance(value, dict) or not isinstance(owner, torch.nn.Module):
                yield f"{code.co_varnames[0]}.{name}", value


def _wrapped(frame: FrameType, spot: Spot) -> Iterator[tuple[str, Tensor]]:
    """The integers of numpy that a statement reads with negative numbers and very large ones; sound has 16 bits."""
    numpy: Any = sys.modules.get("numpy")
    names = names_read(spot)
    for name, value in _plain_variables(frame) if numpy is not None else ():
        if name not in names or not isinstance(value, numpy.ndarray | numpy.signedinteger) or not value.size:
            continue
        if value.dtype.kind == "i" and value.dtype.itemsize > 2 and value.size <= _LARGE:
            low, high = int(value.min()), int(value.max())
            if low < 0 and max(-low, high) > 1 << (8 * value.dtype.itemsize - 4):
                yield name, torch.from_numpy(numpy.array(value))


def _is_return(spot: Spot) -> bool:
    source = resolve(spot).source
    return bool(source) and source[0].lstrip().startswith(("return", "yield"))


def _version(value: Any) -> int | None:
    """A number that changes with the content; None where a change leaves no trace and reading again costs little."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else int(value._version)
    size = getattr(value, "size", None)
    return 0 if isinstance(size, int) and size > _SMALL else None


def _holds(t: Tensor, value: Tensor) -> bool:
    """Whether these numbers are the tensor, or a row of it, or a table with one of its bad rows, as windows have them.

    A NaN equals a NaN, and numbers may be rounded.
    """
    plain, value = readable(t), value.detach().cpu()
    if plain is None or t.is_nested or plain.dim() == 0:
        return False
    rows = plain.detach().cpu()
    if rows.shape == value.shape and _is_row(rows, value):
        return True
    if rows.dim() > value.dim() > 1:
        rows = rows.flatten(0, rows.dim() - value.dim())
    if rows.dim() > 1 and rows.shape[1:] == value.shape[1:]:
        return any(_is_row(row, one) for row in _bad_rows(rows) for one in _bad_rows(value))
    return rows.shape[1:] == value.shape and any(_is_row(row, value) for row in _bad_rows(rows))


def _bad_rows(t: Tensor) -> Tensor:
    """The first few rows that are non-finite."""
    return t[(~torch.isfinite(t)).reshape(len(t), -1).any(1).nonzero().flatten()[:_MOST_ROWS]]


def _is_same(noted: Tensor, value: Any) -> bool:
    return noted.shape == getattr(value, "shape", ()) and _is_row(_as_tensor(value).double(), noted)


def _is_row(row: Tensor, value: Tensor) -> bool:
    return torch.allclose(row, value.to(row.dtype), equal_nan=True)


def holds_bad(value: Any) -> bool:
    """Whether this is a non-finite number, array or tensor, or holds one."""
    return _first_bad(value) is not None


def _first_bad(value: Any, depth: int = 2) -> Any:
    """The value, or the first member of it, that is non-finite; None if there is none."""
    if isinstance(value, dict | list | tuple):
        if depth and len(value) <= _MOST_PARTS:
            for part in list(value.values()) if isinstance(value, dict) else value:
                if (found := _first_bad(part, depth - 1)) is not None:
                    return found
        return None
    if _is_table(value):
        return next((part for _, part in _columns(value) if _is_bad(part)), None)
    value = _array(value)
    return value if _is_bad(value) else None


def _is_bad(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Tensor):
        return not is_finite(value)
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind == "O" and hasattr(value, "__array__") and value.size <= _MOST_COLUMNS:  # a row of a table
        return any(isinstance(one, float) and not math.isfinite(one) for one in value.flat)
    # numpy itself, in a dict of names, has a `dtype` with a `kind` that is not a string.
    if not isinstance(kind, str) or not kind or kind not in _WITH_GAPS or not hasattr(value, "__array__"):
        return False
    return not bool(sys.modules["numpy"].isfinite(value).all())  # a date that is missing is not finite either


def _as_tensor(value: Any) -> Tensor:
    """A copy, as the program may write into it; a large one is shared."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _LARGE else value.detach()
    if isinstance(value, float):
        return torch.tensor(value)
    if value.dtype.kind == "O":
        value = sys.modules["numpy"].array([one if isinstance(one, float) else 0.0 for one in value.flat])
    elif value.dtype.kind != "f":
        value = sys.modules["numpy"].where(sys.modules["numpy"].isfinite(value), 0.0, math.nan)
    return torch.as_tensor(sys.modules["numpy"].array(value, copy=value.size <= _LARGE))


@contextmanager
def calls_seen(act: Callable[[FrameType], None]) -> Iterator[None]:
    """Has `act` called with the frame of every Python function that is called inside the block."""

    def called(frame: FrameType, event: str, arg: Any) -> None:
        act(frame)

    previous = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(previous)
