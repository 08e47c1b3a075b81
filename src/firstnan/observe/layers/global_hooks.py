"""Hooks for modules that must not have any of their own: torch calls them for every module of the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn import Module
from torch.nn.modules import module as _tables
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from firstnan.observe import manifest
from firstnan.observe.patches import Patches


def unhookable(roots: Iterable[Module]) -> set[int]:
    """The ids of the modules on which a hook would fail, or change what they compute.

    A scripted module refuses Python hooks. An encoder layer of torch leaves its fast path for evaluation as soon as any
    module in it has a hook.
    """
    found = set()
    for root in roots:
        for module in root.modules():
            if isinstance(module, ScriptModule):
                found.add(id(module))
            elif isinstance(module, nn.TransformerEncoderLayer):
                found.update(map(id, module.modules()))
    return found


class GlobalHooks:
    """Calls the hooks of modules that have none of their own."""

    def __init__(self) -> None:
        self._hooks: dict[int, tuple[weakref.ref[Module], Any, Any]] = {}
        """Id of a module -> the module, what runs before it and what runs after it."""
        self._handles: list[Any] = []
        self._patches = Patches()

    def add(self, module: Module, before: Any, after: Any) -> None:
        self._hooks[id(module)] = weakref.ref(module), before, after
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._entered),
                register_module_forward_hook(self._returned, with_kwargs=True, always_call=True),
            ]
            for owner, name in manifest.LAYERS:
                self._patches.put(owner, name, _ignore_ours)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
            _tables._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch leaves it there
        self._handles = []
        self._hooks.clear()
        self._patches.remove()

    def overtaken(self) -> list[tuple[Module, Any]]:
        """The modules that got hooks from others, which would run after these: from now on they have their own."""
        found = []
        for key, (ref, before, after) in list(self._hooks.items()):
            module = ref()
            if module is not None and before is None and not isinstance(module, ScriptModule) and module._forward_hooks:
                del self._hooks[key]
                found.append((module, after))
        return found

    def _entered(self, module: Module, args: Any) -> None:
        __tracebackhide__ = True
        if not torch.compiler.is_compiling():
            ref, before, _ = self._hooks.get(id(module), (None, None, None))
            if before is not None and ref is not None and ref() is module:
                before(module, args)

    def _returned(self, module: Module, args: Any, *rest: Any) -> None:
        """`rest` is the keywords and the result; after an exception torch passes only the latter."""
        __tracebackhide__ = True
        if not torch.compiler.is_compiling():
            ref, _, after = self._hooks.get(id(module), (None, None, None))
            if after is not None and ref is not None and ref() is module and (len(rest) == 2 or rest[-1] is None):
                after(module, args, rest[0] if len(rest) == 2 else {}, rest[-1])


def _ignore_ours(original: Any) -> Any:
    """A compiled model warns if there are global hooks: ours do nothing there."""

    def _has_any_global_hook() -> bool:
        forward = (*_tables._global_forward_pre_hooks.values(), *_tables._global_forward_hooks.values())
        backward = _tables._global_backward_pre_hooks or _tables._global_backward_hooks
        return bool(backward) or not all(map(_is_ours, forward))

    return _has_any_global_hook


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), GlobalHooks)
