"""Objects of this process, found without its help among all that Python's garbage collector knows."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Iterable
from typing import Any

from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_SOUGHT = (Module, Optimizer, LRScheduler, GradScaler)
_AGES_MIX = sys.version_info >= (3, 14)
"""Python 3.14 moves objects to the oldest generation a few at a time; see `_Oldest`."""


def find_live_objects(*kinds: type) -> list[Any]:
    """Every object of these types and their subclasses (slow: it visits all objects, or at least the younger ones)."""
    if all(issubclass(kind, _SOUGHT) for kind in kinds) and not _AGES_MIX:
        younger = [thing for generation in (0, 1) for thing in _in_generation(generation, kinds)]
        return list({id(thing): thing for thing in (*younger, *_oldest.find(kinds))}.values())
    return _in_generation(None, kinds)


def live_iterator(address: int) -> Any:
    """The iterator at this address of memory; None if there is none that Python knows of."""
    if not _AGES_MIX and address in _oldest.iterators():
        return ctypes.cast(address, ctypes.py_object).value
    for generation in (None,) if _AGES_MIX else (0, 1):
        for thing in gc.get_objects(generation):
            if id(thing) == address:
                return thing if _is_iterator(type(thing)) else None
    return None


def visit_before_fork() -> None:
    """Visits the oldest objects, if necessary, so that no child has to: that would copy the memory of all of them."""
    if not _AGES_MIX:
        _oldest.visit()


def _in_generation(generation: int | None, kinds: Iterable[type]) -> list[Any]:
    """Those among the objects of one generation of the garbage collector, or among all."""
    things = gc.get_objects(generation)
    try:
        return _of_kinds(things, kinds)
    finally:
        things.clear()  # The frame of this function may be one of them: a cycle that would keep all of them alive.


def _of_kinds(things: Iterable[Any], kinds: Iterable[type]) -> list[Any]:
    # Compared by identity: `issubclass` is several times slower, and some types cannot be hashed.
    types = {id(t) for kind in kinds for t in _with_subclasses(kind)}
    return [thing for thing in things if id(type(thing)) in types]


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for derived in found:
        found += type.__subclasses__(derived)
    return found


def _is_iterator(kind: type) -> bool:
    return any("__next__" in vars(base) for base in kind.__mro__)


class _Oldest:
    """What is looked for among the objects of the oldest generation, which holds nearly all: hundreds of thousands.

    Objects get there only by a collection of the other generations, so it is visited again only after one. An
    investigation looks for several kinds in a row, with the garbage collector paused.
    """

    def __init__(self) -> None:
        self._as_of: list[int] = []
        self._found: list[weakref.ref[Any]] = []
        self._iterators: set[int] = set()

    def find(self, kinds: Iterable[type]) -> list[Any]:
        self.visit()
        return _of_kinds([thing for ref in self._found if (thing := ref()) is not None], kinds)

    def iterators(self) -> set[int]:
        """The addresses of all iterators; most of them cannot be referred to weakly."""
        self.visit()
        return self._iterators

    def visit(self) -> None:
        now = [generation["collections"] for generation in gc.get_stats()[1:]]
        if now == self._as_of:
            return
        things = gc.get_objects(2)
        try:
            types = list(map(type, things))
            kinds = dict(zip(map(id, types), types, strict=True))
            iterators = {key for key, kind in kinds.items() if _is_iterator(kind)}
            self._found = list(map(weakref.ref, _of_kinds(things, _SOUGHT)))
            self._iterators = {id(thing) for thing in things if id(type(thing)) in iterators}
        finally:
            things.clear()  # as above
        self._as_of = now


_oldest = _Oldest()
