"""Looks at the risky operators of a few steps of a long training: which steps, and what that may cost."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from firstnan.engine.ranks import world
from firstnan.gate.forecast import Course
from firstnan.gate.layer_histories import NEAR, LayerHistories
from firstnan.observe.compiler import was_used  # a hook or a mode would have it compile again
from firstnan.observe.sites import Ownership
from firstnan.records import Forecast, Headroom
from firstnan.tensors.finite import read_all, readable
from firstnan.tensors.models import Parts
from firstnan.tracing.headroom import RiskyOperators

_RARER, _MOST = 5, 512
"""Between two samples is at least a fifth of all steps, or 512; half of that, where a sample takes less than:"""
_CHEAP = 0.002
_NEARER = 4
"""Or a quarter of that, if something comes near its limit."""
_SHARE = 0.002
"""Of the time of training, for all samples together..."""
_ALLOWANCE, _NEARER_ALLOWANCE = 0.1, 0.5
"""...and this many seconds: a training that fails after a few hundred short steps is sampled often enough too.
What comes near its limit is worth more of them, which a healthy training does not use."""


class StepSamples:
    """Samples the forward pass of single steps, the later the rarer, and no more than time allows.

    What counts as the cost is how much longer a sampled pass takes than the pass before it, in the time of this thread:
    a busy machine makes neither of them more expensive.
    """

    def __init__(self, ownership: Ownership) -> None:
        self.due = 1
        """The number of updates after which the next step is sampled."""
        self._operators = RiskyOperators(ownership)
        self._layers = SampledLayers()
        self._tell: Callable[[Forecast], None] = lambda forecast: None
        self._handle: Any = None
        self._thread = 0
        self._began: float | None = None
        self._steps_before = self._samples = 0
        self._cost = self._since = 0.0
        self._last_costs: deque[float] = deque(maxlen=5)
        """Their median counts: the garbage collector may run in any pass."""
        self._plain: float | None = None
        """The time of the forward pass before the sampled one; None while it is not known."""
        self.active = False
        """Whether a step is looked at or timed, or about to be."""
        self._calls_modules = True
        """Whether the program calls modules: their first call begins a pass, and otherwise the end of the last step."""

    def tell_forecasts(self, tell: Callable[[Forecast], None], parts: Callable[[], Parts], *, outputs: bool) -> None:
        """Forecasts go to `tell`; `parts` has the modules of the models, whose `outputs` are measured here."""
        self._tell = tell
        self._layers.measure(tell, parts, outputs=outputs)

    def step_ended(self, updates: int) -> None:
        """Called when `due` is reached: the next forward pass is timed, and the one after it looked at."""
        now = time.thread_time()
        if self._began is None:  # the first step has done what is done once
            self._began, self._steps_before, self.due = now, updates, updates + 1
            return
        elapsed, steps = now - self._began, max(updates - self._steps_before, 1)
        often = self._operators.approaching or self._layers.approaching
        is_cheap = self._cost < _CHEAP * self._samples
        gap = min(steps // (2 * _RARER if is_cheap else _RARER), _MOST)
        self.due = updates + max(gap // _NEARER if often else gap, 1)
        cost = self._cost - (_NEARER_ALLOWANCE if often else _ALLOWANCE)
        if cost > _SHARE * elapsed:
            wait = (cost / _SHARE - elapsed) / (elapsed / steps)
            self.due = updates + int(wait) + 1
            return
        if self.active or was_used() or not world().is_alone:
            return
        if self._plain is None:
            self.due = updates + 1
        self._thread, self.active = threading.get_ident(), True
        if self._calls_modules:
            self._handle = register_module_forward_pre_hook(self._module_called)
        else:
            self._begin()

    def _module_called(self, module: Any, args: Any) -> None:
        if self._handle is None or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return
        self._remove_hook()
        try:
            self._begin()
        except Exception:  # one sample less
            return

    def _begin(self) -> None:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if _get_current_dispatch_mode() is not None or torch.compiler.is_compiling() or capturing:
            return
        self._since = time.thread_time()
        if self._plain is not None:
            self._operators.start()
            self._layers.start(self._operators.paused)

    def stop(self, step: int) -> None:
        """The forward pass is over."""
        if self._handle is not None:  # no module was called
            self._calls_modules = False
        self._remove_hook()
        since, self._since, self.active = self._since, 0.0, False
        if self._operators.running:
            self._layers.stop(step)
            for forecast in self._operators.stop(step):
                self._tell(forecast)
            if self._samples:  # the first one has done what is done once
                self._last_costs.append(max(time.thread_time() - since - (self._plain or 0.0), 0.0))
                self._cost += median(self._last_costs)
            self._samples, self._plain = self._samples + 1, None
        elif since:
            self._plain = time.thread_time() - since

    def _remove_hook(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def nearest(self) -> tuple[Headroom, ...]:
        return self._operators.nearest()


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_LOW_VARIANCE = 1e2
"""A variance is followed when it is this many times its eps, or less."""


class SampledLayers:
    """Outputs of layers and inputs of normalisations in the sampled steps.

    Outputs are measured where layers are not watched in other steps.
    """

    def __init__(self) -> None:
        self._tell: Callable[[Forecast], None] = lambda forecast: None
        self._histories: LayerHistories | None = None
        self._variances: dict[str, Course] = {}
        self._parts: Callable[[], Parts] = dict
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, str, float, Tensor]] = []
        """Layer, dtype, eps (0 for an output), number."""
        self._handle: Any = None
        self._paused: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def measure(self, tell: Callable[[Forecast], None], parts: Callable[[], Parts], *, outputs: bool) -> None:
        """Forecasts go to `tell`; `parts` has the names of the modules."""
        self._tell, self._parts = tell, parts
        if outputs:
            self._histories = LayerHistories(tell)

    @property
    def approaching(self) -> bool:
        """Whether the output of a layer is large for its type, or the variance of an input is small."""
        worst = self._histories.worst if self._histories is not None else None
        return (worst is not None and worst[1] < NEAR) or any(c.nearer for c in self._variances.values())

    def start(self, paused: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._paused = paused
        self._handle = register_module_forward_hook(self._returned)

    def _returned(self, module: Any, args: Any, result: Any) -> None:
        if module._modules or not torch.is_grad_enabled():  # those inside it are measured
            return
        try:
            with self._paused(), torch._C.DisableTorchFunction(), torch.no_grad():
                self._note(module, args, result)
        except Exception:  # one layer less in a sample
            return

    def _note(self, module: Any, args: Any, result: Any) -> None:
        output = next((r for r in result if isinstance(r, Tensor)), None) if isinstance(result, tuple) else result
        plain = readable(output) if isinstance(output, Tensor) and self._histories is not None else None
        if plain is not None and plain.numel():
            dtype = str(plain.dtype).removeprefix("torch.")
            self._waiting.append((self._name(module), dtype, 0.0, torch.linalg.vector_norm(plain, math.inf)))
        if isinstance(module, _NORMS) and module.training and args:
            given = readable(args[0]) if isinstance(args[0], Tensor) else None
            variance = mean_variance(module, given) if given is not None else None
            if variance is not None:
                self._waiting.append((self._name(module), "", module.eps or 1e-30, variance))

    def _name(self, module: Any) -> str:
        name = self._names.get(id(module))
        if name is None:
            self._names = {key: path for key, (_, path) in self._parts().items()}
            name = self._names.setdefault(id(module), type(module).__name__)
        return name

    def stop(self, step: int) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        with self._paused(), torch._C.DisableTorchFunction(), torch.no_grad():
            numbers = read_all([number for *_, number in waiting])
        for (name, dtype, eps, _), number in zip(waiting, numbers, strict=True):
            if not eps:
                assert self._histories is not None
                self._histories.add(step, name, dtype, number, number, ())
            elif 0 < number < math.inf:
                course = self._variances.setdefault(name, Course())
                near = 1 / (_LOW_VARIANCE * eps)
                news = course.add("variance", "eps", partial(str, name), step, 1 / number, 1 / eps, near=near)
                if news is not None:
                    self._tell(news)


def mean_variance(module: Any, given: Tensor) -> Tensor | None:
    """The mean of the variances that a normalisation divides by the root of; of one feature alone it may be 0."""
    if isinstance(module, nn.LayerNorm):
        dims = tuple(range(given.dim() - len(module.normalized_shape), given.dim()))
    elif isinstance(module, nn.modules.batchnorm._NormBase) and given.dim() > 1:
        over_batch = isinstance(module, nn.modules.batchnorm._BatchNorm)
        dims = (0, *range(2, given.dim())) if over_batch else tuple(range(2, given.dim()))
    else:
        groups = given.reshape(given.size(0), module.num_groups, -1) if isinstance(module, nn.GroupNorm) else None
        return groups.float().var(-1, correction=0).mean() if groups is not None else None
    return given.float().var(dims, correction=0).mean() if dims and given.numel() else None
