"""Runs code right after a module is imported, so torch is patched without importing it before the program does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` right after the module is imported, or now if it already is; returns a function that cancels this."""
    finder = _Finder(name, act)
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.cancel


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.act)
        return spec


class _Loader(Loader):
    """The module's own loader, followed by `act`; the module does not refer to this wrapper afterwards."""

    def __init__(self, own: Loader, act: Callable[[], None]) -> None:
        self.own, self.act = own, act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        module.__loader__ = self.own
        self.own.exec_module(module)
        self.act()
