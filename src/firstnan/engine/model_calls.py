"""Replays without the loop: the model's last calls, kept and made again, or the update alone."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from firstnan.diagnose.rules import from_history
from firstnan.engine.handouts import Handouts
from firstnan.engine.microscope import Microscope
from firstnan.engine.recovery import Recovery
from firstnan.gate.gate import Trip
from firstnan.observe.hooks import CallHooks, Hooks, PartHooks, on_gradient
from firstnan.observe.patches import Hook
from firstnan.records import Noticed, Report
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tensors.models import Slot, bad_state, is_risky, is_torch_optimizer, parameters_of
from firstnan.tensors.state import RandomState, copy_batch, restore_buffers

_MOST_CALLS = 8
_DEVICES = ("cpu", "cuda")
_CALLING = frozenset({__file__, Hook.__call__.__code__.co_filename, Module.__call__.__code__.co_filename})
"""Where the functions are that call a model's hooks."""


@dataclass(slots=True, weakref_slot=True)
class ModelCall:
    """One call with its arguments, and the gradients that reached its outputs."""

    module: Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    thread: int
    autocast: list[tuple[str, torch.dtype]]
    random: RandomState
    buffers: list[tuple[Slot, Tensor, Tensor]]
    gradients: dict[int, Tensor] = field(default_factory=dict)


class ModelCalls:
    """Records the outermost calls of the models being trained."""

    def __init__(self, roots: Iterable[Module], handouts: Handouts) -> None:
        self.roots, self._handouts = list(roots), handouts
        self.calls: list[ModelCall] = []
        self.first: ModelCall | None = None
        """The calls of the current step, or the last of them if there were too many to keep."""
        self._before_call: Callable[[], None] | None = None
        self._trouble: Callable[[Exception], None] = lambda error: None
        self._on_call: Callable[[], None] = lambda: None
        self.caller: FrameType | None = None
        """The function that has called a model last, with gradients, in this step."""
        self._called = False
        """A model was called, with gradients, since this was last asked."""
        self._making = self._light = False
        self._last: tuple[Module, Any, Any, int, bool] | None = None
        self._hooks = CallHooks(self.roots, self._before, self._after)
        self._parts_hooks = PartHooks()

    def on_error(self, tell: Callable[[Exception], None]) -> None:
        """Who hears of errors of our own."""
        self._trouble = tell

    def when_called(self, act: Callable[[], None]) -> None:
        """Has `act` called before a call of a model, where all calls are kept."""
        self._on_call = act

    def attach(self) -> None:
        self._hooks.install()

    def keep_less(self) -> None:
        """The loop is replayed whole, so the gradients that reach the model are not needed."""
        self._hooks.remove_after()
        self._light = True

    def detach(self) -> None:
        self._hooks.remove()
        self._parts_hooks.remove()
        self._light = True
        self.forget()

    def before_next(self, act: Callable[[], None] | None) -> None:
        """Has `act` called before each call of a model, or of a part of it, from now on; None ends that."""
        self._before_call = act
        self._parts_hooks.remove()
        if act is not None:  # a loop may call the layers itself, as `model.encoder(x)`
            self._parts_hooks.install([part for root in self.roots for part in root.modules()], act)

    def were_made(self) -> bool:
        """Whether a model was called, with gradients, since this was last asked."""
        called, self._called = self._called, False
        return called

    def forget(self) -> None:
        """An update was made: a new step begins."""
        self.calls, self.first, self._last, self.caller = [], None, None, None

    def _before(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._light and self._before_call is None:
            # Keep this short: it runs in every step, which may take less than a millisecond.
            if torch.is_grad_enabled() and not self._making:
                self._last = (module, args, kwargs, threading.get_ident(), torch._C._is_any_autocast_enabled())
                self.caller = _calling_function()
            return
        if self._making or torch.compiler.is_compiling() or torch._C._current_autograd_node() is not None:
            return
        if self._before_call is not None:
            self._before_call()
        if torch.is_grad_enabled():
            try:
                self._keep(module, args, kwargs)
            except Exception as error:  # our own error, or that of an argument that does not support inspection
                self._trouble(error)

    def _keep(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._called = True
        self._on_call()
        self.caller = _calling_function()
        if len(self.calls) >= _MOST_CALLS:
            del self.calls[0]
        random, buffers = self._handouts.random_before_call(), self._handouts.copied_buffers()
        mixed = torch._C._is_any_autocast_enabled()
        autocast = [one for one in _autocast() if torch.is_autocast_enabled(one[0])] if mixed else []
        call = ModelCall(module, args, kwargs, threading.get_ident(), autocast, random, buffers)
        self.calls.append(call)
        self.first = self.first or call

    def keep_returned(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps a call that has returned, if it is not among those kept: without gradients none is."""
        if not self.mine():
            self._keep(module, args, kwargs)

    def _after(self, module: Module, args: Any, output: Any) -> None:
        calls = self.mine()
        if self._making or not calls or calls[-1].module is not module or not torch.is_grad_enabled():
            return
        try:
            call = weakref.ref(calls[-1])
            for i, (_, t) in enumerate(tensors_in(output)):
                if t.requires_grad and not t.is_leaf:
                    on_gradient(t, _Keeper(call, i))
        except Exception as error:
            self._trouble(error)

    def mine(self) -> list[ModelCall]:
        """The calls of this thread: another thread may use the same model for something else."""
        thread, latest = threading.get_ident(), self._handouts.latest
        if self._last is not None and latest is not None:
            module, args, kwargs, where, mixed = self._last
            devices = {p.device.type for p in module.parameters()}
            autocast = [one for one in _autocast() if mixed and one[0] in devices]
            last = ModelCall(module, args, kwargs, where, autocast, latest.random, latest.buffers)
            return [last] if where == thread else []
        return [call for call in self.calls if call.thread == thread]

    def buffers_before(self) -> list[tuple[Slot, Tensor, Tensor]]:
        """The buffers at the beginning of the current step, which may have used several batches."""
        return self.first.buffers if self.first is not None else self._handouts.first_buffers()

    def make_again(self, call: ModelCall, microscope: Microscope) -> tuple[list[Tensor], bool]:
        """Repeats the call under the tracer, with its gradients if there are any; restores everything afterwards.

        Returns what was non-finite, and whether a gradient that reached its outputs already was.
        """
        parameters = [p for root in self.roots for p in root.parameters()]
        gradients, now = [p.grad for p in parameters], RandomState.now()
        buffers = [(slot, old, old.detach().clone()) for slot, old, _ in call.buffers]
        self._making = True
        for p in parameters:
            p.grad = None
        try:
            restore_buffers(call.buffers)
            call.random.restore()
            # Copies, since the graph that an input came from may be freed; made outside of inference mode, in which
            # torch counts no writes, so values could not be followed.
            with torch.inference_mode(False):
                args, kwargs = copy_batch((call.args, call.kwargs))
            tracer = microscope.start(in_step=True)
            for label, t in tensors_in((args, kwargs)):
                tracer.give_role(t, "input", f"the model's input {label}")
            outputs = self._run_on_our_own(call, args, kwargs)
            with microscope.unseen():
                bad = [t for t in outputs if not is_finite(t)] or [
                    p.grad for p in parameters if p.grad is not None and not is_finite(p.grad)
                ]
                return bad, any(not is_finite(g) for g in call.gradients.values())
        finally:
            if microscope.tracer is not None:
                microscope.tracer.stop()
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            restore_buffers(buffers)
            now.restore()
            self._making = False

    def _run_on_our_own(self, call: ModelCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            for device, dtype in call.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            output = call.module(*args, **kwargs)
        found = [t for _, t in tensors_in(output)]
        pairs = [(found[i], g) for i, g in call.gradients.items() if i < len(found) and found[i].shape == g.shape]
        if pairs and all(is_finite(t) for t in found):
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        return found


def _calling_function() -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _CALLING:
        frame = frame.f_back
    return frame


class _Keeper:
    """Keeps the gradient of one output as long as its call is kept."""

    __slots__ = ("call", "index")

    def __init__(self, call: weakref.ref[ModelCall], index: int) -> None:
        self.call, self.index = call, index

    def __call__(self, gradient: Tensor) -> None:
        call = self.call()
        if call is not None:
            call.gradients[self.index] = gradient.detach()


def _autocast() -> list[tuple[str, torch.dtype]]:
    return [(device, torch.get_autocast_dtype(device)) for device in _DEVICES]


_OUTSIDE = "the loss code was outside what could be replayed"
_ADVICE = ": take batches from detector.batches(loader), or run the step with detector.step(function), to include it"
_IN_THE_LOSS = "the model's calls were finite when replayed, so the value originated after them, in the loss code"
_KEPT = ("parameter", "state", "buffer")
_BEFORE = (
    "the model's calls were finite when replayed: the value was there before this step, in an element that they do not"
    " use, or the update made it"
)
_ORDINARY = "the step was not replayed: its gradients were finite and the settings of its update ordinary"
_FORWARD = "the model's calls were finite when replayed; the gradients that reached them in backward were not kept"
_ELSEWHERE = (
    "the model's calls and their gradients were finite when replayed: the value comes from code outside them (a penalty"
    " on the weights, an edit of the gradients), or it was in the gradients before this step"
)
_GIVEN = "the gradient reaching the model's output was already non-finite, so it originated in the loss code"


class ReplaySource(Protocol):
    """A way to have the failing step, or a part of it, again at once; the first that can is used."""

    def can(self, trip: Trip) -> bool: ...

    def replay(self, report: Report, trip: Trip) -> Report:
        """The report with as much more as this replay shows."""
        ...


@dataclass(frozen=True)
class UpdateReplay:
    """The update that made bad parameters out of good gradients: undone, and made again under the tracer."""

    microscope: Microscope
    recovery: Recovery
    hooks: Hooks

    def can(self, trip: Trip) -> bool:
        last = self.microscope.gate.steps.last
        updated = not trip.before_update and trip.noticed.what in ("parameter", "state")
        return updated and self.recovery.backup is not None and last is not None and last() is not None

    def replay(self, report: Report, trip: Trip) -> Report:
        last = self.microscope.gate.steps.last
        optimizer = last() if last is not None else None
        assert optimizer is not None
        self.recovery.undo_update()
        tracer = self.microscope.start(in_step=True)
        tracer.at(in_optimizer=True, step=report.step or 0)
        with self.hooks.muted():
            optimizer.step()
        bad = [tensor for *_, tensor in bad_state(optimizer)] if trip.noticed.what == "state" else []
        written = bad or list(parameters_of(optimizer))
        found = self.microscope.conclude(trip.noticed, written, [], "the update was replayed")
        return _placed(found, report) if found is not None else report


@dataclass(frozen=True)
class BadBefore:
    """A weight that was bad before the update: what is known of that update says that it made no bad number."""

    microscope: Microscope

    def can(self, trip: Trip) -> bool:
        gate = self.microscope.gate
        optimizer = gate.steps.last() if gate.steps.last is not None else None
        if trip.before_update or trip.noticed.what != "parameter" or not is_torch_optimizer(optimizer):
            return False
        return not is_risky(optimizer, gate.norm) and not bad_state(optimizer)

    def replay(self, report: Report, trip: Trip) -> Report:
        self.microscope.start(in_step=True)
        found = self.microscope.conclude(trip.noticed, trip.tensors, [], _ORDINARY)
        return replace(_placed(found, report), reproduced="not_replayed") if found is not None else report


@dataclass(frozen=True)
class CallReplay:
    """The model's last calls, without the loss code; `advises`: whether to suggest a loop that shows everything."""

    microscope: Microscope
    calls: ModelCalls
    advises: Callable[[], bool]

    def can(self, trip: Trip) -> bool:
        return bool(self.calls.mine())

    def replay(self, report: Report, trip: Trip) -> Report:
        calls, given = self.calls.mine(), False
        hidden = trip.noticed.what not in ("output", *_KEPT)
        outside = (_OUTSIDE + _ADVICE if self.advises() else _OUTSIDE,) if hidden else ()
        for call in reversed(calls):
            bad, bad_given = self.calls.make_again(call, self.microscope)
            given = given or bad_given
            # Where the gradient that came in was bad already, everything after it is.
            found = None
            if bad and not given:
                found = self.microscope.conclude(trip.noticed, bad, [], "the model's last call was replayed")
            if found is not None:
                notes = (*found.notes, *outside)
                return replace(_placed(found, report), batch=report.batch or found.batch, notes=notes)
        if trip.noticed.what == "output":
            return report
        text = _GIVEN if given else self._why_finite(trip.noticed, calls)
        notes, how = (*report.notes, text, *outside), report.replay or "only the model's calls were replayed"
        return replace(report, cause=from_history(report.history), notes=notes, replay=how)

    def _why_finite(self, noticed: Noticed, calls: list[ModelCall]) -> str:
        if noticed.what in _KEPT:
            return _BEFORE
        if noticed.what == "gradient":
            return _ELSEWHERE if any(call.gradients for call in calls) else _FORWARD
        return _IN_THE_LOSS


def _placed(found: Report, first: Report) -> Report:
    """What was found, in the step and batch in which it was noticed first."""
    return replace(found, step=first.step, batch=first.batch, noticed=first.noticed, history=first.history)
