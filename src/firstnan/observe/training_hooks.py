"""Where torch is touched to follow training: optimizers, backward, gradient scalers, samplers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.engine.handouts import Replayer
from firstnan.gate.gate import Gate
from firstnan.observe.patches import Patches
from firstnan.records.errors import NonFiniteError


class Audience(Protocol):
    """Who hears of what the program does, beyond the gate."""

    replayer: Replayer

    def concerns(self, roots: list[Tensor]) -> bool: ...
    def backward_begins(self) -> None: ...
    def optimizer_made(self) -> None: ...
    def internal_error(self, error: Exception) -> None: ...
    def unseen(self) -> AbstractContextManager[None]: ...


class TrainingHooks:
    """What is installed while training is watched: around the optimizers given, or around all there will be."""

    def __init__(self, gate: Gate, audience: Audience, optimizers: Sequence[Any] | None = None) -> None:
        self.gate, self.audience = gate, audience
        self.installed = False
        self._optimizers = optimizers
        self._patches = Patches()
        self._handles: list[Any] = []
        self._process = os.getpid()

    def install(self) -> None:
        self.installed, self._process = True, os.getpid()
        if self._optimizers is None:
            self._handles = [
                register_optimizer_step_pre_hook(self._before_update),
                register_optimizer_step_post_hook(self._after_update),
            ]
            self._patches.put(Optimizer, "__init__", self._optimizer_init)
        for optimizer in self._optimizers or ():
            self._handles.append(optimizer.register_step_pre_hook(self._before_update))
            self._handles.append(optimizer.register_step_post_hook(self._after_update))
            self.guard(self._watch_gradients, optimizer)
        self._patches.put(torch.autograd, "backward", self._backward)
        self._patches.put(torch.autograd, "grad", self._grad)
        # `clip_grad_norm_` finds these two by their names in its module, wherever the program has it from.
        self._patches.put(clip_grad, "_get_total_norm", self._total_norm)
        self._patches.put(clip_grad, "_clip_grads_with_norm_", self._clip)
        self._patches.put(torch.amp.GradScaler, "scale", self._scale)
        self._patches.put(torch.amp.GradScaler, "step", self._scaler_step)
        self._patches.put(_BaseDataLoaderIter, "_next_index", self._next_index)
        self._patches.put(_BaseDataLoaderIter, "_reset", self._reset)

    def remove(self) -> None:
        """Leaves torch and the optimizers as they were."""
        self.installed = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.gate.gradient_norms.remove()
        self._patches.remove()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """What runs inside is no step of the program."""
        self.installed = False
        try:
            yield
        finally:
            self.installed = True

    @property
    def idle(self) -> bool:
        """Taken off while someone else still holds a patched function; or in a forked worker, which inherits them."""
        return not self.installed or os.getpid() != self._process

    def guard(self, act: Any, *args: Any) -> None:
        """An error of ours is said once and never reaches the program; what was found does."""
        if not self.installed:
            return
        try:
            with self.audience.unseen():
                act(*args)
        except NonFiniteError:
            raise
        except Exception as error:
            self.audience.internal_error(error)

    # Optimizers.

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        closure = kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)
        if not closure and self._quick_check(self.gate.passes_quick_check, optimizer):
            return
        if not self.gate.call_sites.knows_step_of(optimizer):
            self.guard(self.gate.call_sites.stepped, optimizer, sys._getframe(1))
        self.guard(self.gate.before_update, optimizer, closure)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._quick_check(self.gate.passed_quick_check, optimizer):
            self.guard(self.gate.after_update, optimizer)

    def _quick_check(self, suffices: Callable[[Any], bool], optimizer: Any) -> bool:
        """Without the lock, which costs more than it is worth: no other thread has a part in a step that passes."""
        try:
            return self.installed and suffices(optimizer)
        except NonFiniteError:
            raise
        except Exception as error:
            self.audience.internal_error(error)
            return False

    def _optimizer_init(self, original: Any) -> Any:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self.guard(self.gate.call_sites.made, optimizer, sys._getframe(1))
            self.guard(self.gate.optimizer_made, optimizer)
            self.guard(self._watch_gradients, optimizer)
            self.guard(self.audience.optimizer_made)

        return made

    def _watch_gradients(self, optimizer: Any) -> None:
        if not self.gate.thorough:
            self.gate.gradient_norms.watch(optimizer)

    # Backward.

    def _backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.idle or torch._C._current_autograd_node() is not None:
                return original(tensors, *args, **kwargs)
            roots = [tensors] if isinstance(tensors, Tensor) else [t for t in tensors if isinstance(t, Tensor)]
            if not self.audience.concerns(roots):
                return original(tensors, *args, **kwargs)
            if not self.gate.call_sites.backward:
                self.guard(self.gate.call_sites.called_backward, sys._getframe(1))
            self.guard(self._begin_backward, roots)
            result = original(tensors, *args, **kwargs)
            if self.gate.uses_gradients_at_once:
                self.guard(self.gate.backward_ended, roots)
            return result

        return backward

    def _begin_backward(self, roots: list[Tensor]) -> None:
        self.audience.backward_begins()
        self.gate.backward_begins(roots)

    def _grad(self, original: Any) -> Any:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(outputs, inputs, *args, **kwargs)
            if not torch.compiler.is_compiling() and not self.idle:
                create_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
                self.guard(self._grad_returned, outputs, inputs, result, create_graph)
            return result

        return grad

    def _grad_returned(self, outputs: Any, inputs: Any, result: Any, create_graph: bool) -> None:
        targets = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if create_graph or not all(isinstance(t, Tensor) for t in targets):
            return
        losses = [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if isinstance(t, Tensor)]
        if self.audience.concerns(losses):
            self._gradients_returned(losses, [g for g in result if isinstance(g, Tensor)])

    def _gradients_returned(self, losses: list[Tensor], gradients: list[Tensor]) -> None:
        self.gate.gradients_returned(losses, gradients)

    # Clipping.

    def _total_norm(self, original: Any) -> Any:
        def _get_total_norm(tensors: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            norm = original(tensors, norm_type, *args, **kwargs)
            if isinstance(tensors, list) and norm_type == 2 and not torch.compiler.is_compiling() and not self.idle:
                self.guard(self.gate.clipping.norm_computed, tensors, norm)
            return norm

        return _get_total_norm

    def _clip(self, original: Any) -> Any:
        def _clip_grads_with_norm_(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, max_norm, total_norm, *args, **kwargs)
            if isinstance(parameters, list) and not torch.compiler.is_compiling() and not self.idle:
                self.guard(self.gate.clipping.gradients_clipped, parameters, max_norm, total_norm)
            return result

        return _clip_grads_with_norm_

    # Gradient scalers.

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            self.guard(self.gate.loss_scaled, outputs, result)
            return result

        return scale

    def _scaler_step(self, original: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self.gate.steps.total
            result = original(scaler, optimizer, *args, **kwargs)
            ours = self._optimizers is None or any(optimizer is o for o in self._optimizers)
            if ours and self.gate.steps.total == before and scaler.is_enabled():
                self.guard(lambda: self.gate.step_skipped(optimizer, scaler.get_scale()))
            return result

        return step

    # Samplers: which elements of the dataset a batch is made of.

    def _next_index(self, original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            indices = original(iterator)
            self.guard(self.audience.replayer.sampled, iterator, indices)
            return indices

        return _next_index

    def _reset(self, original: Any) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            self.guard(self.audience.replayer.epoch_begins, iterator)
            return original(iterator, *args, **kwargs)

        return _reset
