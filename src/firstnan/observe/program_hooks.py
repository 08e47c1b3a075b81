"""What is touched in torch besides, to follow a program that knows nothing of it: its batches and what it reads."""

from __future__ import annotations

import math
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.gate.gate import Gate
from firstnan.observe.training_hooks import Audience, TrainingHooks
from firstnan.tensors.finite import is_finite


class ProgramAudience(Audience, Protocol):
    def next_batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any: ...
    def value_read(self, tensor: Tensor, caller: Any) -> None: ...
    def module_returned(self, module: Any, output: Any) -> None: ...


class Stop(SystemExit):
    """Ends the watched program after a finding; its own `finally` blocks and exit handlers still run."""

    def __init__(self) -> None:
        super().__init__(3)


def end_program() -> NoReturn:
    """Stops the thread that trains; in another than the main one only plain SystemExit ends it silently."""
    raise Stop if threading.current_thread() is threading.main_thread() else SystemExit(Stop().code)


class ProgramHooks(TrainingHooks):
    """All that is installed in torch while a whole program is watched."""

    audience: ProgramAudience

    def __init__(self, gate: Gate, audience: ProgramAudience) -> None:
        super().__init__(gate, audience)
        self._module_handles: list[Any] = []
        self._depth = threading.local()

    def install(self) -> None:
        super().install()
        self._module_handles = [
            register_module_forward_pre_hook(self._module_called),
            register_module_forward_hook(self._module_returned, always_call=True),
        ]
        self._patches.put(_BaseDataLoaderIter, "__next__", self._next)
        self._patches.put(torch, "compile", self._compile)
        self._patches.put(Tensor, "item", self._item)
        self._patches.put(Tensor, "__float__", self._float)
        self._patches.put(Tensor, "numpy", self._array)
        self._patches.put(Tensor, "tolist", self._array)
        self._patches.put(Tensor, "__bool__", self._bool)

    def remove(self) -> None:
        super().remove()
        self._stop_following_modules()

    def _begin_backward(self, roots: list[Tensor]) -> None:
        self._stop_following_modules()
        super()._begin_backward(roots)

    def _gradients_returned(self, losses: list[Tensor], gradients: list[Tensor]) -> None:
        self._stop_following_modules()
        super()._gradients_returned(losses, gradients)

    def _next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            if self.idle:
                return original(iterator)
            return self.audience.next_batch(iterator, original)

        return following

    # Values that the program reads.

    def _item(self, original: Any) -> Any:
        def item(tensor: Tensor) -> Any:
            value = original(tensor)
            if type(value) is float and not math.isfinite(value):
                self.guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return item

    def _array(self, original: Any) -> Any:
        def array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            value = original(tensor, *args, **kwargs)
            if tensor.numel() == 1 and not is_finite(tensor):
                self.guard(self.audience.value_read, tensor, sys._getframe(1))
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
                self.guard(self.audience.value_read, tensor, sys._getframe(1))
            return value

        return as_float

    def _bool(self, original: Any) -> Any:
        def truth(tensor: Tensor) -> Any:
            value = original(tensor)
            if tensor.dtype is torch.bool and not torch.compiler.is_compiling():
                self.guard(self.audience.value_read, tensor, sys._getframe(1))
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
        if depth == 0 and not self.gate.trained and output is not None and not self.idle:
            self.guard(self.audience.module_returned, module, output)

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
