"""Hands a failing batch out once more, with everything put back as it was when it was first handed out."""

from __future__ import annotations

import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from firstnan.finite import tensors_in
from firstnan.names import Slot

# What is kept of one step; a step that takes more is replayed by a second run of the program.
_MOST_BATCHES = 64
_MOST_BYTES = 256 << 20
_MOST_UPDATES = 16
_BUFFER_BYTES = 256 << 20
SMALL_BUFFER = 1 << 16


@dataclass(slots=True)
class RandomState:
    """All random generators a step may draw from."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> RandomState:
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(random.getstate(), numpy.random.get_state() if numpy else None, torch.get_rng_state(), cuda)

    def put_back(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@dataclass(slots=True)
class Handout:
    """One batch as it was handed to the program."""

    batch: Any
    index: int
    updates: int
    """How many optimizer steps were done by then."""
    random: RandomState
    buffers: list[tuple[Slot, Tensor, Tensor]]
    versions: list[tuple[Any, int]]
    indices: Any = None


@dataclass(slots=True)
class Source:
    """What one loader's iterator handed out since the last update."""

    recent: list[Handout] = field(default_factory=list)
    count: int = 0
    pending_indices: deque[Any] = field(default_factory=deque)
    again: Iterator[Handout] | None = None

    def is_full(self) -> bool:
        """Whether the step under way has taken more batches than may be kept."""
        tensors = (t for h in self.recent for _, t in tensors_in(h.batch))
        return len(self.recent) >= _MOST_BATCHES or sum(t.numel() * t.element_size() for t in tensors) > _MOST_BYTES


class ReplayError(Exception):
    """The program asked for something that the replay does not have."""


class Replayer:
    """Remembers the batches of the step under way and can give them out again."""

    def __init__(self) -> None:
        self.sources: weakref.WeakKeyDictionary[Any, Source] = weakref.WeakKeyDictionary()
        self.replaying = False
        self.latest: Handout | None = None
        self.latest_iterator: weakref.ref[Any] | None = None
        self.modified = False
        self._buffers: list[tuple[Slot, int]] = []

    # While the program is healthy.

    def fetched(self, iterator: Any, batch: Any, updates: int) -> Handout:
        source = self._source(iterator)
        if source.recent and (source.recent[-1].updates != updates or source.is_full()):
            self._look_for_changes(source.recent[-1])
            source.recent = []
        indices = source.pending_indices.popleft() if source.pending_indices else None
        handout = Handout(
            self._kept(batch), source.count, updates, RandomState.now(), self._copied_buffers(),
            [(weakref.ref(t), t._version) for _, t in tensors_in(batch)], indices,
        )  # fmt: skip
        source.recent.append(handout)
        source.count += 1
        self.latest, self.latest_iterator = handout, weakref.ref(iterator)
        return handout

    def passed(self, iterator: Any) -> None:
        """A batch was handed out that is not for training."""
        source = self._source(iterator)
        source.count += 1
        if source.pending_indices:
            source.pending_indices.popleft()

    def _source(self, iterator: Any) -> Source:
        source = self.sources.get(iterator)
        if source is None:
            source = self.sources[iterator] = Source()
        return source

    def epoch_begins(self, iterator: Any) -> None:
        self._source(iterator).pending_indices.clear()

    def sampled(self, iterator: Any, indices: Any) -> None:
        """The sampler chose these for a batch to come: batches arrive in the order in which they were chosen."""
        if getattr(iterator, "_in_order", True):
            self._source(iterator).pending_indices.append(indices)

    def _kept(self, batch: Any) -> Any:
        # Where the program writes into its batches, only a copy can be handed out again.
        return copied(batch) if self.modified else batch

    def _look_for_changes(self, handout: Handout) -> None:
        if not self.modified:
            self.modified = any((t := ref()) is not None and t._version != v for ref, v in handout.versions)

    def watch_buffers(self, slots: list[Slot]) -> None:
        self._buffers = [(slot, b._version) for slot in slots if (b := slot.tensor()) is not None]

    def _copied_buffers(self) -> list[tuple[Slot, Tensor, Tensor]]:
        """Copies of the buffers that a step may change: all small ones, and large ones that were seen to change."""
        budget, copies = _BUFFER_BYTES, []
        for slot, version in self._buffers:
            buffer = slot.tensor()
            if buffer is None:
                continue
            size = buffer.numel() * buffer.element_size()
            # Batch norm writes its running statistics without counting a version.
            if size <= budget and (size <= SMALL_BUFFER or buffer._version != version):
                budget -= size
                copies.append((slot, buffer, buffer.detach().clone()))
        return copies

    # After a trip.

    def possible(self, updates: int) -> bool:
        """Whether the step under way began with a batch that is still here."""
        latest = self.latest
        return (
            latest is not None
            and 0 <= updates - latest.updates <= _MOST_UPDATES
            and not any((t := ref()) is not None and t._version != v for ref, v in latest.versions if not self.modified)
        )

    def begin(self, iterator: Any, updates: int) -> int:
        """Puts random state and buffers back; returns how many updates of this step are already in the weights."""
        source = self.sources.get(iterator)
        latest = self.latest
        if latest is None or source is None or not source.recent or source.recent[-1].updates != latest.updates:
            raise ReplayError
        first = source.recent[0]
        for s in self.sources.values():
            s.again = iter([h for h in s.recent if h.updates == latest.updates])
        first.random.put_back()
        with torch.no_grad():
            for slot, buffer, value in first.buffers:
                slot.put(buffer, value)
        torch.clear_autocast_cache()
        self.replaying = True
        return updates - latest.updates

    def again(self, iterator: Any) -> Any:
        source = self.sources.get(iterator)
        handout = next(source.again, None) if source is not None and source.again is not None else None
        if handout is None:
            raise ReplayError
        return handout.batch


def copied(batch: Any) -> Any:
    """The batch with every tensor cloned, containers kept."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) in (list, tuple):
        return type(batch)(copied(b) for b in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(copied(b) for b in batch))
    if isinstance(batch, dict):
        try:
            clone: Callable[..., Any] = type(batch)
            return clone({k: copied(v) for k, v in batch.items()})
        except TypeError:
            return batch
    return batch


def batch_size(batch: Any) -> int | None:
    """The common first dimension of the tensors in a batch."""
    sizes = [t.shape[0] for _, t in tensors_in(batch) if t.dim()]
    return max(set(sizes), key=sizes.count) if sizes else None
