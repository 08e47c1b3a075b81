"""What tensors are called: the models of a program, found without its help, and the names inside them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

from firstnan.tensors.live_objects import alive

# Wrappers that put a prefix before every name.
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Parts = Mapping[int, tuple[Module, str]]
"""Modules by identity, with their paths in the models that they are part of."""


class Slot:
    """A place for a buffer: the tensor in it may be replaced."""

    __slots__ = ("label", "module", "name")

    def __init__(self, module: Module, name: str, label: str) -> None:
        self.module, self.name, self.label = weakref.ref(module), name, label

    def tensor(self) -> Tensor | None:
        module = self.module()
        return module._buffers.get(self.name) if module is not None else None

    def put(self, old: Tensor, value: Tensor) -> None:
        """Brings back what was there: the same tensor with the same values."""
        module = self.module()
        if module is not None:
            old.data.copy_(value)
            module._buffers[self.name] = old


class Models:
    """Every parameter and buffer by name: of the models given, or of all that live in this process."""

    def __init__(self, roots: Mapping[str, Module] | None = None) -> None:
        self.parameters: dict[int, tuple[Tensor, str]] = {}
        self.buffers: dict[int, tuple[Tensor, str]] = {}
        self.slots: list[Slot] = []
        self._roots: list[weakref.ref[Any]] = []
        for prefix, root in outermost() if roots is None else roots.items():
            self._collect(root, prefix)

    def _collect(self, root: Any, prefix: str) -> None:
        self._roots.append(weakref.ref(root))
        for name, parameter in root.named_parameters(prefix, remove_duplicate=False):
            self.parameters.setdefault(id(parameter), (parameter, readable_path(name)))
        for name, buffer in root.named_buffers(prefix, remove_duplicate=False):
            self.buffers.setdefault(id(buffer), (buffer, readable_path(name)))
        for path, module in root.named_modules(prefix=prefix):
            for name in module._buffers:
                self.slots.append(Slot(module, name, readable_path(f"{path}.{name}" if path else name)))

    def parts(self) -> Parts:
        """Every module below these models."""
        found: dict[int, tuple[Module, str]] = {}
        for root in [one for ref in self._roots if (one := ref()) is not None]:  # not all say whether they are true
            for path, module in root.named_modules():
                if path:
                    found.setdefault(id(module), (module, readable_path(path)))
        return found

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter, of a buffer, or of the parameter whose gradient this is; empty if unknown."""
        for table in (self.parameters, self.buffers):
            if id(tensor) in table:
                return table[id(tensor)][1]
        for parameter, name in self.parameters.values():
            if parameter.grad is tensor:
                return name
        return ""


def outermost() -> list[tuple[str, Any]]:
    """Every module of this process that is part of no other, with the prefix of its names: none."""
    modules = [module for module in alive(Module) if "_modules" in module.__dict__]
    inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
    return [("", m) for m in modules if id(m) not in inner and (m._modules or m._parameters or m._buffers)]


def readable_path(name: str) -> str:
    """`_orig_mod.module.encoder.0` -> `encoder.0`: without what compile and parallel wrappers put before it."""
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(p for p in parts if p not in _WRAPPERS[2:] and p != "_orig_mod")
