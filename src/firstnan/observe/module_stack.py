"""Which layer is running: a stack of module calls, with readable paths."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from firstnan.tensors.models import Parts, readable_path

Place = tuple[str, str, weakref.ref[Module] | None]
"""The innermost module's path below the outermost module of the call, its type, and the outermost module."""


class ModuleStack:
    """Follows module calls with global hooks, separately in each thread; `detach` removes the hooks."""

    def __init__(self, training: Callable[[], None] = lambda: None) -> None:
        self.batch_size: int | None = None
        """The first dimension of the input of the last outermost call of a model."""
        self._sizes: set[int] = set()
        """That of every such call: a step may call its model with points of the interior, then of the boundary."""
        self._training = training
        self._local = threading.local()
        self._paths: dict[int, tuple[Module, dict[int, list[str]]]] = {}
        self._handles: list[Any] = []

    def attach(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._local = threading.local()
        self._paths.clear()

    def size_with(self, rows: int | None) -> int | None:
        """The number of samples of a call with so many; if there was none, of the last call."""
        return rows if rows in self._sizes else self.batch_size

    def current(self) -> Place:
        """The module that is running in this thread."""
        stack = getattr(self._local, "stack", None)
        return stack[-1][1:] if stack else ("", "", None)

    def _enter(self, module: Module, args: Any) -> None:
        stack = self._local.__dict__.setdefault("stack", [])
        if not stack:
            path, outermost = "", weakref.ref(module)
            if torch.is_grad_enabled():
                self._training()
                # A loss without weights is often given the positions of all samples as rows.
                if self.batch_size is None or next(module.parameters(), None) is not None:
                    self.batch_size = next(
                        (n for a in args if (n := _samples_in(a, module)) is not None), self.batch_size
                    )
                    self._sizes |= {self.batch_size} if self.batch_size is not None else set()
        else:
            path, outermost = self._path(stack[0][0], stack[-1][1], module), stack[0][3]
        stack.append((module, path, type(module).__name__, outermost))

    def _leave(self, module: Module, args: Any, output: Any) -> None:
        stack = getattr(self._local, "stack", None)
        while stack:
            if stack.pop()[0] is module:
                break

    def _path(self, root: Module, parent: str, module: Module) -> str:
        known = self._paths.get(id(root))
        if known is None or known[0] is not root:
            known = self._paths[id(root)] = (root, _names(root))
        if id(module) not in known[1]:
            # Added since, or registered nowhere; it is not searched for again.
            known[1].update({id(module): []} | _names(root))
        paths = known[1][id(module)]
        if not paths:
            return f"{parent}.<{type(module).__name__}>" if parent else f"<{type(module).__name__}>"
        below = [p for p in paths if not parent or p.startswith(parent + ".")]
        return min(below or paths, key=len)


def _samples_in(given: Any, model: Module) -> int | None:
    """The rows of a tensor; inside `vmap` those that it maps over, which the tensor there does not show."""
    if not isinstance(given, Tensor):
        return None
    size, at, functorch = given.size(0) if given.dim() else None, given, torch._C._functorch
    if given.dim() == 1 and given.is_floating_point():
        first = next((layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)), None)
        size = None if first is not None and first.in_features == size else size  # the features of one sample
    while functorch.is_functorch_wrapped_tensor(at):
        inner = functorch.get_unwrapped(at)
        if functorch.is_batchedtensor(at):
            size = inner.size(functorch.maybe_get_bdim(at))
        at = inner
    return size


def _names(root: Module) -> dict[int, list[str]]:
    """Id of each module inside this one -> all paths that lead to it."""
    names: dict[int, list[str]] = {}
    for name, child in root.named_modules(remove_duplicate=False):
        names.setdefault(id(child), []).append(readable_path(name))
    return names


def whole_path(place: Place, parts: Parts) -> str:
    """The path from the model down, even if only a part of it was called, as `model.log_prob(x)` calls its layers."""
    path, _, outermost = place
    module = outermost() if outermost is not None else None
    known, above = parts.get(id(module), (None, ""))
    if module is None or known is not module or not above:
        return path
    return f"{above}.{path}" if path else above
