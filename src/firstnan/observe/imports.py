"""Waits for the program to import torch itself: what it sets before (thread counts, visible devices) still counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, act: Callable[[], None]) -> Callable[[], None]:
    """Calls `act` right after the module was imported, now if it already is; what is returned calls that off."""
    finder = _Finder(name, act)
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, finder)
    return finder.call_off


class _Finder(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name, self.act = name, act

    def call_off(self) -> None:
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
    """The module's own loader, with something to do after it; the module keeps no trace of it."""

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
