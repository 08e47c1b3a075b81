"""Functions replaced in torch and hooks left on its objects, so that every one can be taken off again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

Make = Callable[[Any], Callable[..., Any]]
"""The function as it is now -> what stands in its place."""


class _Chain:
    """One attribute of torch and all that is put around it, innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.own = name in vars(owner)
        self.stored, self.original = vars(owner).get(name), getattr(owner, name)
        self.makers: list[Make] = []
        self.installed: Any = None

    def build(self) -> None:
        function = self.original
        for make in self.makers:
            function = functools.wraps(self.original)(make(function))
        self.installed = function
        setattr(self.owner, self.name, function)

    def restore(self) -> None:
        if self.own:
            setattr(self.owner, self.name, self.stored)
        else:
            delattr(self.owner, self.name)

    @property
    def covered(self) -> bool:
        """Someone else has put something around ours since."""
        return vars(self.owner).get(self.name) is not self.installed


# torch is one for the whole process, and so is what is put around its functions.
_chains: dict[tuple[int, str], _Chain] = {}
_lock = threading.RLock()


class Patches:
    """What one watcher has put around functions of torch; several watchers may come and go in any order."""

    def __init__(self) -> None:
        self._mine: list[tuple[_Chain, Make]] = []

    def put(self, owner: Any, name: str, make: Make) -> None:
        with _lock:
            key = (id(owner), name)
            chain = _chains.get(key)
            if chain is None or chain.covered:
                chain = _chains[key] = _Chain(owner, name)
            chain.makers.append(make)
            chain.build()
            self._mine.append((chain, make))

    def remove(self) -> None:
        """Takes off what was put; where someone else covers it, ours stays below and has to do nothing."""
        with _lock:
            for chain, make in reversed(self._mine):
                chain.makers.remove(make)
                if chain.covered:
                    continue
                if chain.makers:
                    chain.build()
                else:
                    chain.restore()
                    _chains.pop((id(chain.owner), chain.name), None)
            self._mine = []


class Hook:
    """A hook on the user's own object that does not follow it into copies and files."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        return self._act(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        # Something of the standard library that takes anything and does nothing: the file is read without firstnan.
        return getattr, (contextlib.nullcontext(), "__exit__")
