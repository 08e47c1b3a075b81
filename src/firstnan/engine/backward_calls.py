"""The backward calls of a step: how many, and after which of them the gradients were bad."""

from __future__ import annotations

from torch import Tensor

from firstnan.engine.handouts import Handouts
from firstnan.gate.gate import Gate
from firstnan.records import Noticed
from firstnan.tensors.finite import is_finite
from firstnan.tensors.models import parameters_of
from firstnan.tensors.state import Handout


class BackwardCalls:
    """Counts them. Where a step accumulates gradients over several batches, this tells which one is to blame."""

    def __init__(self, gate: Gate, handouts: Handouts) -> None:
        self._gate, self._handouts = gate, handouts
        self.count = 0
        """Those of the current step."""
        self.called = False
        """Whether there was one since the last batch."""
        self.bad_after: int | None = None
        """The call of a traced step after which the gradients were non-finite for the first time."""
        self.at_update = 0
        """How many there were at the last update."""
        self._batches = 0

    @property
    def since_update(self) -> int:
        """How many since the last update; only for a loop without a loader."""
        return self.count - self.at_update

    def begin(self) -> None:
        self.called = True
        self.count += 1
        if self.bad_after is not None and not self.bad_gradients():
            self.bad_after = None  # The program has cleared them: what is bad at the end comes from a later batch.

    def batch_is_used(self) -> None:
        """The next batch, if another backward call comes before it, belongs to the same step."""
        handouts = self._handouts
        if handouts.in_parts or self._batches == handouts.number > 0:
            handouts.part_ended()
        self._batches = handouts.number

    def judge(self) -> list[Tensor]:
        """The gradients that are bad after a call, before which they were good."""
        bad = self.bad_gradients()
        self.bad_after = self.count if bad else None
        return bad

    def forget(self) -> None:
        """A step begins."""
        self.count, self.bad_after = 0, None

    def bad_gradients(self) -> list[Tensor]:
        parameters = [p for optimizer in list(self._gate.steps.done) for p in parameters_of(optimizer)]
        return [p.grad for p in parameters if p.grad is not None and not is_finite(p.grad)]

    def batches(self) -> list[Handout]:
        """The batches of the current step."""
        return self._handouts.parts(self.count)

    def blame(self, part: int) -> None:
        """Blames one of these batches."""
        self._handouts.blame(part, self.count)

    def blame_first_bad(self, noticed: Noticed) -> None:
        """Of several batches, blames the one after whose backward call the gradients were bad first."""
        parts = len(self.batches())
        if noticed.what in ("gradient", "exception") and self.bad_after is not None and parts > 1:
            self.blame((self.bad_after - 1) * parts // self.count)
