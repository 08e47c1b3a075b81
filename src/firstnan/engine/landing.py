"""Lands a program in the captured step instead of its first one, whoever watches it."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from firstnan.capsule.content import BatchState, Capsule
from firstnan.capsule.restore import Putting
from firstnan.capsule.training_objects import Living
from firstnan.gate.gate import Gate
from firstnan.tensors.batches import Handout


class Landing:
    """Puts the captured state in where the program takes its first batch to train on, and hands that one out.

    A batch that is taken and not trained on (to learn shapes, to warm up) is no first step: the next one is handed the
    captured batch again. Where no batch was captured, or the program takes none, the state is put in after the
    program's own first step. A watcher asks `batch` for every batch in grad mode, and tells of `backward_begins` and
    `step_ended`; `landed` hears of each landing, before the batch is handed out.
    """

    def __init__(self, capsule: Capsule, gate: Gate, find: Callable[[], Living], landed: Callable[[], None]) -> None:
        self.capsule, self._gate, self._find, self._landed = capsule, gate, find, landed
        self.putting: Putting | None = None
        """None until the program has come to its first step."""
        self.to_suppress = 0
        """Updates of the captured step that are in its weights already, and must not be made again."""
        self.handed_out = 0
        self.troubles: list[str] = []
        self._trains = False
        self._queues: list[deque[BatchState]] = []
        self._iterators: list[weakref.ref[Any]] = []
        """Those that batches were taken from since the landing, in this order; some may be gone."""
        self._latest: BatchState | None = None

    @property
    def notes(self) -> list[str]:
        """What is not as it was when the step was captured."""
        found = [*self.troubles, *_versions(self.capsule)]
        if self.putting is not None:
            found += [*self.putting.notes, *sorted(self.putting.unpacker.notes)]
        found += [f"not in the capsule: {what}" for what in self.capsule.left_out]
        # Some of the words are the file's own.
        return ["".join(c if c.isprintable() else "?" for c in note[:300]) for note in found]

    # What the session tells.

    def drops_update(self) -> bool:
        """Whether the update about to be made is in the captured weights already."""
        if self.to_suppress > 0:
            self.to_suppress -= 1
            return True
        return False

    def around(self, fetch: Callable[[Any], Any], unseen: Callable[[], Any]) -> Callable[[Any], Any]:
        """Fetches the captured batch in place of the program's own."""

        def landing(iterator: Any) -> Any:
            with unseen():
                return self.batch(iterator, fetch)

        return landing

    def batch(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The captured batch, made after the program's own; or that one."""
        if not self._may_land() and not self._has_more(iterator):
            self._latest = None
            return fetch(iterator)
        own = self._own(iterator, fetch)
        if not self._has_more(iterator):
            self._land()
            self._iterators = [weakref.ref(iterator)]
        self._latest = latest = self._queue(iterator).popleft()
        assert self.putting is not None
        try:
            batch = self.putting.unpacker.value(latest.value, own)
        except Exception as error:  # what the program has there is not what was captured
            self.troubles.append(f"the captured batch could not be made here ({type(error).__name__}: {error})")
            batch = own
        self.handed_out += 1
        self.putting.random(latest.random)
        return batch

    def label(self, handout: Handout | None) -> None:
        """Gives the batch handed out last the number that it had, and the elements of the dataset."""
        if handout is not None and self._latest is not None:
            handout.index, handout.indices = self._latest.index, self._latest.indices

    def backward_begins(self) -> None:
        self._trains = self.putting is not None

    def step_ended(self, by_hand: bool) -> None:
        """The program's own first step is done, and no batch was asked for."""
        if self.putting is not None:
            return
        if self.capsule.batches:
            self.troubles.append("the program takes no batch from a DataLoader: the captured one is not used")
        else:
            self.troubles.append("no batch came from a DataLoader: the data of this step are the program's own")
        self._land()
        assert self.putting is not None
        self.putting.random(self.capsule.random or next((b.random for b in self.capsule.batches), None))
        if by_hand:
            # The program is about to update its weights itself, with gradients of another step.
            for leaf in self._gate.leaves:
                if leaf.grad is not None:
                    leaf.grad.zero_()

    def batches(self) -> Iterator[Any]:
        """Lands here and now, and hands out the captured batches (None, if there is none), for a loop of one's own."""
        self._land()
        assert self.putting is not None
        if not self.capsule.batches:
            self.putting.random(self.capsule.random)
            yield None
        for captured in self.capsule.batches:
            self._latest, batch = captured, self.putting.unpacker.value(captured.value)
            self.putting.random(captured.random)
            yield batch

    # Landing.

    def _may_land(self) -> bool:
        """Whether there is something to put the state into, and the captured step is not yet under way."""
        if self._trains or not self.capsule.batches:
            return False
        return self._gate.optimizers > 0 if self.capsule.optimizers else True

    def _land(self) -> None:
        self.putting = Putting(self.capsule, self._find())
        self.putting.weights()
        self.putting.training()
        sources = max((b.source for b in self.capsule.batches), default=-1) + 1
        self._queues = [deque(b for b in self.capsule.batches if b.source == i) for i in range(sources)]
        self.to_suppress = self.capsule.suppressed
        self._count()
        torch.clear_autocast_cache()
        self._landed()

    def _count(self) -> None:
        """The step under way is the captured one."""
        assert self.putting is not None
        captured, optimizers = self.capsule.steps, self.putting.optimizers
        done = {o: n for o, n in zip(optimizers, captured.done, strict=True) if o is not None}
        pairs = [(optimizers[a], optimizers[b]) for a, b in captured.follows]
        follows = [(a, b) for a, b in pairs if a is not None and b is not None]
        last = optimizers[captured.last] if captured.last is not None else None
        self._gate.steps.resume(captured.total, captured.manual, done, last, follows)
        past = self.capsule.report.history
        self._gate.go_on_from(replace(past, steps=tuple(s for s in past.steps if s.step < captured.current)))

    def _has_more(self, iterator: Any) -> bool:
        if self.putting is None:
            return False
        if all(ref() is not iterator for ref in self._iterators) and len(self._iterators) < len(self._queues):
            self._iterators.append(weakref.ref(iterator))
        return bool(self._queue(iterator))

    def _queue(self, iterator: Any) -> deque[BatchState]:
        return next((q for q, ref in zip(self._queues, self._iterators, strict=False) if ref() is iterator), deque())

    def _own(self, iterator: Any, fetch: Callable[[Any], Any]) -> Any:
        """The batch that the program would have got: the captured one is made after it."""
        try:
            return fetch(iterator)
        except StopIteration:
            raise  # whoever only looks through the data comes to its end
        except Exception as error:
            self.troubles.append(f"the program's own data could not be read ({type(error).__name__}: {error})")
            return None


def _versions(capsule: Capsule) -> list[str]:
    there = capsule.environment.get("torch")
    return [f"captured with torch {there}, here it is {torch.__version__}"] if there != torch.__version__ else []


def changed_sources(capsule: Capsule, program: str) -> list[str]:
    """Which of the captured sources are other ones here: found where they were, or beside the program."""
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
                found.append(f"{os.path.basename(name)} is not what it was when the step was captured")
            break
    return found
