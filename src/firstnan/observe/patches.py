"""Functions replaced in torch and hooks on the user's objects, all of which can be removed again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

Make = Callable[[Any], Callable[..., Any]]
"""The current function -> its replacement."""


class _Chain:
    """One attribute of torch and all its wrappers, innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.stored, self.original = vars(owner).get(name, _NOWHERE), getattr(owner, name)
        self.makers: list[Make] = []
        self.outermost = 0
        """How many of the last makers are to stay there."""
        self.installed: Any = None

    def build(self) -> None:
        function = self.original
        for make in self.makers:
            function = _dressed_as(self.original, make(function))
        self.installed = function
        setattr(self.owner, self.name, function)

    def restore(self) -> None:
        if self.stored is not _NOWHERE:
            setattr(self.owner, self.name, self.stored)
        else:
            delattr(self.owner, self.name)

    @property
    def covered(self) -> bool:
        """Whether someone else has wrapped our function since."""
        return vars(self.owner).get(self.name) is not self.installed


_NOWHERE = object()
"""Stands for what the owner itself does not hold, but inherits."""


def _dressed_as(original: Any, function: Any) -> Any:
    """As `functools.wraps`, several times as fast for ordinary functions: a block of `trace()` makes a dozen."""
    if type(original) is not FunctionType or type(function) is not FunctionType:
        return functools.wraps(original)(function)
    function.__module__, function.__doc__ = original.__module__, original.__doc__
    function.__name__, function.__qualname__ = original.__name__, original.__qualname__
    function.__annotations__ = original.__annotations__
    function.__dict__.update(original.__dict__)
    function.__wrapped__ = original  # type: ignore[attr-defined]  # as functools does
    return function


# torch is shared by the whole process, and so are the wrappers of its functions.
_chains: dict[tuple[int, str], _Chain] = {}
_lock = threading.RLock()


class Patches:
    """The patches of one watcher; several watchers may install and remove theirs in any order."""

    def __init__(self) -> None:
        self._mine: list[tuple[_Chain, Make]] = []

    def put(self, owner: Any, name: str, make: Make, *, outermost: bool = False) -> None:
        """Wraps a function; `outermost`: around those that are put there later too, so it is called before them."""
        with _lock:
            key = (id(owner), name)
            chain = _chains.get(key)
            if chain is None or chain.covered:
                chain = _chains[key] = _Chain(owner, name)
            chain.makers.insert(len(chain.makers) - (0 if outermost else chain.outermost), make)
            chain.outermost += outermost
            chain.build()
            self._mine.append((chain, make))

    def remove(self) -> None:
        """Removes the patches; one that someone else has wrapped stays in place and must do nothing."""
        with _lock:
            for chain, make in reversed(self._mine):
                if chain.outermost:
                    chain.outermost -= chain.makers.index(make) >= len(chain.makers) - chain.outermost
                chain.makers.remove(make)
                if chain.covered:
                    continue
                if chain.makers:
                    chain.build()
                else:
                    chain.restore()
                    _chains.pop((id(chain.owner), chain.name), None)
            self._mine = []


class EagerMode:
    """Makes compiled functions run uncompiled, in the whole process, as long as anyone needs that."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._stance: Any = None

    def ask(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._stance = torch.compiler.set_stance("force_eager")

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stance.__exit__(None, None, None)


eager = EagerMode()


def as_written(patches: Patches) -> None:
    """Functions that torch.jit has compiled run as the Python they were compiled from, if torch has kept that.

    Compiled, they have one backward for many operators, and no lines.
    """

    def make(run_compiled: Any) -> Callable[..., Any]:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            source = getattr(self, "_torchdynamo_inline", None)  # kept for torch.compile, which does the same
            return source(*args, **kwargs) if source is not None else run_compiled(self, *args, **kwargs)

        return run

    patches.put(torch.jit.ScriptFunction, "__call__", make)


class Hook:
    """A hook on an object of the user's that is not copied or saved with it."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *args: Any) -> Any:
        __tracebackhide__ = True
        # The compiler looks into hooks, and may ask this at any time.
        return None if torch.compiler.is_compiling() else self._act(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> Any:
        # A function of the standard library that accepts anything and does nothing, so the file loads without firstnan.
        return getattr, (contextlib.nullcontext(), "__exit__")
