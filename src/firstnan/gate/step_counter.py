"""Whose turn it is: which step is under way, and which parameters are looked at after it."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from firstnan.tensors.finite import is_plain

SMALL_MODEL = 1 << 14
CHUNK = 1 << 18
ROUND = 8


class Steps:
    """Counts training steps: those of the optimizer whose turn it is, or backward calls where there is none."""

    def __init__(self) -> None:
        self._done: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.follows: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self.last: weakref.ref[Any] | None = None
        self.total = 0
        self.manual = 0
        self._alone = False
        """The last two steps were of one and the same optimizer."""
        self._number = self._more = 0
        """Of the last step; and how many of that optimizer are still to be written down."""

    @property
    def done(self) -> weakref.WeakKeyDictionary[Any, int]:
        """The steps of each optimizer."""
        last = self.last() if self.last else None
        if self._more and last is not None:
            self._done[last] = self._done.get(last, 0) + self._more
        self._more = 0
        return self._done

    def add(self, optimizer: Any) -> int:
        """One more of this optimizer: its number."""
        self.total += 1
        before = self.last() if self.last else None
        if before is optimizer and self._alone:  # the usual case, a hundred thousand times
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

    def take_back(self, optimizer: Any) -> None:
        """The last step is undone."""
        self.done[optimizer] -= 1
        self.total -= 1
        self._number -= 1
        self._alone = False

    @property
    def turn(self) -> int:
        """How many updates there were so far, of whatever kind."""
        return self.total + self.manual

    def resume(self, total: int, manual: int, done: dict[Any, int], last: Any, follows: list[tuple[Any, Any]]) -> None:
        """Goes on counting where another run stood: how far each optimizer was, who was last, who takes turns."""
        self.total, self.manual, self._alone = total, manual, False
        self.done.update(done)
        self.last = weakref.ref(last) if last is not None else None
        self._number = (self._done.get(last, 0) if last is not None else total) - 1
        self.follows.update({one: weakref.ref(other) for one, other in follows})

    def of(self, optimizer: Any) -> int:
        return self.done.get(optimizer, 0)

    def whose_turn(self, updated: bool) -> Any:
        """The optimizer of the step that is under way, or, where that is `updated` already, of the last one."""
        last = self.last() if self.last else None
        following = self.follows.get(last) if last is not None and not updated else None
        return (following() if following is not None else None) or last or next(iter(self.done.keys()), None)

    @property
    def current(self) -> int:
        """The step that is under way: that of the optimizer which followed the last one the time before."""
        if self.total == 0:
            return self.manual
        last = self.last() if self.last else None
        following = self.follows.get(last) if last is not None else None
        optimizer = following() if following is not None else None
        if optimizer is not None:
            return self.of(optimizer)
        if last is None:  # The program has let go of it: its count is the one to go on from.
            return self._number + 1
        return self._turn_of_a_newcomer(self.of(last))

    def _turn_of_a_newcomer(self, count: int) -> int:
        # After the very first step another optimizer may be about to make its own first one.
        return 0 if count == 1 and any(n == 0 for n in self.done.values()) else count


class Rounds:
    """Which parameters to look at after an update: all of a small model, of a large one an eighth in turn.

    Reading every parameter after every step costs a large model more than all the rest; what a bad one does to the
    loss is seen at once anyway.
    """

    def __init__(self, thorough: bool) -> None:
        self._thorough = thorough
        self.trained: set[int] = set()
        self._chunks: list[tuple[int, int, int]] = []
        self._shape: tuple[int, int] = (-1, -1)
        self._next = 0

    def due(self, parameters: list[Tensor], everything: bool = False) -> tuple[list[Tensor], bool]:
        """What to look at now, and whether that is everything."""
        self.trained.update(map(id, parameters))
        total = sum(p.numel() for p in parameters)
        if everything or self._thorough or total <= SMALL_MODEL:
            return parameters, True
        if self._shape != (len(parameters), total):
            self._shape, self._next = (len(parameters), total), 0
            self._chunks = [
                (i, start, min(start + CHUNK, p.numel()))
                for i, p in enumerate(parameters)
                for start in range(0, p.numel(), CHUNK)
            ]
        count = -(-len(self._chunks) // ROUND)
        turn = [self._chunks[(self._next + k) % len(self._chunks)] for k in range(count)]
        self._next = (self._next + count) % len(self._chunks)
        return [_piece(parameters[i], start, stop) for i, start, stop in turn], False


def _piece(parameter: Tensor, start: int, stop: int) -> Tensor:
    if stop - start == parameter.numel() or not is_plain(parameter) or not parameter.is_contiguous():
        return parameter
    return parameter.detach().view(-1)[start:stop]
