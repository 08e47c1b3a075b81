"""Calls the user's step with one batch, under the gate, and returns what was non-finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.batch_search.result import Seen
from firstnan.engine.conclude import is_numeric
from firstnan.engine.policies import Policy
from firstnan.engine.session import Session
from firstnan.gate.gate import Gate, Trip
from firstnan.observe.observer import Decision
from firstnan.observe.sites import Ownership
from firstnan.records import Noticed
from firstnan.tensors.finite import is_finite, norms, readable, stat, tensors_in
from firstnan.tensors.models import Models, leaves_below, parameters_of
from firstnan.tensors.state import copy_batch


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of the step showed."""

    seen: tuple[Seen, ...]
    loss: float | None
    grad_norm: float | None
    judged: bool
    """Whether there was a loss or a gradient to judge the step by."""


class Collect(Policy):
    """Notes every trip and investigates none; `updates`: whether updates are made or dropped."""

    def __init__(self, models: Models, *, updates: bool) -> None:
        self._models, self._updates = models, updates
        self.seen: dict[str, Seen] = {}
        self.norms: list[float] = []
        """The norm of the gradients for each update."""
        self.went_back = False
        """Whether the step has called backward itself."""
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        """The leaves that backward writes gradients to, each with its previous gradient."""

    def tripped(self, session: Session, trip: Trip) -> bool:
        if trip.tensors:
            tensor = trip.tensors[0]
            self.note(trip.noticed.what, trip.noticed.name or self._models.name(tensor), tensor)
        return False

    def note(self, what: str, name: str, tensor: Tensor) -> None:
        self.seen.setdefault(what, Seen(Noticed(what, name), stat(name, tensor)))

    def before_backward(self, session: Session, roots: list[Tensor]) -> None:
        self.went_back = True
        for leaf in leaves_below(roots):
            self.leaves.setdefault(id(leaf), (leaf, leaf.grad))

    def before_update(self, session: Session, optimizer: Any, closure: bool) -> Decision:
        if self._updates:
            if session.gate.norm is not None:
                self.norms.append(session.gate.norm)
            return Decision.RUN
        if closure:  # The gradients come later; the caller undoes this update.
            return Decision.RUN
        self.look_at_gradients(parameters_of(optimizer))
        return Decision.DROP

    def look_at_gradients(self, parameters: Iterable[Tensor]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        values = [r.double() for g in gradients if (r := readable(g)) is not None and r.numel()]
        if values:
            self.norms.append(math.hypot(*norms(values).tolist()))
        for bad in [g for g in gradients if not is_finite(g)][:1]:
            self.note("gradient", self._models.name(bad), bad)

    def loss_scaled(self, given: Any, scaled: Any) -> Any:
        # Without updates no scale is searched for: an overflow caused by the scale is not the batch's fault.
        return scaled if self._updates else given


class StepCheck:
    """The user's step, with the gate around it; `optimizers` are those known to train the models."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        models: Models,
        *,
        optimizers: Iterable[Any] = (),
        updated_by: Iterable[Any] = (),
        results_count: bool = False,
    ) -> None:
        """`updated_by` make the update if the step does not; `results_count`: any bad value it returns counts."""
        self.calls = 0
        self._step, self._models, self._results_count = step, models, results_count
        self._optimizers, self._updated_by = list(optimizers), list(updated_by)
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        """The leaves that backward wrote gradients to, each with its gradient before the first call."""

    def __call__(self, batch: Any, *, updates: bool = False) -> Outcome:
        """Calls the step with a copy of the batch, its updates made or dropped.

        An error of the step that has nothing to do with its numbers is the user's to see. A loss that is returned is
        taken through backward where the step has not done so itself, and then through the update.
        """
        self.calls += 1
        policy, gate = Collect(self._models, updates=updates), Gate(thorough=True, guard=None)
        gate.watch_models(self._models)
        for optimizer in self._optimizers:
            gate.optimizer_made(optimizer)
        bad_inputs = _bad_inputs(batch)
        loss = None
        with Session(policy, ownership=Ownership(()), gate=gate).running():
            try:
                loss = self._run(copy_batch(batch), policy, updates)
            except Exception as error:
                if not (policy.seen or bad_inputs or is_numeric(error)):
                    raise
                name = f"{type(error).__name__}: {error}".split("\n")[0]
                policy.seen["exception"] = Seen(Noticed("exception", name))
        left = gate.remaining_nonfinite()
        if left is not None:
            policy.note(left.noticed.what, left.noticed.name or self._models.name(left.tensors[0]), left.tensors[0])
        self.leaves = policy.leaves | self.leaves
        if not (updates and gate.steps.total):
            # With updates, a scaler that skips one leaves its infinite gradients behind.
            policy.look_at_gradients([p for p, _ in self._models.parameters.values()])
        # An infinity in a batch may be intended: a mask.
        bad_inputs = [s for s in bad_inputs if policy.seen or s.tensor is None or s.tensor.nan]
        past = gate.past().steps
        return Outcome(
            (*bad_inputs, *policy.seen.values()),
            next((s.loss for s in reversed(past) if s.loss is not None), loss),
            math.hypot(*policy.norms) if policy.norms else past[-1].grad_norm if past else None,
            policy.went_back or loss is not None,
        )

    def _run(self, batch: Any, policy: Collect, updates: bool) -> float | None:
        """Runs the step, and backward and the update if it does not; returns the loss if the gate has not seen it."""
        result = self._step(batch)
        if policy.went_back and not self._results_count:
            return None
        loss = None
        for place, value in [("", result)] if isinstance(result, float) else tensors_in(result):
            tensor = torch.tensor(value) if isinstance(value, float) else value
            if not is_finite(tensor):
                policy.note("loss", place, tensor)
            if loss is None and tensor.numel() == 1 and tensor.is_floating_point():
                loss = tensor
        if policy.went_back or loss is None:
            return None
        if loss.requires_grad:
            updated_by = self._updated_by if updates else ()
            for optimizer in updated_by:
                optimizer.zero_grad()  # otherwise the gradients of all steps before would add up
            torch.autograd.backward(loss)
            for optimizer in updated_by:
                optimizer.step()
        return loss.item()


def _bad_inputs(batch: Any) -> list[Seen]:
    return [
        Seen(Noticed("input", f"batch{place}"), stat(place, t)) for place, t in tensors_in(batch) if not is_finite(t)
    ]
