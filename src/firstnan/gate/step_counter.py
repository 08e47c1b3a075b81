"""Counts the steps, and picks the parameters to check after each."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from firstnan.tensors.finite import is_plain

SMALL_MODEL = 1 << 14
CHUNK = 1 << 18
_MOST_PLACES = 64
ROTATION = 8
"""Updates after which every parameter of a large model has been checked."""


class StepCounter:
    """Counts the steps of each optimizer, or backward calls in a program without one."""

    def __init__(self) -> None:
        self.known = self._done = weakref.WeakKeyDictionary[Any, int]()
        """The optimizers that were seen; `done` has the number of their steps."""
        self.follows: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """Optimizer -> the one that was stepped after it the last time."""
        self.wraps: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        """Optimizer -> the one that its own step calls, whose steps are counted."""
        self.last: weakref.ref[Any] | None = None
        self.total = 0
        self.manual = 0
        self._alone = False
        """The last two steps were made by the same optimizer."""
        self._number = self._more = 0
        """The number of the last step; and how many steps of its optimizer are not in `_done` yet."""
        self._expected: weakref.ref[Any] | None = None
        """The optimizer of the backward call under way, where there are several and that is known."""
        self._after: dict[object, weakref.ref[Any] | None] = {}
        """Place of a backward call -> the optimizer that is stepped after it; None if several share the place."""
        self._is_shared = False
        """Whether several optimizers were stepped after backward calls at the place of the one under way."""
        self._places: list[object] = []
        self._users: list[weakref.ref[Any] | None] = []
        self._losses: dict[int, float] = {}
        self._steps_since = 0
        """The backward calls of this round: places, optimizers expected then, losses; and the steps since."""

    @property
    def done(self) -> weakref.WeakKeyDictionary[Any, int]:
        """The number of steps made by each optimizer."""
        last = self.last() if self.last else None
        if self._more and last is not None:
            self._done[last] = self._done.get(last, 0) + self._more
        self._more = 0
        return self._done

    def add(self, optimizer: Any) -> int:
        """Counts one more step of this optimizer and returns its number."""
        self.total += 1
        if self._places:
            self._learn(optimizer)
        self._expected = None
        before = self.last() if self.last else None
        if before is optimizer and self._alone:  # the usual case, kept fast
            self._more += 1
            self._number += 1
            return self._number
        step = self._number = self.done.get(optimizer, 0)
        self._done[optimizer] = step + 1
        self._alone = before is optimizer
        if before is not None:
            self.follows[before] = weakref.ref(optimizer)
        self.last = weakref.ref(optimizer)
        return step

    # With several optimizers: which of them will use the gradients of a backward call.

    def backward_from(self, place: object) -> None:
        """A backward call begins at this place of the program."""
        if self._steps_since:
            self._places, self._users, self._losses, self._steps_since = [], [], {}, 0
        self._expected = self._after.get(place)
        self._is_shared = self._expected is None and place in self._after
        if len(self._places) < _MOST_PLACES:
            self._places.append(place)
            self._users.append(self._expected)

    def note_loss(self, loss: float | None) -> None:
        """The loss of the backward call that has begun."""
        if self._places and loss is not None:
            self._losses[len(self._places) - 1] = loss

    def loss_of(self, optimizer: Any, last: float | None) -> float | None:
        """The loss of this optimizer: that of the last backward call after which it was stepped before.

        The first time it is that of the backward call with the same number as the step, or else the `last` one.
        """
        known = [i for i, ref in enumerate(self._users) if ref is not None and ref() is optimizer]
        if known:
            return self._losses.get(known[-1], last)
        return self._losses.get(self._steps_since, last) if None in self._users else last

    def _learn(self, optimizer: Any) -> None:
        """Several backward calls may be followed by several steps, in the same order."""
        ref = weakref.ref(optimizer)
        for place in self._places[self._steps_since :]:
            known = self._after.get(place, ref)
            if len(self._after) >= _MOST_PLACES and place not in self._after:
                continue
            if known is ref or (known is not None and known() is None):
                self._after[place] = ref
            elif place is self._places[-1]:  # an earlier one may have been followed by no step at all
                self._after[place] = None
        self._steps_since += 1

    def expect(self, optimizer: Any) -> None:
        """This optimizer is about to make its step."""
        self._expected = weakref.ref(optimizer)

    def expect_one_of(self, optimizers: list[Any]) -> None:
        """One of these uses the gradients: the one known from earlier steps, or else the one with the fewest steps."""
        known = self._expected() if self._expected is not None else None
        if known is None and self._is_shared:
            known = self.current_optimizer(updated=False)
        if optimizers and not any(known is one for one in optimizers):
            self.expect(min(optimizers, key=self.of))

    def take_back(self, optimizer: Any) -> None:
        """Uncounts the last step."""
        self.done[optimizer] -= 1
        self.total -= 1
        self._number -= 1
        self._alone = False

    @property
    def latest(self) -> int:
        """The number of the step whose update was made last."""
        return self._number if self.total and not self.manual else max(self.manual - 1, 0)

    @property
    def updates(self) -> int:
        """The number of updates so far, by optimizers and by hand."""
        return self.total + self.manual

    def resume(self, total: int, manual: int, done: dict[Any, int], last: Any, follows: list[tuple[Any, Any]]) -> None:
        """Continues from the counts of another run."""
        self.total, self.manual, self._alone = total, manual, False
        self.done.update(done)
        self.last = weakref.ref(last) if last is not None else None
        self._number = (self._done.get(last, 0) if last is not None else total) - 1
        self.follows.update({one: weakref.ref(other) for one, other in follows})

    def of(self, optimizer: Any) -> int:
        if self._alone and self.last is not None and self.last() is optimizer:  # the usual case, kept fast
            return self._number + 1
        inner = self.wraps.get(optimizer) if self.wraps else None
        inside = inner() if inner is not None else None
        return self.done.get(optimizer if inside is None else inside, 0)

    def current_optimizer(self, updated: bool) -> Any:
        """The optimizer of the current step, or of the last one if the current step's update was made (`updated`)."""
        last = self.last() if self.last else None
        if not updated and self._expected is not None and (expected := self._expected()) is not None:
            return expected
        following = self.follows.get(last) if last is not None and not updated else None
        return (following() if following is not None else None) or last or next(iter(self.done.keys()), None)

    @property
    def current(self) -> int:
        """The number of the current step, counted for the optimizer that is expected next."""
        if self._expected is not None and (expected := self._expected()) is not None and not self.manual:
            return self.of(expected)
        if self.total == 0:
            return self.manual
        last = self.last() if self.last else None
        following = self.follows.get(last) if last is not None else None
        optimizer = following() if following is not None else None
        if optimizer is not None:
            return self.of(optimizer)
        if last is None:  # The program has deleted it; its count goes on.
            return self._number + 1
        # After the very first step, another optimizer may be about to make its own first step.
        count = self.of(last)
        return 0 if count == 1 and any(n == 0 for n in self.done.values()) else count


class ParameterRotation:
    """Picks the parameters to check after an update: all of a small model, an eighth of a large one, in rotation.

    Reading every parameter after every update would cost a large model more than the rest of the gate. A bad parameter
    that affects the loss is noticed at once anyway.
    """

    def __init__(self, thorough: bool) -> None:
        self._thorough = thorough
        self.trained: set[int] = set()
        self.infinite: set[int] = set()
        """Parameters with infinite elements that are not trained."""
        self._chunks: list[tuple[int, int, int]] = []
        self._shape: tuple[int, int] = (-1, -1)
        self._next = 0

    def due(self, parameters: list[Tensor], everything: bool = False) -> tuple[list[Tensor], bool]:
        """The tensors to check now, and whether they are all of them."""
        self.trained.update(map(id, parameters))
        total = sum(map(Tensor.numel, parameters))
        if everything or self._thorough or total <= SMALL_MODEL:
            return parameters, True
        if self._shape != (len(parameters), total):
            self._shape, self._next = (len(parameters), total), 0
            self._chunks = [
                (i, start, min(start + CHUNK, p.numel()))
                for i, p in enumerate(parameters)
                for start in range(0, p.numel(), CHUNK)
            ]
        count = -(-len(self._chunks) // ROTATION)
        chosen = [self._chunks[(self._next + k) % len(self._chunks)] for k in range(count)]
        self._next = (self._next + count) % len(self._chunks)
        return [_slice(parameters[i], start, stop) for i, start, stop in chosen], False


def _slice(parameter: Tensor, start: int, stop: int) -> Tensor:
    if stop - start == parameter.numel() or not is_plain(parameter) or not parameter.is_contiguous():
        return parameter
    return parameter.detach().view(-1)[start:stop]
