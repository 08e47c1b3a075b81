"""The failing step once more by the program's own loop: its batches are handed out again, with the state put back."""

from __future__ import annotations

from typing import Any

from firstnan.engine.handouts import Handouts, ReplayError
from firstnan.engine.microscope import Microscope
from firstnan.engine.recovery import Recovery
from firstnan.gate.gate import Gate
from firstnan.tensors.batches import Handout
from firstnan.tensors.snapshot import Schedules


class LoopReplay:
    """Puts the state back before each replay, and knows which updates the loop must not make."""

    how = "the failing batch was handed out again"

    def __init__(self, handouts: Handouts, gate: Gate, microscope: Microscope, recovery: Recovery | None) -> None:
        self.handouts, self._gate, self._microscope, self._recovery = handouts, gate, microscope, recovery
        self._schedules: Schedules | None = None
        self._updates = self._to_drop = 0
        self._dropped: dict[int, int] = {}

    def can_follow(self) -> bool:
        """Whether the step under way began with batches that are still here, and its update can be undone."""
        undone = not self._gate.in_step or (self._recovery is not None and self._recovery.backup is not None)
        return bool(self._gate.optimizers) and undone and self.handouts.possible(self._gate.steps.total)

    def tripped(self, schedules: Schedules) -> None:
        """The step will be replayed, with the learning rates and scales of now."""
        self._updates, self._dropped, self._schedules = self._gate.steps.total, {}, schedules

    def begin(self, source: Any) -> None:
        """Everything is as it was when the step began; ReplayError where its batches are gone."""
        self._to_drop, self._dropped = self.handouts.begin(source, self._updates), {}
        if self._schedules is not None:
            self._schedules.put_back()
        self._gate.reads.forget()
        self._microscope.drop_gradients()

    def next(self, source: Any) -> Handout | None:
        """The next batch of the replay for this loader; None where it has had all of them."""
        try:
            return self.handouts.again(source)
        except ReplayError:
            if self.handouts.knows(source):
                return None
            raise

    def stop(self) -> None:
        """The rest of the replay's batches is not handed out."""
        self.handouts.stop_again()

    def drops(self) -> bool:
        """Whether the update that the loop wants to make is one too many."""
        if self.handouts.more_to_come:
            return True  # A loop that counts its batches counts these too, and updates its weights too early.
        if self._to_drop > 0:
            self._to_drop -= 1  # It is in the weights already.
            return True
        return False

    def is_stuck(self, optimizer: Any) -> bool:
        """Whether the loop updates again and again without asking for a batch; tells of one more update."""
        count = self._dropped[id(optimizer)] = self._dropped.get(id(optimizer), 0) + 1
        return count > self.handouts.updates_per_batch
