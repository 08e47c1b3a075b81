"""What tensors are called: the models of a program, found without its help, and the names inside them."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor
from torch.nn import Module

from firstnan.modules import readable_path


class Models:
    """The outermost modules that live in this process, and every parameter and buffer by name."""

    def __init__(self) -> None:
        self.parameters: dict[int, tuple[Tensor, str]] = {}
        self.buffers: dict[int, tuple[Tensor, str]] = {}
        modules = [o for o in gc.get_objects() if issubclass(type(o), Module) and "_modules" in o.__dict__]
        inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
        roots = [m for m in modules if id(m) not in inner and (m._modules or m._parameters or m._buffers)]
        several = len(roots) > 1
        for root in roots:
            self._collect(root, f"{type(root).__name__}: " if several else "")

    def _collect(self, root: Any, prefix: str) -> None:
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(id(parameter), (parameter, readable_path(name)))
        for name, buffer in root.named_buffers(remove_duplicate=False):
            self.buffers.setdefault(id(buffer), (buffer, readable_path(name)))

    def name(self, tensor: Tensor) -> str:
        """The name of a parameter, of a buffer, or of the parameter whose gradient this is; empty if unknown."""
        for table in (self.parameters, self.buffers):
            if id(tensor) in table:
                return table[id(tensor)][1]
        for parameter, name in self.parameters.values():
            if parameter.grad is tensor:
                return name
        return ""
