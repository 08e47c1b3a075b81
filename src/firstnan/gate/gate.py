"""The check that runs once a step: whether loss, gradients, updated parameters and buffers are finite."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firstnan.gate.by_hand import HandWritten
from firstnan.gate.forecast import LARGEST, SinkingScale
from firstnan.gate.gradient_checks import Clipping, DeviceReads, QuickCheck
from firstnan.gate.growth_guard import Alarm, GrowthGuard, Limits, Weights
from firstnan.gate.histories import Histories, Track
from firstnan.gate.step_counter import ROTATION, ParameterRotation, StepCounter
from firstnan.observe.gradient_hooks import GradientNorms
from firstnan.observe.sites import CallSites, Ownership, optimizer_name
from firstnan.records import Forecast, History, Noticed, OptimizerHistory, StepRecord
from firstnan.tensors.finite import is_finite, is_plain, norms, own_item, plain_norm, readable, reads_are_free
from firstnan.tensors.models import (
    Models,
    Slot,
    bad_state,
    describe,
    is_torch_optimizer,
    learning_rate_of,
    leaves_below,
    parameters_of,
    state_tensors,
)

_SMALL = 1 << 14
_LOSS, _GRADIENT, _PARAMETER, _STATE = Noticed("loss"), Noticed("gradient"), Noticed("parameter"), Noticed("state")
_MOST_FORECASTS = 32
_STATE_EVERY = 64
"""Updates of an optimizer after which its state is read; sooner after a large gradient."""
_LEAST_TO_OVERFLOW, _MAY_OVERFLOW = 64.0, 1e15
"""Gradient norms from which on squares may overflow: float16, and any other type."""


@dataclass(frozen=True, slots=True)
class Trip:
    """Something that training uses is not finite."""

    noticed: Noticed
    tensors: list[Tensor]
    before_update: bool
    """The update that would have used it can still be dropped."""


Trips = Sequence[Trip]
_NONE: Trips = ()


class Gate:
    """Checks each step once and keeps the last steps' numbers; every check answers with what is not finite.

    `thorough` reads every parameter after every update, however large the model is. `frugal` spares what it can: the
    norm of a tiny model is not computed in every step, and its parameters are read after every eighth update only.
    `synchronous`: values on a device must be known before the update. `guard` makes the growth guard of an optimizer.
    """

    def __init__(
        self,
        *,
        thorough: bool = False,
        frugal: bool = False,
        synchronous: bool = True,
        guard: Callable[[], GrowthGuard] | None = GrowthGuard,
    ) -> None:
        self.frugal = frugal
        self._closely = self._is_safe = False
        """About the update under way: its parameters are all read; it is known to keep finite parameters finite."""
        self.reads = DeviceReads(synchronous)
        self._new_guard = guard
        self.gradient_norms = GradientNorms()
        self.clipping = Clipping()
        self._quick_checks: dict[int, QuickCheck] = {}
        self._passed_quick_check = False
        """The current update passed the quick check."""
        self._guards: dict[int, GrowthGuard] = {}
        """One for each optimizer, since their usual values differ."""
        self.thorough = thorough
        self.steps = StepCounter()
        self.call_sites = CallSites()
        self._histories = Histories()
        self._healthy_steps: list[StepRecord] = []
        """The last steps before a loss left its healthy band."""
        self.optimizers = 0
        self.trained = False
        self.in_step: Any = None
        self._models: Models | None = None
        self._buffers: list[list[Any]] = []
        """Slot, version at the last check, whether it has ever held a NaN."""
        self.skipping_since: int | None = None
        """The first of the consecutive updates that a gradient scaler has skipped."""
        self.scale = 1.0
        """The scale at the last of them."""
        self._bad_unscaled = False
        """Whether the gradients of a skipped update are non-finite without the scale too."""
        self.norm: float | None = None
        """The norm of the gradients of the last update."""
        self._loss: float | None = None
        self._is_half = False
        """Whether the last loss was computed in float16."""
        self._by_hand = HandWritten()
        self._rotations: weakref.WeakKeyDictionary[Any, ParameterRotation] = weakref.WeakKeyDictionary()
        self._scaling = False
        """Whether a gradient scaler is used, which handles infinite gradients itself."""
        self._scaled: tuple[weakref.ref[Tensor], Any] | None = None
        self._sinking = SinkingScale()
        self._first_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The numbers of the first steps of optimizers that were created after others had made steps."""
        self._names: dict[int, str] = {}
        self._limits: dict[int, Limits] = {}
        self.forecasts: list[Forecast] = []
        """Those made so far, withdrawn or not."""
        self.news: list[Forecast] = []
        """What nobody was told yet."""
        self._sample: WeightSample | None = None
        """Some of the weights before the update under way, if the update is measured."""

    # Backward.

    def optimizer_made(self, optimizer: Any) -> None:
        self.optimizers += 1
        self._histories.made(optimizer)
        for table in (self._names, self._limits):
            table.pop(id(optimizer), None)
        # An optimizer created in the middle of training continues the count; those created before it alternate.
        first = self.steps.done.setdefault(optimizer, self.steps.current if self.steps.total else 0)
        if first:
            self._first_steps[optimizer] = first

    def backward_begins(self, roots: list[Tensor]) -> Trips:
        """Checks the loss: a non-finite one trips before anything is computed from it."""
        self.trained = True
        trips: list[Trip] = []
        self.norm = None
        if self.optimizers == 0 or self._by_hand.certain:  # is_by_hand, kept fast
            if self._by_hand.is_accumulating():
                self.steps.manual -= 1  # The last backward did not end its step after all.
                self._histories.take_back(None)
            else:
                trips += self._check_leaves()
        elif not self.steps.total and self.awaits_first_update:
            updates = self._by_hand.backward_without_step()
            self.steps.manual = self.steps.manual if updates is None else updates
        before = len(trips)
        for root in roots if self._scaled is None else self._unscaled(self._scaled, roots):
            if type(root) is Tensor and reads_are_free(root) and root.numel() == 1 and root.is_floating_point():
                self._loss, self._is_half = own_item(root), root.dtype is torch.float16
                if not math.isfinite(self._loss):
                    trips.append(Trip(_LOSS, [root], before_update=True))
                continue
            plain = readable(root)
            if plain is None or not plain.numel():
                continue
            if not reads_are_free(plain):
                self.reads.add(_LOSS, [plain], plain.abs().sum())
                continue
            if not is_finite(plain):
                trips.append(Trip(_LOSS, [root], before_update=True))
        if self.optimizers > 1:
            self.steps.note_loss(self._loss)
            if len(trips) > before:
                self.steps.expect_one_of(self._trained_by(roots))
        return trips

    def _trained_by(self, roots: list[Tensor]) -> list[Any]:
        """The optimizers of what a loss depends on."""
        return [o for o in list(self.steps.done) if self.trains(roots, [o])]

    def trains(self, roots: list[Tensor], optimizers: list[Any]) -> bool:
        """Whether a loss depends on what one of these optimizers trains."""
        leaves = {id(leaf) for leaf in leaves_below(roots)} if optimizers else ()
        return any(id(p) in leaves for o in optimizers for p in parameters_of(o))

    @property
    def uses_gradients_at_once(self) -> bool:
        """Whether the gradients are used right after backward, inside it or without an optimizer object."""
        if self.in_step is not None or self.optimizers == 0 or self._by_hand.certain:
            return True
        return self.steps.total == 0 and self.awaits_first_update

    @property
    def is_by_hand(self) -> bool:
        """Whether the program updates its weights itself: without an optimizer, or with one that makes no steps."""
        return self.optimizers == 0 or self._by_hand.certain

    @property
    def awaits_first_update(self) -> bool:
        """Whether no optimizer has made a step yet, so the program may update its weights itself."""
        return self.steps.total == 0 and not self.is_by_hand and self._by_hand.is_undecided

    def backward_ended(self, roots: list[Tensor]) -> Trips:
        if self.in_step is not None:
            # The optimizer called its closure (LBFGS) and uses these gradients at once.
            return self._check_gradients(self.in_step, parameters_of(self.in_step), before_update=False)
        if self._scaling:
            return _NONE
        if self.is_by_hand:
            leaves = self._by_hand.gradients_written(roots)
            self._by_hand.note(leaves, [leaf.grad for leaf in leaves])
            return self._check_gradients(None, leaves, before_update=False)
        if self.awaits_first_update and (bad := self._by_hand.note_a_few(roots)):
            return [Trip(_GRADIENT, bad, before_update=True)]
        return _NONE

    def is_step(self, place: object, outputs: list[Tensor], targets: list[Tensor]) -> bool:
        """Whether a `torch.autograd.grad` is the step of a program without an optimizer."""
        return self.is_by_hand and self._by_hand.is_step(place, outputs, targets)

    def differentiated(self, outputs: list[Tensor], targets: list[Tensor]) -> None:
        """A `torch.autograd.grad` in a program with optimizers: of its parameters it is that of the loss."""
        self.trained = True
        loss = readable(outputs[0]) if len(outputs) == 1 and outputs[0].numel() == 1 else None
        if loss is not None and reads_are_free(loss) and any(isinstance(t, torch.nn.Parameter) for t in targets):
            self._loss = loss.item()

    def gradients_returned(self, outputs: list[Tensor], targets: list[Tensor], gradients: list[Tensor]) -> Trips:
        """The gradients of a program that updates its weights with what `torch.autograd.grad` returns."""
        self.trained = True
        self._histories.amend(lr=self._by_hand.rate(targets))
        self.norm = self._loss = None
        trips: list[Trip] = []
        loss = readable(outputs[0]) if len(outputs) == 1 and outputs[0].numel() == 1 else None
        if loss is not None and reads_are_free(loss):
            self._loss = loss.item()
        if len(targets) == len(gradients):
            self._by_hand.note(targets, gradients)
        size = self._size(gradients, _GRADIENT, trips)
        self.norm = size if size is not None and math.isfinite(size) else None
        checked = ((_LOSS, outputs), (_GRADIENT, gradients if self.norm is None else []))
        found = [(noticed, [t for t in tensors if not is_finite(t)]) for noticed, tensors in checked]
        found = [(noticed, bad) for noticed, bad in found if bad]
        if found and (lost := [t for t in targets if not is_finite(t)]):
            found = [(_PARAMETER, lost)]  # the update before has written them
        return trips + [Trip(noticed, bad, before_update=False) for noticed, bad in found]

    def gradients_clipped(self, parameters: list[Tensor], limit: Any, norm: Any) -> None:
        self.clipping.gradients_clipped(parameters, limit, norm)
        if self.is_by_hand:
            self._by_hand.gradients_clipped()

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler handles infinite gradients."""
        return self._scaling

    def loss_scaled(self, given: Any, result: Any, scaler: Any = None) -> None:
        """A gradient scaler may scale a finite loss to infinity, so the unscaled loss is checked."""
        self._scaling = self._scaling or result is not given  # a disabled scaler returns its argument
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            self._scaled = (weakref.ref(result), given.detach())
            known = getattr(scaler, "_scale", None)
            if isinstance(known, Tensor) and reads_are_free(known):  # elsewhere it is known when an update is skipped
                self.scale = known.item()

    def _unscaled(self, known: tuple[weakref.ref[Tensor], Any], roots: list[Tensor]) -> list[Tensor]:
        scaled, given = known
        self._scaled = None
        return [given if scaled() is r else r for r in roots]

    # The optimizer's step.

    def passes_quickly(self, optimizer: Any) -> bool:
        """Whether this update needs nothing more before it."""
        check = self._quick_checks.get(id(optimizer))
        if check is None or not check.passes(optimizer, self._loss):
            return False
        self.in_step, self.norm, self._passed_quick_check = optimizer, None, True
        return True

    def passed_quickly(self, optimizer: Any) -> bool:
        """Whether this update needs nothing more after it."""
        if not self._passed_quick_check or self.in_step is not optimizer:
            return False
        self.in_step = self.skipping_since = None
        loss = self._loss if self.optimizers < 2 else self._loss_of(optimizer)
        self._histories.add(optimizer, (self.steps.add(optimizer), loss, None, learning_rate_of(optimizer)))
        self._loss = None
        return True

    def _loss_of(self, optimizer: Any) -> float | None:
        """The loss whose gradients this optimizer uses: of several backward calls not always the last."""
        return self.steps.loss_of(optimizer, self._loss)

    def check_update(self, optimizer: Any, closure: bool) -> Trips:
        """What the optimizer is about to use."""
        self._passed_quick_check = False
        self.trained = True
        if optimizer not in self.steps.known:
            self.optimizer_made(optimizer)
        if self.in_step is not None and self.in_step is not optimizer:
            self._is_inside(self.in_step, optimizer)
        self.steps.expect(optimizer)
        # With `found_inf` a gradient scaler leaves infinities to the optimizer's own kernel.
        if getattr(optimizer, "found_inf", None) is not None:
            return _NONE
        return self._check_gradients(optimizer, parameters_of(optimizer), before_update=not closure)

    def _is_inside(self, outer: Any, optimizer: Any) -> None:
        """An optimizer's step calls that of another one (`ZeroRedundancyOptimizer`): both make the same step."""
        if self.steps.of(outer) or outer in self.steps.wraps:
            return
        trained = {id(p) for p in parameters_of(outer)}
        if any(id(p) in trained for p in parameters_of(optimizer)):  # otherwise the outer one's update was left
            self.steps.wraps[outer] = weakref.ref(optimizer)
            self.optimizers -= 1

    def update_begins(self, optimizer: Any, *, closely: bool = False, safe: bool = False) -> Alarm | None:
        """The update is made; `closely` reads every parameter after it, `safe` none. Unusual growth is returned."""
        self.in_step, self._closely, self._is_safe = optimizer, closely, safe
        step, track = self.steps.of(optimizer), self._histories.track(optimizer)
        if step >= track.sample_at:
            self._sample = WeightSample(parameters_of(optimizer))
        return self._watch_growth(step, optimizer, track)

    def is_updating(self, optimizer: Any) -> bool:
        return self.in_step is optimizer

    def update_ended(self, optimizer: Any) -> Trips:
        """What the update has made of the parameters, and the step of the buffers."""
        self.in_step, self.skipping_since, self._bad_unscaled = None, None, False
        loss = self._loss if self.optimizers < 2 else self._loss_of(optimizer)
        step = self.steps.add(optimizer)
        rounds, size, whole = self._rotations.get(optimizer), None, False
        if rounds is None:
            rounds = self._rotations[optimizer] = ParameterRotation(self.thorough)
        # Where most steps pass quickly, this one is checked in all respects.
        quick_check = self._quick_checks.get(id(optimizer))
        closely = self._closely or (quick_check is not None and quick_check.applies)
        if not self._is_safe and (not self.frugal or closely or self.steps.total % ROTATION == 1):
            parts, whole = rounds.due([p for p in parameters_of(optimizer) if p.grad is not None], self._closely)
            size = self._size(parts, _PARAMETER)
        safe, self._closely, self._is_safe = self._is_safe, False, False
        rate = learning_rate_of(optimizer)
        bad = _bad_parameters(optimizer, rounds) if size is not None and not math.isfinite(size) else []
        known = size if whole and (bad or size is None or math.isfinite(size)) else None
        track = self._histories.track(optimizer)
        if self._sample is None:
            track.add((step, loss, self.norm, rate, known))
        else:
            sample, self._sample = self._sample, None
            track.measured(step)
            known, ratio = sample.measure(known)
            scale = self.scale if self._scaling else None
            if self._scaling and (void := self._sinking.turned(step)) is not None:
                self.foresees(void)
            track.add((step, loss, self.norm, rate, known, ratio, scale))
        if known is not None:
            track.weights = known
        self._loss = None
        trips: list[Trip] = []
        if bad:
            trips.append(Trip(_PARAMETER, bad, before_update=False))
        elif not safe and self._is_state_due(optimizer, step):
            trips += self._bad_state(optimizer)
        if self.thorough or self.steps.total % ROTATION == 1:
            trips += [Trip(*found, before_update=False) for found in self._bad_buffers()]
        return trips

    def _is_state_due(self, optimizer: Any, step: int) -> bool:
        """Whether to read the optimizer's state: from time to time, and after a gradient whose squares may overflow.

        An infinite second moment makes every later update of its weight 0, and nothing else shows that.
        """
        if self.thorough or step % _STATE_EVERY == _STATE_EVERY - 1:
            return True
        if self.norm is None or self.norm < _LEAST_TO_OVERFLOW:
            return False
        return self.norm >= _MAY_OVERFLOW or any(p.dtype is torch.float16 for p in parameters_of(optimizer))

    def _bad_state(self, optimizer: Any) -> Trips:
        tensors = [tensor for _, _, tensor in state_tensors(optimizer)]
        size = self._size(tensors, _STATE)
        bad = bad_state(optimizer) if size is not None and not math.isfinite(size) else []
        if not bad:
            return _NONE
        parameter, name, _ = bad[0]
        owner = self._models.name(parameter) if self._models is not None else ""
        noticed = Noticed("state", f"{name} of {owner or 'a parameter'}")
        return [Trip(noticed, [tensor for *_, tensor in bad], before_update=False)]

    def undo_update(self) -> None:
        """The last update is taken back: it never was a step."""
        optimizer = self.steps.last() if self.steps.last else None
        if optimizer is not None:
            self.steps.take_back(optimizer)
            self._histories.take_back(optimizer)

    def drop_update(self, optimizer: Any) -> None:
        """Counts a step whose update was dropped."""
        self.steps.add(optimizer)

    def look_at_everything(self) -> None:
        """From now on every parameter after every update."""
        self.thorough = True

    def remaining_nonfinite(self) -> Trip | None:
        """What training has left that is not finite: parameters, or a buffer, also those whose turn had not come."""
        bad = [p for optimizer, rounds in list(self._rotations.items()) for p in _bad_parameters(optimizer, rounds)]
        found = (_PARAMETER, bad) if bad else next(self._bad_buffers(), None)
        if found is not None:
            return Trip(*found, before_update=False)
        return next((trip for o in list(self._rotations) for trip in self._bad_state(o)), None)

    @property
    def overflows(self) -> int:
        """How many updates in a row a gradient scaler has skipped."""
        return self.steps.current - self.skipping_since if self.skipping_since is not None else 0

    def judged_unscaled(self, bad: bool) -> None:
        """Whether the gradients of the current loss are non-finite without the scale too."""
        self._bad_unscaled = bad

    def update_skipped(self, optimizer: Any, scale: float) -> Trips:
        """A gradient scaler skipped the update: normal while it adapts its scale, but not with a scale below 1."""
        self._scaling, self.scale = True, scale
        if self.skipping_since is None:
            self.skipping_since = self.steps.of(optimizer)
        sinks = self._sinking.skipped(self.steps.of(optimizer), scale) if self._new_guard is not None else None
        if sinks is not None:
            self.foresees(sinks)
        if scale >= 1.0 and not self._bad_unscaled:
            return _NONE
        bad = [p.grad for p in parameters_of(optimizer) if p.grad is not None and not is_finite(p.grad)]
        return [Trip(_GRADIENT, bad, before_update=True)] if bad else _NONE

    def skip_ended(self, optimizer: Any) -> None:
        self.steps.add(optimizer)
        self._loss = None

    def _check_gradients(self, optimizer: Any, parameters: list[Tensor], *, before_update: bool) -> Trips:
        self.norm = self.clipping.norm_of(parameters)
        if self.norm is not None:
            self.gradient_norms.judge()
            return _NONE
        trips: list[Trip] = []
        cold, squares = self.gradient_norms.split(parameters)
        self.norm = self._size(cold, _GRADIENT, trips)
        if squares:
            self.norm = math.hypot(self.norm or 0.0, *map(math.sqrt, squares))
        if self.norm is None or math.isfinite(self.norm):
            if self.frugal and optimizer is not None and not squares and is_torch_optimizer(optimizer):
                self._quick_checks.setdefault(id(optimizer), QuickCheck()).learn(optimizer, cold, self._loss)
        else:
            # The norm may have overflowed on large finite numbers, so check the elements.
            gradients = [p.grad for p in parameters if p.grad is not None]
            bad = [g for g in gradients if not is_finite(g)]
            if bad:
                trips.append(Trip(_GRADIENT, bad, before_update))
            else:
                wide = [r.double() for g in gradients if (r := readable(g)) is not None]
                self.norm = math.hypot(*norms(wide).tolist())
        return trips

    def _size(self, tensors: list[Tensor], noticed: Noticed, trips: list[Trip] | None = None) -> float | None:
        """The 2-norm of all of them, read at once on the CPU; elsewhere together with the next read.

        `trips` gets what that read shows of other values: it is made with the gradients.
        """
        if not tensors:
            return None
        recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # The context manager for it costs more than the rest of this function.
        try:
            size = plain_norm(tensors)
            if size is not None:
                return size
            values = [r for t in tensors if (r := readable(t)) is not None and r.numel()]
            if not values:
                return None
            sizes = norms(values)
            if reads_are_free(sizes):
                return math.hypot(*sizes.tolist())
            self.reads.add(noticed, tensors, torch.linalg.vector_norm(sizes))
            return self._read(trips) if trips is not None else None
        finally:
            torch._C._set_grad_enabled(recording)

    def _read(self, trips: list[Trip]) -> float | None:
        """Reads all pending values on a device: losses, the last update, these gradients."""
        norm = None
        for one in self.reads.take():
            if one.noticed.what == "loss":
                self._loss = one.size
            if one.noticed.what == "gradient":
                norm = one.size
                if self.reads.synchronous:
                    continue  # checked by the caller
            # The norm may have overflowed on large finite numbers, so check the elements, if they still exist.
            bad = [] if math.isfinite(one.size) else [t for t in one.tensors if not is_finite(t)]
            if bad or (math.isnan(one.size) and not one.tensors):
                trips.append(Trip(one.noticed, bad, self.reads.synchronous and one.noticed.what == "loss"))
        return norm if self.reads.synchronous or norm is None or math.isfinite(norm) else None

    def _watch_growth(self, step: int, optimizer: Any, track: Track) -> Alarm | None:
        if self._new_guard is None:
            return None
        guard = self._guards.get(id(optimizer))
        if guard is None:
            guard = self._guards[id(optimizer)] = self._new_guard()
            guard.ask_for_weights(watched_weights(self.leaves if optimizer is None else parameters_of(optimizer)))
        loss = self._loss if optimizer is None or self.optimizers < 2 else self._loss_of(optimizer)
        alarm = guard.observe(step, self.norm, loss)
        if guard.left == step:
            self._healthy_steps = self._histories.of(optimizer)
        limits = self._limits.get(id(optimizer)) or self._limits_of(optimizer)
        if self._is_half:
            limits = limits._replace(loss=LARGEST["float16"])
        news = guard.foresee(step, self.norm, loss, limits, track.weights, track.recent)
        if news:
            self._foreseen(news, optimizer)
        return alarm

    def _tell_guards(self) -> None:
        """Tells the guards whose loss has exploded of the steps that passed the quick check: it may have recovered."""
        for key, guard in self._guards.items():
            for record in self._histories.by_id(key) if guard.has_exploded else ():
                if record.step > guard.last[0]:
                    guard.observe(record.step, record.grad_norm, record.loss)

    def _limits_of(self, optimizer: Any) -> Limits:
        parameters = self.leaves if optimizer is None else parameters_of(optimizer)
        kind = "float64" if parameters and parameters[0].dtype is torch.float64 else "float32"
        squares = optimizer is not None and ("eps" in optimizer.defaults or "betas" in optimizer.defaults)
        limit = LARGEST[kind]
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ()
        momentum = groups[0]["momentum"] if groups and len({group["lr"] for group in groups}) == 1 else None
        least = _SMALL_WEIGHT * math.sqrt(sum(p.numel() for p in parameters))
        known = Limits(kind, limit, math.sqrt(limit) if squares else limit, momentum, least)
        self._limits[id(optimizer)] = known
        return known

    def _foreseen(self, news: Sequence[Forecast], optimizer: Any) -> None:
        name = self._name_of(optimizer) if self.optimizers > 1 and optimizer is not None else ""
        for one in news:
            self.foresees(replace(one, name=name))

    def foresees(self, forecast: Forecast) -> None:
        """A new forecast, or one that is withdrawn. Of results that grow together, only the first is told."""
        if forecast.withdrawn is None:
            if not any(_is_result(known, forecast.kind) for known in self.forecasts if _is_result(forecast)):
                self.news.append(forecast)
                if len(self.forecasts) < _MOST_FORECASTS:
                    self.forecasts.append(forecast)
            return
        for i, known in enumerate(self.forecasts):
            if replace(known, withdrawn=forecast.withdrawn) == forecast:
                self.forecasts[i] = forecast
                self.news.append(forecast)

    def take_news(self) -> list[Forecast]:
        """What was foreseen or withdrawn since this was last called."""
        news, self.news = self.news, []
        return news

    @property
    def explosion(self) -> Alarm | None:
        """The explosion of a loss that stayed finite and never recovered."""
        self._tell_guards()
        found = [alarm for guard in self._guards.values() if (alarm := guard.unrecovered) is not None]
        return min(found, key=lambda alarm: alarm.step, default=None)

    @property
    def divergence(self) -> tuple[Alarm, StepRecord] | None:
        """The explosion of a loss, together with the weights, that lasted to the end; and the last step."""
        self._tell_guards()
        found = [(alarm, guard.last) for guard in self._guards.values() if (alarm := guard.diverged) is not None]
        first = min(found, key=lambda one: one[0].since or 0, default=None)
        return (first[0], StepRecord(*first[1])) if first is not None else None

    def watch_models(self, models: Models) -> None:
        """Watches these models from now on; a buffer that is bad already is so on purpose."""
        self._buffers = [[slot, -1, _is_bad(slot, slot.tensor())] for slot in models.slots]
        self._models = models
        self._by_hand.parameters = [weakref.ref(p) for p, _ in models.parameters.values()]

    def trained_parameters(self) -> set[int]:
        """The ids of what the optimizers train, or the program by hand."""
        return {id(p) for o in list(self.steps.done) for p in parameters_of(o)} | set(map(id, self._by_hand.leaves))

    def _bad_buffers(self) -> Iterator[tuple[Noticed, list[Tensor]]]:
        """The bad buffers among those written since the last check; small ones are always checked."""
        written: list[tuple[Any, Tensor]] = []
        for watched in self._buffers:
            buffer = watched[0].tensor()
            if buffer is None or not buffer.is_floating_point():
                continue
            # Batch norm writes its running statistics without increasing their version.
            if buffer._version != watched[1] or buffer.numel() <= _SMALL:
                watched[1] = buffer._version
                written.append((watched, buffer))
        size = self._size([b for _, b in written], Noticed("buffer"))
        if size is None or math.isfinite(size):
            return
        for watched, buffer in written:
            known, watched[2] = watched[2], watched[2] or _is_bad(watched[0], buffer)
            if watched[2] and not known:
                yield Noticed("buffer", watched[0].label), [buffer]

    # Programs without an optimizer object.

    def _check_leaves(self) -> Trips:
        """Checks what the program has updated by hand since the last backward."""
        leaves = self._by_hand.leaves
        size = self._size(leaves, _PARAMETER)
        finite = size if size is not None and math.isfinite(size) else None
        self._histories.amend(lr=self._by_hand.rate(), param_norm=finite)
        bad = [] if size is None or math.isfinite(size) else [leaf for leaf in leaves if not is_finite(leaf)]
        return [Trip(_PARAMETER, bad, before_update=False)] if bad else _NONE

    def end_manual_step(self) -> Alarm | None:
        """Without an optimizer object the gradients end a step; unusual growth is returned."""
        alarm = self._watch_growth(self.steps.manual, None, self._histories.track(None))
        self._histories.add(None, (self.steps.manual, self._loss, self.norm))
        self._loss = None
        self.steps.manual += 1
        return alarm

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that backward wrote gradients to, in a program without an optimizer object."""
        return self._by_hand.leaves

    def reads_freely(self, optimizer: Any) -> bool:
        """Whether reading its gradients never waits for a device."""
        return all(reads_are_free(p) for p in parameters_of(optimizer))

    def continue_counting(self, before: Gate) -> None:
        """Continues the count of steps of an earlier watch."""
        self.steps = before.steps

    def go_on_from(self, history: History) -> None:
        """Continues from the history of another run."""
        self._histories.begin_with(self.steps.current_optimizer(False), history.steps)

    def past(self, ownership: Ownership | None = None, *, updated: bool = False) -> History:
        """The last steps, including what is known of the failing one; `updated` if its update was made."""
        optimizer, *others = self.with_history(updated=updated)
        found = self._history(optimizer, ownership)
        if self._loss is not None:
            rate = learning_rate_of(optimizer) if optimizer is not None else None
            failing = StepRecord(self.steps.current, self._loss, self.norm, rate)
            found = replace(found, steps=(*found.steps, failing))
        fields = {name: getattr(found, name) for name in OptimizerHistory.__slots__}
        return History(**fields, others=tuple(self._history(o, ownership) for o in others))

    def with_history(self, *, updated: bool) -> list[Any]:
        """The optimizer of the failing step, None if there is none, and the others that have made steps."""
        own = self.in_step or self.steps.current_optimizer(updated)
        if self.is_by_hand and not self.steps.total:
            own = None
        others = [o for o in list(self.steps.done) if o is not own and self._histories.of(o)]
        return [own, *others]

    def steps_of(self, optimizers: list[Any]) -> list[StepRecord]:
        """The last steps of these optimizers; without any, of the current one."""
        return [r for o in optimizers for r in self._histories.of(o)] if optimizers else list(self.past().steps)

    @property
    def last_loss(self) -> float | None:
        """That of the last backward call since the last update, if it was read."""
        return self._loss

    def last_step(self) -> tuple[str, StepRecord] | None:
        """The last step that was made; with several optimizers, the name of the one that made it comes first."""
        last = self.steps.last
        optimizer = last() if last is not None and not self.is_by_hand else None
        recent = self._histories.track(optimizer).recent
        if not recent:
            return None
        name = self._name_of(optimizer) if self.optimizers > 1 and optimizer is not None else ""
        return name, StepRecord(*recent[-1])

    def _name_of(self, optimizer: Any) -> str:
        """What the program calls this optimizer, or its class; from the second of a name on with a number."""
        known = self._names.get(id(optimizer))
        if known is None:
            name = optimizer_name(self.call_sites.of(optimizer, Ownership())[1]) or type(optimizer).__name__
            same = sum(one.partition(" ")[0] == name for one in self._names.values())
            known = self._names[id(optimizer)] = f"{name} {same + 1}" if same else name
        return known

    def _history(self, optimizer: Any, ownership: Ownership | None) -> OptimizerHistory:
        steps, earlier = tuple(self._histories.of(optimizer)), self._histories.before(optimizer)
        places = self.call_sites.of(optimizer, ownership) if ownership is not None else (None, None, None)
        if optimizer is None:
            rate = next((s.lr for s in reversed(steps) if s.lr is not None), None)
            return OptimizerHistory(steps, "", (("lr", rate),) if rate is not None else (), *places, earlier=earlier)
        name, first = optimizer_name(places[1]), self._first_steps.get(optimizer, 0)
        return OptimizerHistory(steps, *describe(optimizer), *places, name=name, earlier=earlier, first_step=first)

    def past_of_explosion(self, ownership: Ownership) -> History:
        """The last steps, after those before the loss left its healthy band, however long ago that is."""
        history = self.past(ownership)
        first = history.steps[0].step if history.steps else 0
        before = [record for record in self._healthy_steps if record.step < first]
        return replace(history, steps=(*before, *history.steps))


_SMALL_WEIGHT = 0.1
"""Weights that start at zero or near it count as this much each: they may grow by any factor."""


def _is_result(forecast: Forecast, kind: str | None = None) -> bool:
    """Whether it holds and is of what a layer or an operator returned, in a type."""
    of_type = forecast.kind in LARGEST and kind in (None, forecast.kind)
    return of_type and forecast.what in ("layer", "operator") and forecast.withdrawn is None


def _share_of(some: list[Tensor], gradients: list[Tensor]) -> float:
    """The norm of some of these gradients, as a share of the norm of all."""
    if not any(bool(g.any()) for g in some):
        return 0.0
    part, whole = (
        math.hypot(*norms([r for g in of if (r := readable(g)) is not None and r.numel()]).tolist())
        for of in (some, gradients)
    )
    return part / whole if whole < math.inf else 1.0


def watched_weights(parameters: list[Tensor]) -> Callable[[], Weights | None]:
    """A function that says what has become of these weights since now."""
    weights = [weakref.ref(p) for p in parameters]
    count = sum(p.numel() for p in parameters)

    def size() -> Tensor | None:
        values = [r for ref in weights if (p := ref()) is not None and (r := readable(p)) is not None and r.numel()]
        with torch.no_grad():
            return norms([v.detach() for v in values]) if values else None

    first = size()  # read when it is needed: on a device that would wait

    def now() -> Weights | None:
        sizes = size()
        if first is None or sizes is None:
            return None
        before = max(math.hypot(*first.tolist()), _SMALL_WEIGHT * math.sqrt(count))
        gradients = [p.grad for ref in weights if (p := ref()) is not None and p.grad is not None]
        matrices = [g for g in gradients if g.dim() > 1]
        share = _share_of(matrices, gradients) if len(matrices) > 1 else 1.0
        return Weights(math.hypot(*sizes.tolist()) / before, share)

    return now


_SAMPLED = 1 << 12
_MOST_SAMPLED = 64


class WeightSample:
    """The first numbers of up to 64 parameters before an update, to see how much of them the update changes.

    Only on the CPU, where reading them waits for nothing.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        plain = [p for p in parameters if is_plain(p) and p.grad is not None and p.is_contiguous()]
        self._whole = plain if len(plain) == len(parameters) else []
        step = max(len(plain) // _MOST_SAMPLED, 1)
        self._parts = [p.detach().view(-1)[:_SAMPLED] for p in plain[::step][:_MOST_SAMPLED]]
        with torch.no_grad():
            self._before = torch.cat(self._parts) if self._parts else None

    def measure(self, norm: float | None) -> tuple[float | None, float | None]:
        """The norm of all parameters (`norm` if it is known already) and the ratio of the update to the weights."""
        if self._before is None:
            return norm, None
        with torch.no_grad():
            now = torch.cat(self._parts)
            size, change = now.norm().item(), (now - self._before).norm().item()
            if norm is None and self._whole:
                norm = plain_norm(self._whole)
        norm = norm if norm is not None and math.isfinite(norm) else None
        return norm, change / size if size > 0 and math.isfinite(change) else None


def _bad_parameters(optimizer: Any, rounds: ParameterRotation) -> list[Tensor]:
    # A parameter that never had a gradient is not trained, so its values do not matter.
    bad = [p for p in parameters_of(optimizer) if id(p) in rounds.trained and not is_finite(p)]
    rounds.infinite.update(id(p) for p in bad if id(p) not in rounds.infinite and _is_infinite_untrained(optimizer, p))
    return [p for p in bad if id(p) not in rounds.infinite or bool(p.isnan().any())]


def _is_infinite_untrained(optimizer: Any, parameter: Tensor) -> bool:
    """Whether the update cannot have made it infinite: these elements have no gradient, and never had one.

    The program has written that itself, such as -inf for what is never to be chosen.
    """
    if parameter.grad is None or not is_plain(parameter):
        return False
    infinite, gradient = parameter.detach().isinf(), parameter.grad.detach()
    kept = [value for p, _, value in state_tensors(optimizer) if p is parameter]
    moved = [gradient if gradient.layout is torch.strided else gradient.to_dense(), *kept]
    return not bool(parameter.detach().isnan().any()) and not any(bool(t[infinite].any()) for t in moved)


def _is_bad(slot: Slot, buffer: Tensor | None) -> bool:
    """Whether a buffer holds a NaN; an infinity may be intended: the start of a minimum, a mask."""
    if buffer is None or is_finite(buffer):
        return False
    return slot.is_running_statistic or bool(torch.isnan(buffer).any())
