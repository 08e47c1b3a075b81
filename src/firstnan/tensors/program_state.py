"""What steps change in the program's objects and variables: kept at the end of each step, to begin the next one again.

An environment that an agent acts in is such an object: a step that begins with a rollout cannot be repeated without it.
So is a tensor that one turn of a loop leaves in a variable for the next. Nothing is kept where there is neither, or
where keeping would take a noticeable part of a step.
"""

from __future__ import annotations

import dis
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from firstnan.tensors.finite import is_finite
from firstnan.tensors.state import bytes_of, generator_kinds, local_variables, set_state_of, state_of

_MOST_VALUES = 5000
_MOST_ITEMS = 64
"""Items up to which a container is copied; of a longer list only the length is kept."""
_MOST_ELEMENTS = 1 << 14
_SHARE = 0.005
"""The part of a step's time that keeping may take."""
_FIRST = 16
"""Steps in which objects are looked for whatever it takes."""
_OURS = 4
"""References to an object that nobody else holds: the table, its copy, the variable, the argument of `getrefcount`."""
_LOOKING = 0.2
"""The part of a second run's time that the search for non-finite objects may take."""
_DEEPEST = 10
_PLAIN = (int, float, complex, bool, str, bytes, type(None))
_NUMBERS = frozenset(_PLAIN)
_SKIPPED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, FrameType, CodeType, *_PLAIN)
_LIBRARIES = ("firstnan", "torch", "importlib", "runpy", "threading", "multiprocessing", "concurrent", "logging", "io")
_OF_TORCH = ("_parameters", "_buffers", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks")


class ProgramState:
    """The objects that steps have changed, with copies of what they held at the end of the last step."""

    def __init__(self) -> None:
        self._digests: dict[int, Any] = {}
        """What the objects held at the last look, by their ids; keeps none of them alive."""
        self._changing: dict[int, Any] = {}
        self._frames: dict[int, CodeType] = {}
        self._names: dict[CodeType, list[str]] = {}
        """Variables that can be kept, of the functions that went on from one look to the next."""
        self._carried: dict[CodeType, frozenset[str]] = {}
        """Those of them that hold tensors or arrays which one turn of a loop leaves for the next."""
        self._kept: list[tuple[Any, Any]] = []
        self._variables: dict[CodeType, dict[str, Any]] = {}
        self._looked: tuple[float, int] = 0.0, 0
        self._took = 0.0
        self.keeps = False
        self.was_needed = False
        """Whether the failing step could be repeated only with this state."""

    def look(self, frame: FrameType | None, steps: int) -> None:
        """Looks for objects that have changed since the last look; decides whether they are kept from now on."""
        with torch._C.DisableTorchFunction():  # a mode of the program sees nothing of this
            self._look(frame, steps)

    def _look(self, frame: FrameType | None, steps: int) -> None:
        began, (before, done) = time.perf_counter(), self._looked
        per_step = (began - before) / max(steps - done, 1) if before else 0.0
        if before and self._took > _SHARE * (began - before) and steps > _FIRST:
            return
        frames = list(_frames(frame))
        found = {id(one): one for one in _objects(frames)}
        digests = {number: _digest(one) for number, one in found.items()}
        known = self._digests
        changed = {n for n, digest in digests.items() if n in self._changing or known.get(n, digest) != digest}
        self._changing, self._digests = {n: found[n] for n in changed}, digests
        running = {id(one): one.f_code for one in frames}
        going_on = [one for one in frames if self._frames.get(id(one)) is one.f_code]
        self._names, self._carried = {}, {}
        for one in going_on:
            code, carried = one.f_code, _carried(one.f_code, one.f_lasti)
            small = {n: v for n, v in _variables(one) if _is_small(_without_graph(v) if n in carried else v)}
            self._names[code] = list(small)
            self._carried[code] = frozenset(n for n in carried if _holds_data(small.get(n)))
        self._frames, self._took = running, time.perf_counter() - began
        self._looked = time.perf_counter(), steps
        changes = bool(changed) or any(self._carried.values())
        self.keeps = changes and min(self._seconds(frame) for _ in range(3)) < _SHARE * per_step
        if not self.keeps:
            self._kept, self._variables = [], {}

    def _seconds(self, frame: FrameType | None) -> float:
        began = time.perf_counter()
        self.keep(frame)
        return time.perf_counter() - began

    def keep(self, frame: FrameType | None) -> None:
        """A step has ended."""
        with torch._C.DisableTorchFunction():
            self._keep(frame)

    def _keep(self, frame: FrameType | None) -> None:
        self._kept = []
        for number, one in list(self._changing.items()):
            if sys.getrefcount(one) <= _OURS:  # the program has dropped it
                del self._changing[number]
            else:
                self._kept.append((one, _copied(one)))
        self._variables = {}
        while frame is not None:
            names = self._names.get(frame.f_code)
            if names:
                values = frame.f_locals if frame.f_locals is frame.f_globals else local_variables(frame)
                kept = {n: values[n] for n in names if n in values}
                kept.update({n: _without_graph(kept[n]) for n in self._carried[frame.f_code] if n in kept})
                self._variables[frame.f_code] = {n: v for n, v in kept.items() if _may_stay(v)}
            frame = frame.f_back

    def has_changed(self, code: CodeType, names: dict[str, Any]) -> bool:
        """Whether the current step has changed any of the objects, or what a function carries in these variables."""
        before = self.variables(code)
        if any(names.get(n) is not before[n] for n in self._carried.get(code, ()) if n in before):
            return True
        return any(not _same(before, _copied(one)) for one, before in self._kept)

    def bad(self) -> set[int]:
        """The numbers of the objects that steps change and that hold something non-finite: a replay buffer may."""
        with torch._C.DisableTorchFunction():
            return {number for number, one in self._changing.items() if _holds_bad(one)}

    def finite(self, bad: set[int]) -> set[int]:
        return self._changing.keys() - bad

    def variables(self, code: CodeType) -> dict[str, Any]:
        """The variables of a function at the end of the last step, as far as they were kept."""
        return self._variables.get(code, {})

    def restore(self) -> None:
        """Gives the objects what they held at the end of the last step."""
        for one, before in self._kept:
            _restore(one, before)


class BadSince:
    """Between which two updates an object that steps change came to hold something non-finite."""

    def __init__(self) -> None:
        self.found: tuple[int, int] | None = None
        self._finite: set[int] = set()
        self._last, self._began, self._took = 0, time.perf_counter(), 0.0

    def look(self, state: ProgramState, updates: int) -> None:
        """A step has ended, after so many updates."""
        began = time.perf_counter()
        if self.found is not None or self._took > _LOOKING * (began - self._began):
            return
        bad = state.bad()
        if bad & self._finite:
            self.found = self._last, updates
        self._finite, self._last = state.finite(bad), updates
        self._took += time.perf_counter() - began


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The variables that a running function has assigned."""
    return ((name, value) for name, value in local_variables(frame).items() if not name.startswith("__"))


_ACCESS = re.compile(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)")


@lru_cache(maxsize=256)
def _carried(code: CodeType, at: int) -> frozenset[str]:
    """The variables that the loops around this instruction read before they assign them: left by the turn before."""
    steps = list(dis.get_instructions(code))
    ends = [(i.argval, i.offset) for i in steps if "JUMP_BACKWARD" in i.opname and i.argval <= at <= i.offset]
    found: set[str] = set()
    for first, last in ends:
        seen: dict[str, list[str]] = {}
        for one in steps:
            kinds = _ACCESS.findall(one.opname) if first <= one.offset <= last else ()
            for kind, name in zip(kinds, one.argval if len(kinds) > 1 else [one.argval], strict=False):
                seen.setdefault(name, []).append(kind)
        found.update(name for name, kinds in seen.items() if kinds[0] == "LOAD" and "STORE" in kinds)
    return frozenset(found)


def _holds_data(value: Any) -> bool:
    return any(map(_holds_data, value)) if type(value) is tuple else isinstance(value, (Tensor, *_arrays()))


def _without_graph(value: Any) -> Any:
    """The value; a result of the step without the graph of autograd, which is not to be kept alive."""
    if type(value) is tuple:
        return tuple(map(_without_graph, value))
    return value.detach() if type(value) is Tensor and value.grad_fn is not None else value


def _objects(frames: Iterable[FrameType]) -> Iterator[Any]:
    """What can change in the variables of these functions and the objects that they hold, nearest first."""
    arrays, generators = _arrays()[:1], generator_kinds()
    waiting: deque[tuple[Any, int]] = deque()
    modules = {id(one.f_globals): one.f_globals for one in frames}
    for one in frames:
        waiting.extend((value, 0) for value in local_variables(one).values())
    for names in modules.values():
        waiting.extend((value, 0) for value in list(names.values()))
    seen, budget = {id(names) for names in modules}, _MOST_VALUES
    while waiting and budget:
        value, depth = waiting.popleft()
        if isinstance(value, FunctionType) and value.__dict__:
            value = value.__dict__  # what the program keeps at a function, such as a counter
        if isinstance(value, _SKIPPED) or id(value) in seen:
            continue
        seen.add(id(value))
        budget -= 1
        if isinstance(value, generators):
            yield value
        elif isinstance(value, Tensor):
            if _is_small_tensor(value):
                yield value
        elif isinstance(value, arrays):
            if value.size <= _MOST_ELEMENTS and not value.dtype.hasobject and value.flags.writeable:
                yield value
        elif type(value) in (list, dict, set, deque):
            yield value
            if depth < _DEEPEST and len(value) <= _MOST_ITEMS:
                waiting.extend((item, depth + 1) for item in (value.values() if type(value) is dict else value))
        elif type(value) is tuple:
            waiting.extend((item, depth + 1) for item in value[:_MOST_ITEMS] if depth < _DEEPEST)
        elif _is_own(value):
            members = value.__dict__
            yield members
            if depth < _DEEPEST:
                waiting.extend((item, depth + 1) for name, item in members.items() if name not in _OF_TORCH)


def _holds_bad(value: Any, depth: int = 3) -> bool:
    """Whether this, or what it holds, is non-finite; of a long list only its last items are read."""
    if isinstance(value, Tensor):
        return not is_finite(value)
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, _arrays()):
        return value.dtype.kind == "f" and not bool(sys.modules["numpy"].isfinite(value).all())
    if not depth or not isinstance(value, dict | list | tuple | deque):
        return False
    items = value.values() if isinstance(value, dict) else reversed(value)
    return any(_holds_bad(item, depth - 1) for item in islice(items, _MOST_ITEMS))


def _is_small_tensor(value: Tensor) -> bool:
    """Whether it can be copied at little cost and keeps no graph of autograd alive."""
    if type(value) is not Tensor or value.requires_grad or value.is_nested or value.layout is not torch.strided:
        return False
    return value.numel() <= _MOST_ELEMENTS and not (value.is_conj() or value.is_neg() or value.is_inference())


def _arrays() -> Any:
    """The types of numpy's arrays and numbers, if the program uses numpy."""
    numpy = sys.modules.get("numpy")
    return (numpy.ndarray, numpy.generic) if numpy is not None else ()


def _is_own(value: Any) -> bool:
    """Whether this may be an object of the program, or of a library of environments: it has members of its own."""
    if type(getattr(value, "__dict__", None)) is not dict:
        return False
    home = str(type(value).__module__).partition(".")[0]
    return home not in _LIBRARIES or isinstance(value, torch.nn.Module)


def _digest(one: Any) -> Any:
    """What tells whether an object has changed, without keeping anything of it alive."""
    copy = _copied(one)
    if isinstance(copy, dict):
        return {name: _mark(value) for name, value in copy.items()}
    if isinstance(copy, list | deque):
        return [_mark(value) for value in copy]
    if isinstance(copy, Tensor):
        return copy.view(-1).view(torch.uint8).numpy().tobytes() if copy.is_cpu else one._version
    return copy.tobytes() if hasattr(copy, "dtype") else copy


def _mark(value: Any) -> Any:
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def _copied(one: Any) -> Any:
    kind = type(one)
    if kind is dict:
        return {name: value for name, value in one.items() if _may_stay(value)} if len(one) <= 4 * _MOST_ITEMS else None
    if kind is list:
        return one.copy() if len(one) <= _MOST_ITEMS and all(map(_may_stay, one)) else len(one)
    if kind is set or kind is deque:
        return one.copy() if len(one) <= 4 * _MOST_ITEMS and all(map(_may_stay, one)) else None
    if isinstance(one, Tensor):
        return one.detach().clone(memory_format=torch.contiguous_format)
    return one.copy() if hasattr(one, "dtype") else _Generator(state_of(one))


class _Generator:
    """The state of a random generator."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Generator) and bytes_of(self.state) == bytes_of(other.state)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(map(_equal, one.values(), other.values()))
    if isinstance(one, list | deque) and isinstance(other, list | deque):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool((one == other).all()) if hasattr(one, "dtype") else bool(one == other)


def _equal(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, _PLAIN) and type(one) is type(other) and one == other)


def _restore(one: Any, before: Any) -> None:
    if isinstance(before, _Generator):
        set_state_of(one, before.state)
    elif isinstance(one, list):
        if isinstance(before, int):
            del one[before:]
        else:
            one[:] = before
    elif isinstance(one, dict):
        one.update(before or {})
    elif isinstance(one, set | deque):
        if before is not None:
            one.clear()
            one.update(before) if isinstance(one, set) else one.extend(before)
    elif isinstance(one, Tensor):
        one.detach().copy_(before)
    else:
        one[...] = before


def _may_stay(value: Any) -> bool:
    """Whether a copy of what holds this value may keep it alive for a step: no graph of autograd, no large data."""
    kind = type(value)
    if kind in _NUMBERS:
        return True
    if isinstance(value, Tensor):
        return _is_small_tensor(value)
    if kind is list:
        return not value or _may_stay(value[0])
    return not isinstance(value, _arrays()) or value.size <= _MOST_ELEMENTS


def _is_small(value: Any) -> bool:
    """Whether a variable can be kept without keeping much alive: no graph of autograd, no large data."""
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, Tensor):
        return _is_small_tensor(value)
    if type(value) is tuple:
        return len(value) <= _MOST_ITEMS and all(map(_is_small, value))
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_ITEMS and all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _arrays()) and value.size <= _MOST_ELEMENTS
