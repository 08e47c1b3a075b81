"""Runs the user's own step on one batch under the gate, and says what was not finite in it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.batch_search.result import Seen
from firstnan.engine.batch_search.training import Training
from firstnan.engine.conclude import bad_values
from firstnan.engine.handouts import Replayer
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm
from firstnan.observe.patches import Patches
from firstnan.observe.training_hooks import TrainingHooks
from firstnan.records import Noticed
from firstnan.records.errors import InternalErrors, NonFiniteError
from firstnan.tensors.batches import copy_batch
from firstnan.tensors.finite import is_finite, norms, readable, stat, tensors_in
from firstnan.tensors.optimizers import drop_gradients, parameters_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of the step showed."""

    seen: tuple[Seen, ...]
    loss: float | None
    grad_norm: float | None


class WatchedStep:
    """The user's step, with the gate around it (a gate.Listener and a hooks.Audience)."""

    is_calm = False

    def __init__(self, step: Callable[[Any], Any], training: Training) -> None:
        self.replayer = Replayer()
        self.internal_error = InternalErrors(logging.getLogger("firstnan").error)
        self.calls = 0
        self._step, self._models, self._training = step, training.models, training
        self._updates = False
        self._went_back = False
        self._seen: dict[str, Seen] = {}
        self._norms: list[float] = []
        self._gate = Gate(self)
        self._hooks = TrainingHooks(self._gate, self)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """While this lasts torch is patched; a loader used meanwhile tells which elements it takes."""
        scalers = Patches()
        try:
            self._hooks.install()
            scalers.put(torch.amp.GradScaler, "scale", self._unscaled)
            yield
        finally:
            scalers.remove()
            self._hooks.remove()

    def __call__(self, batch: Any, *, updates: bool) -> Outcome:
        """Calls the step with a copy of the batch, its updates made or held back.

        An error of the step that has no NaN about it is the user's to see. A loss that is returned is taken through
        backward where the step has not done so itself, and then through the update.
        """
        self.calls += 1
        self._updates, self._went_back, self._seen, self._norms = updates, False, {}, []
        gate = self._gate = self._hooks.gate = Gate(self, thorough=True)
        gate.new_guard = None
        gate.watch_models(self._models)
        for optimizer in self._training.all_optimizers:
            gate.optimizer_made(optimizer)
        bad_inputs = self._bad_inputs(batch)
        loss = None
        try:
            loss = self._run(copy_batch(batch))
        except Exception as error:
            values = bad_values(error)
            if not (self._seen or bad_inputs or values or isinstance(error, NonFiniteError)):
                raise
            self._seen["exception"] = Seen(Noticed("exception", f"{type(error).__name__}: {error}".split("\n")[0]))
        gate.last_look()
        if not (updates and gate.steps.total):
            # Where updates are made, a scaler that skips one leaves the gradients that it did not like.
            self._look_at_gradients(self._training.parameters)
        # An infinity in a batch may be meant: a mask.
        bad_inputs = [s for s in bad_inputs if self._seen or s.tensor is None or s.tensor.nan]
        past = gate.past().steps
        return Outcome(
            (*bad_inputs, *self._seen.values()),
            next((s.loss for s in reversed(past) if s.loss is not None), loss),
            math.hypot(*self._norms) if self._norms else past[-1].grad_norm if past else None,
        )

    def _bad_inputs(self, batch: Any) -> list[Seen]:
        return [
            Seen(Noticed("input", f"batch{place}"), stat(place, t))
            for place, t in tensors_in(batch)
            if not is_finite(t)
        ]

    def _run(self, batch: Any) -> float | None:
        """The step, and what it leaves to us; returns the loss where the gate has not seen it."""
        result = self._step(batch)
        if self._went_back:
            return None
        loss = None
        for place, value in [("", result)] if isinstance(result, float) else tensors_in(result):
            tensor = torch.tensor(value) if isinstance(value, float) else value
            if not is_finite(tensor):
                self._note("loss", place, tensor)
            if loss is None and tensor.numel() == 1 and tensor.is_floating_point():
                loss = tensor
        if loss is None:
            return None
        if loss.requires_grad:
            torch.autograd.backward(loss)
            for optimizer in self._training.optimizers if self._updates else ():
                optimizer.step()
        return loss.item()

    def _look_at_gradients(self, parameters: list[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        values = [r.double() for g in gradients if (r := readable(g)) is not None and r.numel()]
        if values:
            self._norms.append(math.hypot(*norms(values).tolist()))
        self.trip(Noticed("gradient"), [g for g in gradients if not is_finite(g)], before_update=True)

    def _note(self, what: str, name: str, tensor: Tensor) -> None:
        self._seen.setdefault(what, Seen(Noticed(what, name), stat(name, tensor)))

    def _unscaled(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            # Where nothing is written, no scale is looked for: what overflows by it is no fault of the batch.
            result = original(scaler, outputs)
            return result if self._updates else outputs

        return scale

    # What the gate says.

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        if tensors:
            self._note(noticed.what, noticed.name or self._models.name(tensors[0]), tensors[0])

    def suppresses(self, optimizer: Any) -> bool:
        return False

    def step_begins(self, optimizer: Any, closure: bool) -> None:
        if self._updates:
            if self._gate.norm is not None:
                self._norms.append(self._gate.norm)
        elif not closure:
            # With a closure the gradients come later; that update is undone with all the rest.
            self._look_at_gradients(parameters_of(optimizer))
            drop_gradients(optimizer)
            self._gate.in_step = None

    def step_ended(self, by_hand: bool = False) -> None:
        """The next call begins anew."""

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        """There is no guard here: a few steps are too few to know what is usual."""

    # What torch says.

    def concerns(self, roots: list[Tensor]) -> bool:
        self._went_back = True
        return True

    def backward_begins(self) -> None:
        """Its loss goes to the gate."""

    def optimizer_made(self) -> None:
        """One that the step makes for itself is as good as another."""

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
