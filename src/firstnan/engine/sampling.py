"""Looks at the risky operators of a few steps of a long training: which steps, and what that may cost."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from firstnan.engine.ranks import world
from firstnan.observe.compiler import was_used  # a hook or a mode would have it compile again
from firstnan.observe.sites import Ownership
from firstnan.records import Headroom
from firstnan.tracing.headroom import RiskyOperators

_FIRST = 512
_LEAST = 256
"""Steps before the first sample, and between two."""
_SHARE = 0.005
"""Of the time of training, for all samples together."""


class StepSamples:
    """Samples the forward pass of single steps, each twice as late as the one before, as far as time allows.

    The whole time of a sampled forward pass counts as its cost, although most of it is the program's own.
    """

    def __init__(self, ownership: Ownership) -> None:
        self.due = 1
        """The number of updates after which the next step is sampled."""
        self._operators = RiskyOperators(ownership)
        self._handle: Any = None
        self._thread = 0
        self._began: float | None = None
        self._steps_before = 0
        self._cost = self._since = 0.0

    def step_ended(self, updates: int) -> None:
        """Called when `due` is reached: the next forward pass is looked at."""
        now = time.perf_counter()
        if self._began is None:  # the first step has done what is done once
            self._began, self._steps_before, self.due = now, updates, updates + _FIRST
            return
        elapsed, steps = now - self._began, max(updates - self._steps_before, 1)
        self.due = updates + max(_LEAST, min(steps, 1 << 16))
        if self._cost > _SHARE * elapsed:
            wait = (self._cost / _SHARE - elapsed) / (elapsed / steps)
            self.due = updates + max(_LEAST, int(wait) + 1)
            return
        if self._handle is not None or self._operators.running or was_used() or not world().is_alone:
            return
        self._thread = threading.get_ident()
        self._handle = register_module_forward_pre_hook(self._module_called)

    def _module_called(self, module: Any, args: Any) -> None:
        if self._handle is None or not torch.is_grad_enabled() or threading.get_ident() != self._thread:
            return
        self._remove_hook()
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if _get_current_dispatch_mode() is not None or torch.compiler.is_compiling() or capturing:
            return
        self._since = time.perf_counter()
        self._operators.start()

    @property
    def active(self) -> bool:
        """Whether a step is looked at, or about to be."""
        return self._handle is not None or self._operators.running

    def stop(self, step: int) -> None:
        """The forward pass is over."""
        self._remove_hook()
        if self._operators.running:
            self._operators.stop(step)
            self._cost += time.perf_counter() - self._since

    def _remove_hook(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def nearest(self) -> tuple[Headroom, ...]:
        return self._operators.nearest()
