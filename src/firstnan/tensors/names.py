"""What tensors are called: the models of a program, found without its help, and the names inside them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

# Prefixes that wrappers (compile, data parallel, checkpointing) add to every name.
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

Parts = Mapping[int, tuple[Module, str]]
"""Id of a module -> the module and its path in the model that it is part of."""


class Slot:
    """A named buffer of a module; the tensor in it may be replaced."""

    __slots__ = ("label", "module", "name")

    def __init__(self, module: Module, name: str, label: str) -> None:
        self.module, self.name, self.label = weakref.ref(module), name, label

    def tensor(self) -> Tensor | None:
        module = self.module()
        return module._buffers.get(self.name) if module is not None else None

    def restore(self, old: Tensor, value: Tensor) -> None:
        """Puts the former tensor back into the module, with its former values."""
        module = self.module()
        if module is not None:
            old.data.copy_(value)
            module._buffers[self.name] = old


class Models:
    """The names of all parameters and buffers of the given models, or of every model in this process."""

    def __init__(self, roots: Mapping[str, Module] | None = None) -> None:
        self.parameters: dict[int, tuple[Tensor, str]] = {}
        self.buffers: dict[int, tuple[Tensor, str]] = {}
        self.slots: list[Slot] = []
        self._roots: list[weakref.ref[Any]] = []
        for prefix, root in outermost_modules() if roots is None else roots.items():
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
        """Every submodule of these models."""
        found: dict[int, tuple[Module, str]] = {}
        for root in [one for ref in self._roots if (one := ref()) is not None]:  # some raise when tested for truth
            for path, module in root.named_modules():
                if path:
                    found.setdefault(id(module), (module, readable_path(path)))
        return found

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter or buffer, or of the parameter whose gradient this is; empty if unknown."""
        for table in (self.parameters, self.buffers):
            if id(tensor) in table:
                return table[id(tensor)][1]
        for parameter, name in self.parameters.values():
            if parameter.grad is tensor:
                return name
        return ""


def outermost_modules() -> list[tuple[str, Any]]:
    """Every module of this process that is not inside another one, each with an empty name prefix."""
    modules = [module for module in find_live_objects(Module) if "_modules" in module.__dict__]
    inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
    return [("", m) for m in modules if id(m) not in inner and (m._modules or m._parameters or m._buffers)]


def readable_path(name: str) -> str:
    """`_orig_mod.module.encoder.0` -> `encoder.0`: the path without the parts that wrappers add."""
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(p for p in parts if p not in _WRAPPERS[2:] and p != "_orig_mod")


def find_live_objects(*kinds: type) -> list[Any]:
    """Every object of these types and their subclasses (slow: it visits all objects)."""
    # Compared by identity: `issubclass` is several times slower, and some types cannot be hashed.
    types = {id(t) for kind in kinds for t in _with_subclasses(kind)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in types]


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for derived in found:
        found += type.__subclasses__(derived)
    return found
