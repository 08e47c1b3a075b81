"""Where torch is touched: every patched function and global hook, put on and taken off together."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch
import torch.utils.data
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.finite import is_finite
from firstnan.gate import Gate
from firstnan.replay import Replayer


class Audience(Protocol):
    """Who hears of what the program does, beyond the gate."""

    replayer: Replayer

    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any: ...
    def value_read(self, tensor: Tensor, caller: Any) -> None: ...
    def module_returned(self, module: Any, output: Any) -> None: ...
    def backward_begins(self) -> None: ...
    def optimizer_made(self) -> None: ...
    def internal_error(self, error: Exception) -> None: ...
    def unseen(self) -> AbstractContextManager[None]: ...


class Stop(SystemExit):
    """Ends the watched program after a finding; its own `finally` blocks and exit handlers still run."""

    def __init__(self) -> None:
        super().__init__(3)


def end_program() -> NoReturn:
    """Stops the thread that trains; in another than the main one only plain SystemExit ends it silently."""
    raise Stop if threading.current_thread() is threading.main_thread() else SystemExit(Stop().code)


class Hooks:
    """All that is installed in torch while a program is watched."""

    def __init__(self, gate: Gate, audience: Audience) -> None:
        self.gate, self.audience = gate, audience
        self._patched: list[tuple[Any, str, Any, bool]] = []
        self._handles: list[Any] = []
        self._module_handles: list[Any] = []
        self._process = os.getpid()
        self._depth = threading.local()

    def install(self) -> None:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self._module_handles = [
            register_module_forward_pre_hook(self._module_called),
            register_module_forward_hook(self._module_returned, always_call=True),
        ]
        self._patch(torch.autograd, "backward", self._backward)
        self._patch(torch.autograd, "grad", self._grad)
        self._patch(Optimizer, "__init__", self._optimizer_init)
        self._patch(torch.amp.GradScaler, "scale", self._scale)
        self._patch(torch.amp.GradScaler, "step", self._scaler_step)
        self._patch(_BaseDataLoaderIter, "__next__", self._next)
        self._patch(_BaseDataLoaderIter, "_next_index", self._next_index)
        self._patch(_BaseDataLoaderIter, "_reset", self._reset)
        self._patch(torch, "compile", self._compile)
        self._patch(Tensor, "item", self._item)
        self._patch(Tensor, "__float__", self._float)
        self._patch(Tensor, "numpy", self._array)
        self._patch(Tensor, "tolist", self._array)
        self._patch(Tensor, "__bool__", self._bool)

    def remove(self) -> None:
        """Leaves torch as it was."""
        for handle in self._handles + self._module_handles:
            handle.remove()
        for owner, name, original, own in reversed(self._patched):
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        self._handles, self._module_handles, self._patched = [], [], []

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        self._patched.append((owner, name, vars(owner).get(name), own))
        setattr(owner, name, functools.wraps(original)(make(original)))

    @property
    def _elsewhere(self) -> bool:
        """A forked worker inherits all this and must not act on it."""
        return os.getpid() != self._process

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        """An error of ours is said once and never reaches the program."""
        try:
            with self.audience.unseen():
                act(*args)
        except Exception as error:
            self.audience.internal_error(error)

    # Optimizers.

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        self._guard(self.gate.before_update, optimizer, closure)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guard(self.gate.after_update, optimizer)

    def _optimizer_init(self, original: Any) -> Any:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._guard(self.gate.optimizer_made, optimizer)
            self._guard(self.audience.optimizer_made)

        return made

    # Backward.

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._elsewhere or torch._C._current_autograd_node() is not None:
                return original(tensors, *args, **kwargs)
            roots = [t for t in ([tensors] if isinstance(tensors, Tensor) else list(tensors)) if isinstance(t, Tensor)]
            self._guard(self._begin_backward, roots)
            result = original(tensors, *args, **kwargs)
            self._guard(self.gate.backward_ended, roots)
            return result

        return backward

    def _begin_backward(self, roots: list[Tensor]) -> None:
        self._stop_following_modules()
        self.audience.backward_begins()
        self.gate.backward_begins(roots)

    def _grad(self, original: Any) -> Any:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(outputs, inputs, *args, **kwargs)
            if not torch.compiler.is_compiling() and not self._elsewhere:
                create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
                self._guard(self._grad_returned, outputs, inputs, result, create_graph)
            return result

        return grad

    def _grad_returned(self, outputs: Any, inputs: Any, result: Any, create_graph: bool) -> None:
        targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if create_graph or not all(isinstance(t, Tensor) for t in targets):
            return
        losses = [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if isinstance(t, Tensor)]
        self._stop_following_modules()
        self.gate.gradients_returned(losses, [g for g in result if isinstance(g, Tensor)])

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            self._guard(self.gate.loss_scaled, outputs, result)
            return result

        return scale

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.gate.steps.total
            result = original(scaler, optimizer, *args, **kwargs)
            if self.gate.steps.total == before and scaler.is_enabled():
                self._guard(lambda: self.gate.step_skipped(optimizer, scaler.get_scale()))
            return result

        return step

    # Data.

    def _next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            if self._elsewhere:
                return original(iterator)
            return self.audience.next_batch(iterator, original)

        return following

    def _next_index(self, original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            indices = original(iterator)
            self._guard(self.audience.replayer.sampled, iterator, indices)
            return indices

        return _next_index

    def _reset(self, original: Any) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self._guard(self.audience.replayer.epoch_begins, iterator)
            return original(iterator, *args, **kwargs)

        return _reset

    # Values that the program reads.

    def _item(self, original: Any) -> Any:
        def item(tensor: Tensor) -> Any:
            value = original(tensor)
            if type(value) is float and not math.isfinite(value):
                self._guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return item

    def _array(self, original: Any) -> Any:
        def array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            value = original(tensor, *args, **kwargs)
            if tensor.numel() == 1 and not is_finite(tensor):
                self._guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return array

    def _float(self, original: Any) -> Any:
        warned = False

        def as_float(tensor: Tensor) -> Any:
            nonlocal warned
            if warned or not tensor.requires_grad:
                value = original(tensor)
            else:
                # torch warns of this once, and has to name the line of the program, not this one.
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    value = original(tensor)
                for one in said:
                    warned = True
                    _warn_at(sys._getframe(1), one)
            if not math.isfinite(value):
                self._guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return as_float

    def _bool(self, original: Any) -> Any:
        def truth(tensor: Tensor) -> Any:
            value = original(tensor)
            if tensor.dtype is torch.bool and not torch.compiler.is_compiling():
                self._guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return truth

    # Outermost module calls, until the program is known to train.

    def _module_called(self, module: Any, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._depth.value = getattr(self._depth, "value", 0) + 1

    def _module_returned(self, module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        depth = self._depth.value = max(getattr(self._depth, "value", 1) - 1, 0)
        if depth == 0 and not self.gate.trained and output is not None and not self._elsewhere:
            self._guard(self.audience.module_returned, module, output)

    def _stop_following_modules(self) -> None:
        for handle in self._module_handles:
            handle.remove()
        self._module_handles = []

    def _compile(self, original: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> Any:
            # Compiled code is guarded on these hooks: taken off later they would make it compile again.
            self._stop_following_modules()
            return original(*args, **kwargs)

        return compile


def _warn_at(frame: Any, message: warnings.WarningMessage) -> None:
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message.message, message.category, frame.f_code.co_filename, frame.f_lineno, name, registry)
