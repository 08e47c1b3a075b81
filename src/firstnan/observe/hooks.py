"""Installs torch's hooks and the patches of the manifest, and reports training to one observer."""

from __future__ import annotations

import math
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from firstnan.observe import manifest
from firstnan.observe.collectives import NAMES, collectives
from firstnan.observe.compiler import stay_uncompiled
from firstnan.observe.forked import keep_indices
from firstnan.observe.layers.global_hooks import GlobalHooks, unhookable
from firstnan.observe.observer import Decision, Observer
from firstnan.observe.patches import Hook, Patches
from firstnan.observe.sites import ends_at_origin
from firstnan.records.errors import NonFiniteError
from firstnan.tensors.finite import is_finite, unwrapped
from firstnan.tensors.models import calls_closure_first, drop_gradients, is_torch_optimizer

_NO_MODES = nullcontext()
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack


def outside_modes() -> AbstractContextManager[Any]:
    """A context in which the program's `TorchFunctionMode`s do not see what we compute."""
    return torch._C.DisableTorchFunction() if _function_modes() else _NO_MODES


def outside_transforms() -> AbstractContextManager[Any]:
    """A context in which what we compute is not part of a `torch.func` transform that is running."""
    return temporarily_clear_interpreter_stack() if _transforms() else _NO_MODES


def _nested_gradients(outputs: Any) -> int:
    """How many gradients of `torch.func` are taken of this result, one inside the other."""
    at = outputs if isinstance(outputs, Tensor) else next(iter(outputs), None)
    depth, functorch = 0, torch._C._functorch
    while isinstance(at, Tensor) and functorch.is_functorch_wrapped_tensor(at):
        depth += functorch.is_gradtrackingtensor(at)
        at = functorch.get_unwrapped(at)
    return depth


def _without_parameters(optimizer: Any) -> Any:
    """What stands in for an optimizer whose update is dropped; torch's own ones pass over parameters without gradients.

    One that somebody has written may not. What its `step` counts is not counted either.
    """
    if is_torch_optimizer(optimizer):
        return optimizer
    empty = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        holds_tensors = isinstance(value, list | tuple) and any(isinstance(one, torch.Tensor) for one in value)
        vars(empty)[name] = [] if holds_tensors else value
    vars(empty)["param_groups"] = [{**group, "params": []} for group in optimizer.param_groups]
    return empty


class Hooks:
    """The hooks that are installed while training is watched: on the given optimizers, or on all.

    With `program` also around what a program that knows nothing of it does: its batches, and what it reads. With
    `replays` also around collectives, whose results are kept for a child that replays the step.
    """

    def __init__(
        self,
        observer: Observer,
        optimizers: Sequence[Any] | None = None,
        *,
        program: bool = False,
        replays: bool = True,
    ) -> None:
        self.observer = observer
        self.installed = False
        self._optimizers, self._program, self._replays = optimizers, program, replays
        self._patches = Patches()
        self._handles: list[Any] = []
        self._module_handles: list[Any] = []
        self._depth = threading.local()
        self._trains = False
        self._process = os.getpid()
        self._after_updates: list[_AfterUpdate] = []
        self._compile_as_usual: Callable[[], None] = lambda: None
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The gradient scalers in use."""

    def install(self) -> None:
        self.installed, self._process = True, os.getpid()
        self._compile_as_usual = stay_uncompiled()
        if self._optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._new_after_update(None)),
            ]
        for optimizer in self._optimizers or ():
            self.watch(optimizer)
        # A program or a framework may make an optimizer later, or replace one.
        names = [*manifest.TRAINING, *manifest.ALL_OPTIMIZERS]
        names += manifest.COLLECTIVES if self._replays else ()
        names += () if self._optimizers is None else manifest.SCHEDULERS
        if self._program:
            self._module_handles = [
                register_module_forward_pre_hook(self._module_called),
                register_module_forward_hook(self._module_returned, always_call=True),
            ]
            names += manifest.PROGRAM
        for owner, name in names:
            # Who watches a whole program is told before a detector of the program's own, which may act on it.
            self._patches.put(owner, name, getattr(self, _AROUND[name]), outermost=self._program)

    def watch(self, optimizer: Any) -> None:
        """Watches the updates of this optimizer from now on."""
        self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._new_after_update(optimizer)))

    def _new_after_update(self, optimizer: Any) -> _AfterUpdate:
        self._after_updates.append(_AfterUpdate(optimizer, self._after_update))
        return self._after_updates[-1]

    def remove(self) -> None:
        """Leaves torch and the optimizers as they were."""
        self.installed = False
        self._compile_as_usual()
        for handle in self._handles:
            handle.remove()
        self._handles, self._after_updates = [], []
        self._patches.remove()
        self._stop_following_modules()

    def moved_to_child(self) -> None:
        """This process was forked from the watched one, to go on in its place."""
        self._process = os.getpid()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """A context whose updates are not steps of the program."""
        self.installed = False
        try:
            yield
        finally:
            self.installed = True

    @property
    def idle(self) -> bool:
        """Whether to do nothing: removed while other code still holds a patched function, or in a forked worker."""
        return not self.installed or os.getpid() != self._process

    def guarded(self, act: Callable[..., Any], *args: Any, otherwise: Any = None) -> Any:
        """Calls our code: its errors are reported once and never reach the program, but findings do."""
        __tracebackhide__ = True
        if not self.installed:
            return otherwise
        try:
            if not _function_modes():  # the usual case, kept fast
                with self.observer.unseen():
                    return act(*args)
            with outside_modes(), self.observer.unseen():
                return act(*args)
        except NonFiniteError as error:
            raise ends_at_origin(error) from None
        except Exception as error:
            self.observer.internal_error(error)
            return otherwise

    # Optimizers.

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None or self.idle or not calls_closure_first(optimizer):
            dropped = self._update_begins(optimizer, closure=closure is not None)
            return ((_without_parameters(optimizer), *args[1:]), kwargs) if dropped else None
        # The update would begin with this call. Made here, its gradients can be judged before they are used.
        with torch.enable_grad():
            loss = closure()
        dropped = self._update_begins(optimizer, closure=False)
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (_without_parameters(optimizer) if dropped else optimizer, lambda: loss, *args[2:]), rest

    def _update_begins(self, optimizer: Any, *, closure: bool) -> bool:
        """Whether the update is dropped."""
        __tracebackhide__ = True
        if not closure and self._quickly(self.observer.passes_quickly, optimizer):
            return False
        if self.guarded(self.observer.before_update, optimizer, closure, sys._getframe(2)) is Decision.DROP:
            drop_gradients(optimizer)
            return True
        return False

    def _after_update(self, optimizer: Any) -> None:
        __tracebackhide__ = True
        if not self._quickly(self.observer.passed_quickly, optimizer):
            self.guarded(self.observer.after_update, optimizer)

    def has_compiled_updates(self) -> bool:
        """Whether compiled code has run an optimizer since `compiled_updates` was last asked."""
        for after in self._after_updates:  # noqa: SIM110  # asked twice a step, and a generator costs more
            if after.compiled:
                return True
        return False

    def compiled_updates(self) -> list[Any]:
        """The optimizers that were run by compiled code since this was last asked; None for one that is not known."""
        found = []
        for after in self._after_updates:
            if after.compiled:
                after.compiled = False
                found.append(after.optimizer())
        return found

    def _quickly(self, suffices: Callable[[Any], bool], optimizer: Any) -> bool:
        """Asks without the lock, which is expensive and not needed for a step that passes."""
        __tracebackhide__ = True
        try:
            if not _function_modes():
                return self.installed and suffices(optimizer)
            with outside_modes():
                return self.installed and suffices(optimizer)
        except NonFiniteError as error:
            raise ends_at_origin(error) from None
        except Exception as error:
            self.observer.internal_error(error)
            return False

    def _init(self, original: Any) -> Any:
        def made(thing: Any, *args: Any, **kwargs: Any) -> None:
            original(thing, *args, **kwargs)
            if isinstance(thing, LRScheduler):
                self.guarded(self.observer.scheduler_made, thing)
            else:
                self.guarded(self.observer.optimizer_made, thing, sys._getframe(1))

        return made

    # Backward.

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if torch.compiler.is_compiling() or not self.installed or torch._C._current_autograd_node() is not None:
                return original(tensors, *args, **kwargs)
            if os.getpid() != self._process:
                self.observer.forked()
                if self.idle:
                    return original(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
            if not self.observer.concerns(roots):
                return original(tensors, *args, **kwargs)
            if not self._trains:
                self._training_begins()
            self.guarded(self.observer.before_backward, roots, sys._getframe(1))
            result = original(tensors, *args, **kwargs)
            if self.observer.needs_after_backward():
                self.guarded(self.observer.after_backward, roots)
            return result

        return backward

    def _grad(self, original: Any) -> Any:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = original(outputs, inputs, *args, **kwargs)
            if not torch.compiler.is_compiling() and not self.idle:
                create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
                if (depth := _nested_gradients(outputs)) > 0:
                    create_graph = depth > 1  # torch.func always creates a graph; the outermost is for an update
                with outside_transforms():
                    self.guarded(self._grad_returned, outputs, inputs, result, create_graph, sys._getframe(1))
            return result

        return grad

    def _grad_returned(self, outputs: Any, inputs: Any, result: Any, create_graph: bool, frame: FrameType) -> None:
        targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if create_graph or not all(isinstance(t, Tensor) for t in targets):
            return
        losses = [
            unwrapped(t) for t in ([outputs] if isinstance(outputs, Tensor) else outputs) if isinstance(t, Tensor)
        ]
        if self.observer.concerns(losses):
            self._training_begins()
            gradients = [unwrapped(g) for g in result if isinstance(g, Tensor)]
            self.observer.gradients_returned(losses, [unwrapped(t) for t in targets], gradients, frame)

    # Clipping.

    def _total_norm(self, original: Any) -> Any:
        def _get_total_norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            norm = original(tensors, norm_type, *args, **kwargs)
            if isinstance(tensors, list) and norm_type == 2 and not torch.compiler.is_compiling() and not self.idle:
                self.guarded(self.observer.norm_measured, tensors, norm)
            return norm

        return _get_total_norm

    def _clip(self, original: Any) -> Any:
        def _clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            if isinstance(parameters, list) and not torch.compiler.is_compiling() and not self.idle:
                self.guarded(self.observer.gradients_clipped, parameters, max_norm, total_norm)
            return result

        return _clip_grads_with_norm_

    # Gradient scalers.

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            __tracebackhide__ = True
            result = original(scaler, outputs)
            if torch.compiler.is_compiling():
                return result
            if scaler not in self.scalers:
                self.scalers.add(scaler)
            return self.guarded(self.observer.loss_scaled, outputs, result, scaler, otherwise=result)

        return scale

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            before = self.observer.update_count()
            result = original(scaler, optimizer, *args, **kwargs)
            ours = self._optimizers is None or any(optimizer is o for o in self._optimizers)
            if ours and self.observer.update_count() == before and scaler.is_enabled():
                self.guarded(lambda: self.observer.update_skipped(optimizer, scaler.get_scale()))
            return result

        return step

    # Loaders and their samplers.

    def _next_index(self, original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            __tracebackhide__ = True
            indices = original(iterator)
            indices = self.guarded(self.observer.indices_sampled, iterator, indices, otherwise=indices)
            keep_indices(iterator, indices)
            return indices

        return _next_index

    def _reset(self, original: Any) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            self.guarded(self.observer.epoch_begins, iterator)
            return original(iterator, *args, **kwargs)

        return _reset

    def _next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            __tracebackhide__ = True
            if not self.installed or os.getpid() != self._process:  # `idle`, kept fast
                return original(iterator)
            return self.observer.loader_asked(iterator, original)

        return following

    # Collectives.

    def _collective(self, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if torch.compiler.is_compiling() or (self.idle and not collectives.is_replaying):
                return original(*args, **kwargs)
            updates, name = self.observer.update_count(), original.__name__
            call = self.guarded(collectives.begin, name, args, kwargs, updates, sys._getframe(1))
            if call is None:
                return original(*args, **kwargs)
            try:
                result = original(*args, **kwargs)
            finally:
                collectives.left()
            self.guarded(collectives.end, call, result)
            return result

        return collective

    def _destroy(self, original: Any) -> Any:
        def destroy_process_group(group: Any = None, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if group is None and not self.idle:
                self.guarded(self.observer.group_left)
            return original(group, *args, **kwargs)

        return destroy_process_group

    # Values that the program reads.

    def _item(self, original: Any) -> Any:
        def item(tensor: Tensor) -> Any:
            value = original(tensor)
            if type(value) is float and not math.isfinite(value):
                self.guarded(self.observer.value_read, tensor, sys._getframe(1))
            return value

        return item

    def _array(self, original: Any) -> Any:
        def array(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            value = original(tensor, *args, **kwargs)
            if tensor.numel() == 1 and not is_finite(tensor):
                self.guarded(self.observer.value_read, tensor, sys._getframe(1))
            return value

        return array

    def _float(self, original: Any) -> Any:
        warned = False

        def as_float(tensor: Tensor) -> Any:
            nonlocal warned
            if warned or not tensor.requires_grad:
                value = original(tensor)
            else:
                # torch warns about this once, and the warning must name the program's line, not this one.
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    value = original(tensor)
                for one in said:
                    warned = True
                    _warn_at(sys._getframe(1), one)
            if not math.isfinite(value):
                self.guarded(self.observer.value_read, tensor, sys._getframe(1))
            return value

        return as_float

    def _bool(self, original: Any) -> Any:
        def truth(tensor: Tensor) -> Any:
            value = original(tensor)
            if tensor.dtype is torch.bool and not torch.compiler.is_compiling():
                self.guarded(self.observer.value_read, tensor, sys._getframe(1))
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
        if depth == 0 and not self._trains and output is not None and not self.idle:
            self.guarded(self.observer.module_returned, module, output)

    def _training_begins(self) -> None:
        if not self._trains:
            self._trains = True
            self._stop_following_modules()

    def _stop_following_modules(self) -> None:
        for handle in self._module_handles:
            handle.remove()
        self._module_handles = []

    def _compile(self, original: Any) -> Any:
        def compile(*args: Any, **kwargs: Any) -> Any:
            # Compiled code has guards on these hooks: removing them later would cause a recompilation.
            self._stop_following_modules()
            return original(*args, **kwargs)

        return compile


class _AfterUpdate:
    """Runs after an update. In compiled code it only leaves a mark: nothing else may happen there."""

    def __init__(self, optimizer: Any, act: Callable[[Any], None]) -> None:
        self.optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._is_named = optimizer is not None
        self.compiled = False
        self._act = act

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        __tracebackhide__ = True
        if torch.compiler.is_compiling():
            self.compiled = True
            return
        for hook in list(_global_optimizer_post_hooks.values()) if self._is_named else ():
            # torch would call it later, but who watches a whole program is told first: this one may raise.
            if isinstance(hook, _AfterUpdate):
                hook(optimizer, args, kwargs)
        self._act(optimizer)


class CallHooks:
    """Hooks on the calls of given models, which do not follow them into copies or files."""

    def __init__(self, roots: Sequence[Any], before: Callable[..., None], after: Callable[..., None]) -> None:
        """`before(module, args, kwargs)` and `after(module, args, output)`."""
        self._roots, self._before, self._after = roots, Hook(before), Hook(after)
        self._before_handles: list[Any] = []
        self._after_handles: list[Any] = []
        self._global = GlobalHooks()

    def install(self) -> None:
        without = unhookable(self._roots)
        for root in self._roots:
            if id(root) in without:
                self._global.add(
                    root,
                    lambda module, args: self._before(module, args, {}),
                    lambda module, args, kwargs, output: self._after(module, args, output),
                )
                continue
            self._before_handles.append(root.register_forward_pre_hook(self._before, with_kwargs=True))
            self._after_handles.append(root.register_forward_hook(self._after))

    def remove_after(self) -> None:
        for handle in self._after_handles:
            handle.remove()
        self._after_handles = []

    def remove(self) -> None:
        self.remove_after()
        self._global.remove()
        for handle in self._before_handles:
            handle.remove()
        self._before_handles = []


class PartHooks:
    """A hook before the calls of given modules, for a short time: torch is asked about every call meanwhile."""

    def __init__(self) -> None:
        self._handle: Any = None

    def install(self, modules: Sequence[Any], act: Callable[[], None]) -> None:
        parts = {id(module) for module in modules}

        def called(module: Any, args: Any) -> None:
            if id(module) in parts and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                act()

        self._handle = register_module_forward_pre_hook(called)

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def on_gradient(tensor: Tensor, act: Callable[[Tensor], None]) -> None:
    """Calls `act` with the gradient of this tensor when backward has computed it."""
    tensor.register_hook(act)


_AROUND = {
    "__init__": "_init",
    "backward": "_backward",
    "grad": "_grad",
    "_get_total_norm": "_total_norm",
    "_clip_grads_with_norm_": "_clip",
    "scale": "_scale",
    "step": "_scaler_step",
    "_next_index": "_next_index",
    "_reset": "_reset",
    "__next__": "_next",
    "compile": "_compile",
    "item": "_item",
    "__float__": "_float",
    "numpy": "_array",
    "tolist": "_array",
    "__bool__": "_bool",
    "destroy_process_group": "_destroy",
    **dict.fromkeys(NAMES, "_collective"),
}
"""Which method of Hooks goes around each name of the manifest."""


def _warn_at(frame: Any, message: warnings.WarningMessage) -> None:
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name = frame.f_globals.get("__name__")
    warnings.warn_explicit(message.message, message.category, frame.f_code.co_filename, frame.f_lineno, name, registry)
