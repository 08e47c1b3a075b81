"""`find_bad_samples`: which samples of a batch make a step of one's own non-finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.data_origin import bad_rows
from firstnan.engine.handouts import Replayer
from firstnan.engine.samples.cut import CutError, cut
from firstnan.engine.samples.strategy import search
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import Alarm
from firstnan.observe.training_hooks import TrainingHooks
from firstnan.records import Batch, Noticed
from firstnan.records.errors import InternalErrors
from firstnan.tensors.batches import restore_buffers
from firstnan.tensors.finite import is_finite, tensors_in
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import drop_gradients, leaves_below
from firstnan.tensors.randomness import RandomState

_NUMERIC = (ArithmeticError, AssertionError, ValueError, RuntimeError)
"""What a function raises that minds a NaN, or cannot go on with one."""


def find_bad_samples(step: Callable[[Any], Any], batch: Any) -> Batch:
    """Calls `step(batch)` with samples replaced by others of the batch until the bad ones are known.

        found = firstnan.find_bad_samples(lambda batch: loss_of(model, batch), batch)
        print(found.bad_samples, found.confirmed, found.features)

    A call counts as bad if what it returns, its loss or its gradients are not finite; a loss that is returned is
    taken through backward where the step has not done so itself. Updates are kept out, and random state, buffers
    and gradients are as before in every call and at the end. `bad_samples` is None where no sample is to blame;
    `note` says why.
    """
    try:
        pieces = cut(batch)
    except CutError as error:
        return Batch(note=f"the batch cannot be cut into samples: {error}")
    with _Oracle(step).ready() as oracle:
        asking = search(pieces.size, bad_rows(batch))
        question = next(asking)
        while True:
            try:
                question = asking.send(oracle.is_finite(pieces.replaced(question)))
            except StopIteration as stop:
                found = stop.value
                break
    if not found.repeated:
        return Batch(size=pieces.size, replays=found.replays, note="the step is finite with this batch")
    features = pieces.features(found.bad) if found.bad else ()
    return Batch(None, pieces.size, found.bad, found.confirmed, None, features, found.replays, found.note)


class _Oracle:
    """Says of a batch whether the step is finite with it (a gate.Listener and a hooks.Audience)."""

    is_calm = False

    def __init__(self, step: Callable[[Any], Any]) -> None:
        self.step = step
        self.replayer = Replayer()
        self.internal_error = InternalErrors(lambda text: None)
        self._gate = Gate(self)
        self._failed = self._went_back = False
        self._gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        """Of every leaf, as it was before the first call."""

    @contextlib.contextmanager
    def ready(self) -> Iterator[_Oracle]:
        models = Models()
        self.replayer.watch_buffers(models.slots)
        self._buffers, self._random = self.replayer.copied_buffers(), RandomState.now()
        for parameter, _ in models.parameters.values():
            self._gradients[id(parameter)] = (parameter, parameter.grad)
        try:
            yield self
        finally:
            self._put_back()
            for leaf, gradient in self._gradients.values():
                leaf.grad = gradient

    def _put_back(self) -> None:
        self._random.restore()
        restore_buffers(self._buffers)

    def is_finite(self, batch: Any) -> bool:
        self._put_back()
        for leaf, _ in self._gradients.values():
            leaf.grad = None
        self._gate, self._failed, self._went_back = Gate(self), False, False
        hooks = TrainingHooks(self._gate, self)
        hooks.install()
        try:
            result = self.step(batch)
            if isinstance(result, Tensor) and result.requires_grad and result.numel() == 1 and not self._went_back:
                torch.autograd.backward(result)
        except _NUMERIC:
            return False
        finally:
            hooks.remove()
        bad = isinstance(result, float) and not math.isfinite(result)
        return not (self._failed or bad or any(not is_finite(t) for _, t in tensors_in(result)))

    # What the gate says.

    def trip(self, noticed: Noticed, tensors: list[Tensor], *, before_update: bool) -> None:
        self._failed = True

    def suppresses(self, optimizer: Any) -> bool:
        return self._failed

    def step_begins(self, optimizer: Any, closure: bool) -> None:
        drop_gradients(optimizer)
        self._gate.in_step = None

    def step_ended(self, by_hand: bool = False) -> None:
        """Nothing was written."""

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        """Growth is no matter of one step."""

    # What torch says.

    def concerns(self, roots: list[Tensor]) -> bool:
        self._went_back = True
        for leaf in leaves_below(roots):
            self._gradients.setdefault(id(leaf), (leaf, leaf.grad))
        return True

    def backward_begins(self) -> None:
        """Its loss goes to the gate."""

    def optimizer_made(self) -> None:
        """One that the step makes for itself is as good as another."""

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
