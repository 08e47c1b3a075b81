"""Restarts a program at the captured step instead of its first one."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from firstnan.capsule.content import BatchState, Capsule
from firstnan.capsule.file import one_line
from firstnan.capsule.state import Restorer
from firstnan.gate.gate import Gate
from firstnan.tensors.models import TrainingObjects
from firstnan.tensors.state import Handout


class Restart:
    """Restores the captured state where the program reads its first training batch, and returns the captured one.

    A batch that is read but not trained on (to learn shapes, to warm up) is not the first step: the next batch is
    replaced as well. Without a captured batch, or if the program reads none, the state is restored after the program's
    own first step. The caller passes every batch in grad mode through `batch`, and reports `backward_begins` and
    `step_ended`; `restored` is called after each restore, before the batch is returned.
    """

    def __init__(
        self, capsule: Capsule, gate: Gate, find: Callable[[], TrainingObjects], restored: Callable[[], None]
    ) -> None:
        self.capsule, self._gate, self._find, self._restored = capsule, gate, find, restored
        self.restorer: Restorer | None = None
        """None until the program has reached its first step."""
        self._to_drop = 0
        """Updates of the captured step that its weights already contain, and that must not be repeated."""
        self.handed_out = 0
        self.problems: list[str] = []
        self._trains = False
        self._queues: list[deque[BatchState]] = []
        self._iterators: list[weakref.ref[Any]] = []
        """Those that batches were read from since the restore, in this order; some may be gone."""
        self._latest: BatchState | None = None
        capsule.file.map()  # the program may delete the file before its first step

    @property
    def notes(self) -> list[str]:
        """What differs from when the step was captured."""
        found = [*self.problems, *_versions(self.capsule)]
        if self.restorer is not None:
            found += [*self.restorer.notes, *sorted(self.restorer.unpacker.notes)]
        found += [f"not in the capsule: {what}" for what in self.capsule.left_out]
        return [one_line(note, 300) for note in found]

    # Called while the program runs.

    def drops_update(self) -> bool:
        """Whether the captured weights already contain the update that is about to be made."""
        if self._to_drop > 0:
            self._to_drop -= 1
            return True
        return False

    def around(self, fetch: Callable[[Any], Any], unseen: Callable[[], Any]) -> Callable[[Any], Any]:
        """Fetches the captured batch in place of the program's own."""

        def captured(iterator: Any) -> Any:
            with unseen():
                return self.batch(iterator, fetch)

        return captured

    def batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The captured batch, modelled on the program's own; or the program's own."""
        if not self._may_restore() and not self._has_more(iterator):
            self._latest = None
            return fetch(iterator)
        own = self._own(iterator, fetch)
        if not self._has_more(iterator):
            self._restore()
            self._iterators = [weakref.ref(iterator)]
        self._latest = latest = self._queue(iterator).popleft()
        assert self.restorer is not None
        try:
            batch = self.restorer.unpacker.value(latest.value, own)
        except Exception as error:  # the program's batch has another structure
            self.problems.append(f"the captured batch could not be restored here ({type(error).__name__}: {error})")
            batch = own
        self.handed_out += 1
        self.restorer.random(latest.random)
        return batch

    def label(self, handout: Handout | None) -> None:
        """Gives the latest batch the index and the dataset indices that it had when it was captured."""
        if handout is not None and self._latest is not None:
            handout.index, handout.indices = self._latest.index, self._latest.indices

    def backward_begins(self) -> None:
        self._trains = self.restorer is not None

    def step_ended(self, by_hand: bool) -> None:
        """The program's own first step is done, and it read no batch."""
        if self.restorer is not None:
            return
        if self.capsule.batches:
            self.problems.append("the program reads no batch from a DataLoader, so the captured batch is not used")
        else:
            self.problems.append("no batch was captured, so this step uses the program's own data")
        self._restore()
        assert self.restorer is not None
        self.restorer.random(self.capsule.random or next((b.random for b in self.capsule.batches), None))
        if by_hand:
            # The program is about to update its weights itself, with gradients of its own first step.
            for leaf in self._gate.leaves:
                if leaf.grad is not None:
                    leaf.grad.zero_()

    def batches(self) -> Iterator[Any]:
        """Restores the state now and yields the captured batches (None, if there is none) to the caller's loop."""
        self._restore()
        assert self.restorer is not None
        if not self.capsule.batches:
            self.restorer.random(self.capsule.random)
            yield None
        for captured in self.capsule.batches:
            self._latest, batch = captured, self.restorer.unpacker.value(captured.value)
            self.restorer.random(captured.random)
            yield batch

    # Restoring.

    def _may_restore(self) -> bool:
        """Whether the program has optimizers to restore, and the captured step has not begun."""
        if self._trains or not self.capsule.batches:
            return False
        return self._gate.optimizers > 0 if self.capsule.optimizers else True

    def _restore(self) -> None:
        self.restorer = Restorer(self.capsule, self._find())
        self.restorer.weights()
        self.restorer.training()
        sources = max((b.source for b in self.capsule.batches), default=-1) + 1
        self._queues = [deque(b for b in self.capsule.batches if b.source == i) for i in range(sources)]
        self._to_drop = self.capsule.suppressed
        self._restore_step_counts()
        torch.clear_autocast_cache()
        self._restored()

    def _restore_step_counts(self) -> None:
        """Makes the current step the captured one."""
        assert self.restorer is not None
        captured, optimizers = self.capsule.steps, self.restorer.optimizers
        done = {o: n for o, n in zip(optimizers, captured.done, strict=True) if o is not None}
        pairs = [(optimizers[a], optimizers[b]) for a, b in captured.follows]
        follows = [(a, b) for a, b in pairs if a is not None and b is not None]
        last = optimizers[captured.last] if captured.last is not None else None
        self._gate.steps.resume(captured.total, captured.manual, done, last, follows)
        past = self.capsule.report.history
        self._gate.go_on_from(replace(past, steps=tuple(s for s in past.steps if s.step < captured.current)))

    def _has_more(self, iterator: Any) -> bool:
        if self.restorer is None:
            return False
        if all(ref() is not iterator for ref in self._iterators) and len(self._iterators) < len(self._queues):
            self._iterators.append(weakref.ref(iterator))
        return bool(self._queue(iterator))

    def _queue(self, iterator: Any) -> deque[BatchState]:
        return next((q for q, ref in zip(self._queues, self._iterators, strict=False) if ref() is iterator), deque())

    def _own(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The program's own batch: the captured one is modelled on it."""
        try:
            return fetch(iterator)
        except StopIteration:
            raise  # a loop over all of the data must end
        except Exception as error:
            self.problems.append(f"the program's own data could not be read ({type(error).__name__}: {error})")
            return None


def _versions(capsule: Capsule) -> list[str]:
    there, here = capsule.environment.get("torch"), torch.__version__
    return [f"captured with torch {there}, replayed with torch {here}"] if there != here else []


def changed_sources(capsule: Capsule, program: str) -> list[str]:
    """Notes on captured source files that differ here: looked for next to the program, then at their old path."""
    found = []
    for name, text in capsule.sources.items():
        near = os.path.join(os.path.dirname(program), os.path.basename(name))
        for path in dict.fromkeys((near, name)):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    here = file.read(len(text) + 1)
            except (OSError, ValueError):
                continue
            if here != text:
                found.append(f"{os.path.basename(name)} has changed since the step was captured")
            break
    return found
