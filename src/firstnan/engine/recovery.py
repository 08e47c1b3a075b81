"""Copies of state to restore after a bad step: the weights before an update, the last good state, the settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from firstnan.engine.rates import come_first
from firstnan.tensors.models import Models, Scope, drop_gradients, is_risky, is_torch_optimizer, parameters_of
from firstnan.tensors.state import Schedules, ScheduleSearch, SettingsCopy, Snapshot, restore_buffers

if TYPE_CHECKING:
    from firstnan.engine.turn import Turn
    from firstnan.gate.gate import Gate, Trip

_ORDINARY = 100.0
"""Gradients up to this norm cannot overflow, in any precision."""
_EVERY = 16
_SMALL = 1 << 20
"""Elements: up to this size, the state of a model is copied before every update by an unknown optimizer."""
_MEDIUM = 1 << 24
"""Elements: up to this size, it is copied for settings that are risky in every step."""


class Recovery:
    """Keeps finite states of the models and their optimizers, and restores them.

    Without `models`, those of a program that is run once: nothing but the state before a risky update, to replay it.
    """

    def __init__(self, models: Models | None = None, optimizers: Sequence[Any] = (), every: int | None = None) -> None:
        self.models, self.optimizers, self.every = models, optimizers, every
        self.good_step = 0
        """The number of steps made when the good state was copied."""
        self.backup: Snapshot | None = None
        """The state before the current update, if that update may go wrong by itself."""
        self.good: Snapshot | None = None
        self._updates = 0
        self._rates: dict[int, list[Any]] = {}
        """The learning rates at each optimizer's last update that was not risky."""
        if every is not None:
            self.keep(0)

    def before_update(self, optimizer: Any, closure: bool, grad_norm: float | None) -> None:
        # A closure computes its gradients inside the update, so a bad update can only be undone.
        if self.models is None:
            self.backup = None
            if not closure and self._is_risky(optimizer, grad_norm) and self._can_be_copied(optimizer, grad_norm):
                self.backup = Snapshot.take(parameters_of(optimizer), (), [optimizer])
        elif closure or self._is_risky(optimizer, grad_norm) or self._is_unknown(optimizer, self.models):
            self.backup = self._now()

    @property
    def undoes_closures(self) -> bool:
        return self.models is not None

    def is_watched_closely(self, optimizer: Any) -> bool:
        """Whether every parameter has to be read after this update."""
        return self.backup is not None or (self.models is not None and not is_torch_optimizer(optimizer))

    @staticmethod
    def _can_be_copied(optimizer: Any, grad_norm: float | None) -> bool:
        """Whether that costs little, or the update is unlikely to be one of many such."""
        rare = grad_norm is not None and not grad_norm < _ORDINARY
        return rare or sum(p.numel() for p in parameters_of(optimizer)) <= _MEDIUM

    @staticmethod
    def _is_unknown(optimizer: Any, models: Models) -> bool:
        """Whether the optimizer is not torch's own and the model is small enough to be copied cheaply."""
        return not is_torch_optimizer(optimizer) and sum(p.numel() for p, _ in models.parameters.values()) <= _SMALL

    def _is_risky(self, optimizer: Any, grad_norm: float | None) -> bool:
        """Checks the norm always, the settings only when the learning rate has changed and from time to time."""
        rates = [group.get("lr") for group in optimizer.param_groups]
        self._updates += 1
        known = self._rates.get(id(optimizer))
        if (grad_norm is None or grad_norm < _ORDINARY) and rates == known and self._updates % _EVERY:
            return False
        risky = is_risky(optimizer, grad_norm)
        self._rates[id(optimizer)] = [] if risky else rates
        return risky

    def after_update(self, steps: int) -> None:
        """The update was good: its copy is not needed."""
        if self.every is not None and steps % self.every == 0:
            self.keep(steps)

    def keep(self, steps: int) -> None:
        """Copies the current state, unless it is non-finite; then the former copy stays."""
        now = self._now()
        if now is not None:
            self.good, self.good_step = now, steps

    def undo_update(self) -> bool:
        """Restores the state before the update; False if there is no copy."""
        if self.backup is None:
            return False
        self.backup.restore()
        return True

    def go_back(self, *, in_use: bool = False) -> bool:
        """Restores the weights and optimizer state; False if there is no copy. `in_use`: see Snapshot."""
        return self.undo_update() if self.every is None else self.roll_back(in_use=in_use)

    def roll_back(self, *, in_use: bool = False) -> bool:
        if self.good is None:
            return False
        self.good.restore(in_use=in_use)
        return True

    def clean_up(self, buffers: list[Any], schedules: Schedules | None) -> None:
        """After a step that is not kept: its gradients go, and what it changed besides the weights comes back."""
        restore_buffers(buffers)
        for optimizer in self.optimizers:
            drop_gradients(optimizer)
        if schedules is not None:
            schedules.restore()
        self.backup = None

    def _now(self) -> Snapshot | None:
        assert self.models is not None
        tensors = [p for p, _ in self.models.parameters.values()]
        tensors += [p for optimizer in self.optimizers for p in parameters_of(optimizer)]
        return Snapshot.take({id(t): t for t in tensors}.values(), self.models.slots, self.optimizers)


class StepSettings:
    """The settings of the watched optimizers and their schedulers, as the current step began with them.

    A loop may change them at the beginning of its body or at its end, so they are copied in several places.
    """

    def __init__(self, scope: Scope, gate: Gate) -> None:
        self._scope, self._gate, self._search = scope, gate, ScheduleSearch()
        self._at_batch: SettingsCopy | None = None
        self._at_call: SettingsCopy | None = None
        self._at_update: SettingsCopy | None = None
        self._change_first: bool | None = None
        """Whether a loop without a loader changes them at the beginning of its body; None if that is not known."""

    def begin(self) -> None:
        self._search.begin(list(self._scope.optimizers or ()))
        self.update_ended()

    def scheduler_made(self, scheduler: Any) -> None:
        self._search.made(scheduler)

    def batch_taken(self) -> None:
        if optimizers := self._scope.optimizers:
            self._at_batch = self._search.settings(optimizers, self._gate.steps.of)

    def model_called(self) -> None:
        """In a loop without a loader, the model is called for the first time in a step."""
        if optimizers := self._scope.optimizers:
            self._at_call = self._search.settings(optimizers, self._gate.steps.of)

    def update_ended(self) -> None:
        if optimizers := self._scope.optimizers:
            self._at_update = self._search.settings(optimizers, self._gate.steps.of)

    def before(
        self, trip: Trip, scalers: Iterable[Any], turns: Sequence[Turn] = (), calls: Sequence[Turn] = ()
    ) -> Schedules:
        """Learning rates, schedules and scales from before the step that has tripped, as far as they are known."""
        steps = self._gate.steps
        made = {id(one): steps.of(one) for one in self._scope.optimizers or ()}
        if not trip.before_update and steps.last is not None and id(steps.last()) in made:
            made[id(steps.last())] -= 1  # this update is undone
        earlier = self._earlier(made, turns, calls)
        return self._search.copy(list(steps.done), trip.noticed.what, scalers, earlier=earlier, updates=made)

    def _earlier(self, made: dict[int, int], turns: Sequence[Turn], calls: Sequence[Turn]) -> SettingsCopy | None:
        at_batch, at_call, at_update = self._at_batch, self._at_call, self._at_update
        if at_batch is not None and any(made.get(one) == count for one, count in at_batch.updates.items()):
            return at_batch
        if turns or calls:
            self._change_first = come_first(turns, calls)
        if self._change_first and at_update is not None and at_update.updates == made:
            return at_update
        return at_call if at_call is not None and at_call.updates == made else None
