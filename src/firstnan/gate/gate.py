"""The check that runs once a step: whether loss, gradients, updated parameters and buffers are finite."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.gate.growth_guard import Alarm, Guard
from firstnan.gate.reading import Clipping, DeviceReads, QuickCheck
from firstnan.gate.step_counter import ROTATION, ParameterRotation, StepCounter
from firstnan.observe.gradient_hooks import GradientNorms
from firstnan.observe.sites import CallSites, Ownership
from firstnan.records import History, Noticed, StepRecord
from firstnan.tensors.finite import is_finite, norms, plain_norm, readable, reads_are_free
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import describe, graph_leaves, is_torch_optimizer, learning_rate_of, parameters_of

_HISTORY = 64
_SMALL = 1 << 14
_LOSS, _GRADIENT, _PARAMETER = Noticed("loss"), Noticed("gradient"), Noticed("parameter")


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
        guard: Callable[[], Guard] | None = Guard,
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
        self._guards: dict[int, Guard] = {}
        """One for each optimizer, since their usual values differ."""
        self.thorough = thorough
        self.steps = StepCounter()
        self.call_sites = CallSites()
        self._steps: deque[tuple[Any, ...]] = deque(maxlen=_HISTORY)
        """The fields of the StepRecords of the last steps."""
        self.optimizers = 0
        self.trained = False
        self.in_step: Any = None
        self._parameters: list[weakref.ref[Tensor]] = []
        self._buffers: list[list[Any]] = []
        """Slot, version at the last check, whether it held a NaN then."""
        self.skipping_since: int | None = None
        """The first of the consecutive updates that a gradient scaler has skipped."""
        self.norm: float | None = None
        """The norm of the gradients of the last update."""
        self._loss: float | None = None
        self._leaves: list[weakref.ref[Tensor]] = []
        self._rotations: weakref.WeakKeyDictionary[Any, ParameterRotation] = weakref.WeakKeyDictionary()
        self._scaling = False
        """Whether a gradient scaler is used, which handles infinite gradients itself."""
        self._scaled: tuple[weakref.ref[Tensor], Any] | None = None

    # Backward.

    def optimizer_made(self, optimizer: Any) -> None:
        self.optimizers += 1
        # An optimizer created in the middle of training continues the count; those created before it alternate.
        self.steps.done.setdefault(optimizer, self.steps.current if self.steps.total else 0)

    def backward_begins(self, roots: list[Tensor]) -> Trips:
        """Checks the loss: a non-finite one trips before anything is computed from it."""
        self.trained = True
        trips: list[Trip] = []
        if self.optimizers == 0 and self._accumulating():
            self.steps.manual -= 1  # The last backward did not end its step after all.
        elif self.optimizers == 0:
            trips += self._check_leaves()
        for root in roots if self._scaled is None else self._unscaled(self._scaled, roots):
            if reads_are_free(root) and root.numel() == 1 and type(root) is Tensor and root.is_floating_point():
                self._loss = root.item()
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
        return trips

    @property
    def uses_gradients_at_once(self) -> bool:
        """Whether the gradients are used right after backward, inside it or without an optimizer object."""
        return self.in_step is not None or self.optimizers == 0

    def backward_ended(self, roots: list[Tensor]) -> Trips:
        if self.in_step is not None:
            # The optimizer called its closure (LBFGS) and uses these gradients at once.
            return self._check_gradients(self.in_step, parameters_of(self.in_step), before_update=False)
        if self.optimizers or self._scaling:
            return _NONE
        return self._check_gradients(None, self._leaves_of(roots), before_update=False)

    def gradients_returned(self, outputs: list[Tensor], gradients: list[Tensor]) -> Trips:
        """`torch.autograd.grad` in a program without an optimizer object is its step."""
        self.trained = True
        if self.optimizers:
            return _NONE
        checked = ((_LOSS, outputs), (_GRADIENT, gradients))
        found = [(noticed, [t for t in tensors if not is_finite(t)]) for noticed, tensors in checked]
        return [Trip(noticed, bad, before_update=False) for noticed, bad in found if bad]

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler handles infinite gradients."""
        return self._scaling

    def loss_scaled(self, given: Any, result: Any) -> None:
        """A gradient scaler may scale a finite loss to infinity, so the unscaled loss is checked."""
        self._scaling = self._scaling or result is not given  # a disabled scaler returns its argument
        if isinstance(given, Tensor) and isinstance(result, Tensor):
            self._scaled = (weakref.ref(result), given.detach())

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
        self._steps.append((self.steps.add(optimizer), self._loss, None, learning_rate_of(optimizer)))
        self._loss = None
        return True

    def check_update(self, optimizer: Any, closure: bool) -> Trips:
        """What the optimizer is about to use."""
        self._passed_quick_check = False
        self.trained = True
        if optimizer not in self.steps.done:
            self.optimizer_made(optimizer)
        # With `found_inf` a gradient scaler leaves infinities to the optimizer's own kernel.
        if getattr(optimizer, "found_inf", None) is not None:
            return _NONE
        return self._check_gradients(optimizer, parameters_of(optimizer), before_update=not closure)

    def update_begins(self, optimizer: Any, *, closely: bool = False, safe: bool = False) -> Alarm | None:
        """The update is made; `closely` reads every parameter after it, `safe` none. Unusual growth is returned."""
        self.in_step, self._closely, self._is_safe = optimizer, closely, safe
        return self._watch_growth(self.steps.of(optimizer), optimizer)

    def is_updating(self, optimizer: Any) -> bool:
        return self.in_step is optimizer

    def update_ended(self, optimizer: Any) -> Trips:
        """What the update has made of the parameters, and the step of the buffers."""
        self.in_step = self.skipping_since = None
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
        self._closely = self._is_safe = False
        self._steps.append((step, self._loss, self.norm, learning_rate_of(optimizer), size if whole else None))
        self._loss = None
        trips: list[Trip] = []
        bad = _bad_parameters(optimizer, rounds) if size is not None and not math.isfinite(size) else []
        if bad:
            trips.append(Trip(_PARAMETER, bad, before_update=False))
        if self.thorough or self.steps.total % ROTATION == 1:
            trips += [Trip(*found, before_update=False) for found in self._bad_buffers()]
        return trips

    def undo_update(self) -> None:
        """The last update is taken back: it never was a step."""
        optimizer = self.steps.last() if self.steps.last else None
        if optimizer is not None:
            self.steps.take_back(optimizer)
            if self._steps:
                self._steps.pop()

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
        return Trip(*found, before_update=False) if found is not None else None

    def update_skipped(self, optimizer: Any, scale: float) -> Trips:
        """A gradient scaler skipped the update: normal while it adapts its scale, but not with a scale below 1."""
        self._scaling = True
        if self.skipping_since is None:
            self.skipping_since = self.steps.of(optimizer)
        if scale >= 1.0:
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

    def _watch_growth(self, step: int, optimizer: Any) -> Alarm | None:
        if self._new_guard is None:
            return None
        guard = self._guards.get(id(optimizer))
        if guard is None:
            guard = self._guards[id(optimizer)] = self._new_guard()
        return guard.observe(step, self.norm, self._loss)

    @property
    def explosion(self) -> Alarm | None:
        """The explosion of a loss that stayed finite and never recovered."""
        found = [alarm for guard in self._guards.values() if (alarm := guard.unrecovered) is not None]
        return min(found, key=lambda alarm: alarm.step, default=None)

    def remember(self, more: int) -> None:
        """Keeps this many more of the last steps than usual."""
        self._steps = deque(self._steps, maxlen=_HISTORY + more)

    def watch_models(self, models: Models) -> None:
        """Watches these models from now on; a buffer that already holds a NaN has it on purpose."""
        self._buffers = [[slot, -1, _has_nan(slot.tensor())] for slot in models.slots]
        self._parameters = [weakref.ref(p) for p, _ in models.parameters.values()]

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
            # An infinity may be intended there: the start of a minimum, a mask.
            known, watched[2] = watched[2], _has_nan(buffer)
            if watched[2] and not known:
                yield Noticed("buffer", watched[0].label), [buffer]

    # Programs without an optimizer object.

    def _leaves_of(self, roots: list[Tensor]) -> list[Tensor]:
        """The tensors that backward wrote gradients to; the graph is walked again only if some were replaced."""
        alive = [leaf for ref in self._leaves if (leaf := ref()) is not None]
        replaced = not alive or len(alive) != len(self._leaves) or any(leaf.grad is None for leaf in alive)
        known = {id(leaf) for leaf in alive}
        # Parts of a model may start training later.
        joined = [p for ref in self._parameters if (p := ref()) is not None and p.grad is not None]
        new = [leaf for leaf in (graph_leaves(roots) if replaced else joined) if id(leaf) not in known]
        self._leaves = [weakref.ref(leaf) for leaf in alive + new]
        return alive + new

    def _check_leaves(self) -> Trips:
        """Checks what the program has updated by hand since the last backward."""
        leaves = [leaf for ref in self._leaves if (leaf := ref()) is not None]
        size = self._size(leaves, _PARAMETER)
        bad = [] if size is None or math.isfinite(size) else [leaf for leaf in leaves if not is_finite(leaf)]
        return [Trip(_PARAMETER, bad, before_update=False)] if bad else _NONE

    def _accumulating(self) -> bool:
        leaves = [leaf for ref in self._leaves if (leaf := ref()) is not None and leaf.grad is not None]
        if not leaves:
            return False
        smallest = min((leaf.grad for leaf in leaves if leaf.grad is not None), key=Tensor.numel)
        return bool(smallest.any())

    def end_manual_step(self) -> Alarm | None:
        """Without an optimizer object the gradients end a step; unusual growth is returned."""
        alarm = self._watch_growth(self.steps.manual, None)
        self._steps.append((self.steps.manual, self._loss, self.norm))
        self._loss = None
        self.steps.manual += 1
        return alarm

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that backward wrote gradients to, in a program without an optimizer object."""
        return [leaf for ref in self._leaves if (leaf := ref()) is not None]

    def go_on_from(self, history: History) -> None:
        """Continues from the history of another run."""
        self._steps.clear()
        self._steps.extend((s.step, s.loss, s.grad_norm, s.lr, s.param_norm) for s in history.steps)

    def past(self, ownership: Ownership | None = None, *, updated: bool = False) -> History:
        """The last steps, including what is known of the failing one; `updated` if its update was made."""
        steps = [StepRecord(*numbers) for numbers in self._steps]
        if self._loss is not None:
            steps.append(StepRecord(self.steps.current, self._loss, self.norm))
        optimizer = self.in_step or self.steps.current_optimizer(updated)
        places = self.call_sites.of(optimizer, ownership) if ownership is not None else ()
        about = describe(optimizer) if optimizer is not None else ("", ())
        return History(tuple(steps), *about, (), *places)


def _bad_parameters(optimizer: Any, rounds: ParameterRotation) -> list[Tensor]:
    # A parameter that never had a gradient is not trained, so its values do not matter.
    return [p for p in parameters_of(optimizer) if id(p) in rounds.trained and not is_finite(p)]


def _has_nan(t: Tensor | None) -> bool:
    return t is not None and not is_finite(t) and bool(torch.isnan(t).any())
