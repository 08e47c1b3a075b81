"""The batches of the current step, kept to hand them out again with the state restored."""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from firstnan.observe.forked import kept_indices
from firstnan.observe.loaders import samples_of
from firstnan.records import Batch, TensorStat
from firstnan.tensors.finite import same_numbers, tensors_in
from firstnan.tensors.models import Slot
from firstnan.tensors.program_state import ProgramState
from firstnan.tensors.state import (
    Handout,
    RandomState,
    copy_batch,
    own_generators,
    restore_buffers,
    sample_count,
    tensor_versions,
    was_written,
)

# The most batches kept for one step; a step with more is replayed by a second run of the program.
_MOST_BATCHES = 64
_MOST_BYTES = 256 << 20
_MOST_COMPARED = 1 << 22
"""Elements up to which a batch is compared with what the step reads."""
_MOST_UPDATES = 16
_MOST_SEARCHED = 8
_MOST_HANDED_ON = 4
_TESTED, _EVERY = 16, 64  # Random state is compared before and after each of the first steps, then in every n-th step.
_LOOKED, _LOOKED_EVERY = (1, 2, 4, 8, 16), 1024  # steps in which the program's own generators are looked for
_BUFFER_BYTES = 256 << 20
SMALL_BUFFER = 1 << 16


_Known = tuple[Any, int, Any]
"""A batch, its index and the indices of its samples."""


@dataclass(slots=True)
class Loader:
    """The batches that one loader's iterator has handed out since the last update."""

    recent: list[Handout] = field(default_factory=list)
    count: int = 0
    pending_indices: deque[Any] = field(default_factory=deque)
    again: list[Handout] = field(default_factory=list)
    """The batches that a replay still has to hand out."""
    carried: _Known | None = None
    """The last batch that was handed out before the last update."""
    fetches: weakref.ref[Any] | None = None
    """The iterator of torch's loader that fetches for this one, such as Fabric's, which only hands batches on."""

    def is_full(self) -> bool:
        """Whether the current step has used more batches than are kept."""
        tensors = (t for h in self.recent for _, t in tensors_in(h.batch))
        return len(self.recent) >= _MOST_BATCHES or sum(t.numel() * t.element_size() for t in tensors) > _MOST_BYTES


@dataclass(frozen=True)
class FirstBatch:
    """The samples of a failing batch, to be the first ones that a loader over such a dataset fetches."""

    indices: tuple[int, ...]
    length: int
    """Of the dataset."""
    is_of_loop: bool = False
    """Whether the dataset is not that of the first step: the loop may have made it, from what it has done so far."""
    _seen: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet, compare=False)
    """Iterators of loaders that have fetched something."""

    def in_place_of(self, iterator: Any, chosen: Any) -> Any:
        """These samples for the first batch of a pass through the dataset; otherwise those that the sampler chose."""
        first = iterator not in self._seen and isinstance(chosen, list)
        self._seen.add(iterator)
        try:
            return list(self.indices) if first and len(iterator._dataset) == self.length else chosen
        except Exception:  # a dataset without a length
            return chosen


@dataclass(frozen=True)
class _Left:
    """What an iterator's batches were made of: an exception that leaves the loop ends the iterator."""

    dataset: Callable[[], Any]
    collate: Any
    workers: int

    @classmethod
    def of(cls, iterator: Any) -> _Left | None:
        found = getattr(iterator, "_dataset", None)
        try:
            dataset: Callable[[], Any] = weakref.ref(found)
        except TypeError:
            if not isinstance(found, list | tuple):  # these two have no weak references
                return None
            dataset = partial(_itself, found)
        return cls(dataset, getattr(iterator, "_collate_fn", None), getattr(iterator, "_num_workers", 0))

    def iterator(self) -> Any:
        """With the attributes of the iterator that is gone; None if the dataset is gone too."""
        dataset = self.dataset()
        if dataset is None:
            return None
        return SimpleNamespace(_dataset=dataset, _collate_fn=self.collate, _num_workers=self.workers)


class ReplayError(Exception):
    """The program asked for a batch that the replay does not have."""


class Handouts:
    """Remembers the batches of the current step and can hand them out again.

    `replays`: a step may be replayed, so the program's own random generators are looked for.
    """

    def __init__(self, *, replays: bool = True) -> None:
        self.replays = replays
        self.sources: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self.latest: Handout | None = None
        self.latest_iterator: weakref.ref[Any] | None = None
        self.modified = False
        self._latest_source: Loader | None = None
        self._left: _Left | None = None
        self._first_dataset: weakref.ref[Any] | None = None
        self.updates_per_batch = 1
        """The most updates that were made with one batch."""
        self.number = 0
        """How many batches were handed out."""
        self._draws = False
        """Whether steps draw random numbers."""
        self.testing: RandomState | None = None
        """The state at the start of a step whose end shows whether steps draw random numbers."""
        self._generators: list[Any] = []
        """Random generators of the program's own."""
        self.state = ProgramState()
        """What steps change in objects and variables, in a loop without a loader."""
        self._buffers: list[tuple[Slot, int]] = []
        self._kept: list[tuple[Slot, Tensor, Tensor]] = []
        self._kept_lists: tuple[list[Tensor], list[Tensor]] = [], []
        """Copies of buffers, with the buffers themselves."""
        self._kept_places: tuple[list[dict[str, Any]], list[str]] | None = None
        """Where the modules hold these buffers; None if one of them has no ordinary dict of them."""
        self._kept_at: int | None = None
        self._turns: deque[tuple[RandomState, list[tuple[Slot, Tensor, Tensor]]]] = deque(maxlen=2)
        """Random state and buffers at the ends of the last steps, in a loop without a loader."""
        self._last_random: RandomState | None = None
        self._before: _Known | None = None
        """The batch before the latest of the same loader, its index and its samples' indices."""
        self._earlier: tuple[int, int] | None = None
        """The last batch of the step before, of any loader: the number of updates then, and its index."""
        self._last_sampled: weakref.ref[Any] | None = None
        """The iterator of the loader that was last asked for a batch."""
        self.unclaimed: deque[tuple[weakref.ref[Any], Any, Any]] = deque(maxlen=_MOST_HANDED_ON)
        """What loaders of torch have fetched for another iterator: their iterators, the batches and the indices."""
        self._at_end: tuple[Handout, RandomState, list[tuple[Slot, Tensor, Tensor]]] | None = None
        """The last batch of a loader, with random state and buffers from when the loader was asked for one more."""
        self._repeats = False
        """Whether batches may come again, for a replay."""
        self.is_ahead = False
        """Whether the loader was asked for a batch more than the step uses."""
        self.in_parts = False
        """Whether backward is called more than once between two batches, as where those of a step are fetched first."""
        self._random_in_parts: tuple[int, deque[RandomState]] = 0, deque(maxlen=_MOST_BATCHES)
        """The number of batches at the last backward calls then, and the random states: the next parts begin there."""
        self._random_at_fetch: list[RandomState] = []
        """The random states when the batches of the failing step were fetched."""
        self._part: Handout | None = None
        """The batch that is to blame, where several were used in the failing step."""
        self._part_number = 0

    # While the program is healthy.

    def has_missing_values(self) -> bool:
        """Whether the latest batch itself holds NaNs."""
        found = tensors_in(self.latest.batch) if self.latest is not None else ()
        return any(t.is_floating_point() and bool(t.isnan().any()) for _, t in found)

    def fetched(self, iterator: Any, batch: Any, updates: int) -> Handout:
        """A batch is handed out for training, after `updates` updates."""
        if self._next_as_usual(iterator, batch, updates):
            assert self.latest is not None
            return self.latest
        source = self._source(iterator, fetched=1)
        if not updates:
            with contextlib.suppress(AttributeError, TypeError):
                self._first_dataset = weakref.ref(iterator._dataset)
        if self.latest is not None:
            self._count_updates(updates - self.latest.updates)
        if source.recent and (source.recent[-1].updates != updates or source.is_full()):
            if self.number <= _TESTED or self.number % _EVERY == 0:
                self._look_for_changes(source.recent[-1])
            source.carried = _known(source.recent[-1])
            source.recent = []
        indices = source.pending_indices.popleft() if source.pending_indices else None
        handout = Handout(
            copy_batch(batch) if self.modified else batch, source.count, updates, self._random(),
            self._step_buffers(updates) if self._buffers else [],
            [] if self.modified else tensor_versions(batch), indices,
        )  # fmt: skip
        source.recent.append(handout)
        source.count += 1
        if self.latest is not None and source is self._latest_source:
            self._before = _known(self.latest)
        if self.latest is not None and self.latest.updates != updates:
            self._earlier = self.latest.updates, self.latest.index
        self.latest, self._at_end, self._part = handout, None, None
        if source is not self._latest_source:
            self.latest_iterator, self._latest_source = weakref.ref(iterator), source
            self._left = _Left.of(iterator)
        return handout

    def _next_as_usual(self, iterator: Any, batch: Any, updates: int) -> bool:
        """The fast path for one batch a step from the same loader: reuses one object for all of them.

        Not used if something is tested in this step, or if batches are copied.
        """
        latest, source, number = self.latest, self._latest_source, self.number
        if number <= _TESTED or not 0 < number % _EVERY < _EVERY - 1 or self.modified:
            return False
        if latest is None or source is None or latest.updates == updates or len(source.recent) != 1:
            return False
        if self.latest_iterator is None or self.latest_iterator() is not iterator:
            return False
        self._before = latest.batch, latest.index, latest.indices
        self._earlier = latest.updates, latest.index
        latest.batch, latest.index, latest.updates = batch, source.count, updates
        latest.versions, latest.pristine = tensor_versions(batch), None
        latest.indices = source.pending_indices.popleft() if source.pending_indices else None
        if self._draws:
            latest.random = self._last_random = RandomState.now(self._generators)
        if self._buffers:
            latest.buffers = self._step_buffers(updates)
        source.count += 1
        self.number += 1
        self._at_end = self._part = None
        return True

    def exhausted(self, iterator: Any, updates: int) -> None:
        """The loader was asked for one batch more than it has: where batches are fetched ahead, a step begins here."""
        if self.latest_iterator is not None and self.latest_iterator() is iterator and self.latest is not None:
            buffers = self._step_buffers(updates) if self._buffers else []
            self._at_end = self.latest, RandomState.now(self._generators), buffers

    def part_ended(self) -> None:
        """The program calls backward, and may do so again before it fetches another batch."""
        self.in_parts = True
        if self._draws:
            if self._random_in_parts[0] != self.number:
                self._random_in_parts = self.number, deque(maxlen=_MOST_BATCHES)
            self._random_in_parts[1].append(RandomState.now(self._generators))

    def body_ended(self) -> None:
        """The program is done with the batch: checks whether it drew random numbers."""
        if self.testing is not None:
            self._draws = self._draws or self.testing != RandomState.now(self._generators)
            self.testing = None

    def _random(self) -> RandomState:
        """The state of the generators; an older copy if steps draw no random numbers."""
        self.number += 1
        if self.replays and (self.number in _LOOKED or self.number % _LOOKED_EVERY == 0):
            self._generators = own_generators(sys._getframe(2))
            if self.latest is None:
                self.state.look(sys._getframe(2), self.number)
        last = self._last_random
        if last is not None and self._draws_nothing():
            return last
        now = self._last_random = RandomState.now(self._generators)
        self.testing = None if self._draws else now
        return now

    def _draws_nothing(self) -> bool:
        """Whether steps draw no random numbers, as far as is known; this one is not tested."""
        return not self._draws and self.number > _TESTED and self.number % _EVERY != 0

    def random_before_call(self) -> RandomState:
        """The state of the generators of Python, numpy and torch; an older copy if steps draw no random numbers."""
        last = self._last_random
        return last if last is not None and self._draws_nothing() else RandomState.now()

    def training_begins(self) -> None:
        """No step was made yet: the first one begins here, as far as is known."""
        self._generators = own_generators(sys._getframe(1))
        self._turns.clear()
        self._turns.append((RandomState.now(self._generators), []))

    def random_now(self) -> RandomState:
        """The state of all generators that are known."""
        return RandomState.now(self._generators)

    def turn_ended(self, updates: int) -> None:
        """A step has ended in a loop without a loader: the next one begins."""
        if self.testing is not None:
            self.body_ended()
        if self.state.keeps:
            self.state.keep(sys._getframe(1))
        self._turns.append((self._random(), self._step_buffers(updates) if self._buffers else []))

    def _beginning(self, earlier: int) -> tuple[RandomState, list[tuple[Slot, Tensor, Tensor]]] | None:
        """Random state and buffers from the start of the step, or from so many steps earlier."""
        if self.blamed is not None:
            return self.blamed.random, self.blamed.buffers
        return self._turns[-1 - earlier] if len(self._turns) > earlier else None

    def has_drawn(self) -> bool:
        """Whether random numbers were drawn since the step began, as far as is known."""
        beginning = self._beginning(0)
        return beginning is not None and beginning[0] != self.random_now()

    def restore_turn(self, earlier: int, *, random: bool) -> None:
        """Restores buffers and, if wanted, the random state from the start of the step, or so many steps earlier."""
        beginning = self._beginning(earlier)
        if beginning is None:
            return
        if random:
            beginning[0].restore()
        restore_buffers(beginning[1])

    def passed(self, iterator: Any) -> None:
        """A batch that is not for training was handed out."""
        source = self._source(iterator, fetched=1)
        source.count += 1
        if source.pending_indices:
            source.pending_indices.popleft()

    def handed_on(self, iterator: Any, batch: Any) -> None:
        """A loader of torch has fetched a batch for another iterator, which hands it out now or later."""
        source = self._source(iterator, fetched=1)
        source.count += 1
        indices = source.pending_indices.popleft() if source.pending_indices else None
        self.unclaimed.append((weakref.ref(iterator), batch, indices))

    def recognise(self, iterator: Any, batch: Any) -> None:
        """Looks for the batch that this iterator is about to hand out among those that were fetched for it."""
        if len(self.unclaimed) == 1 and self.unclaimed[0][1] is batch:  # the usual case, kept fast
            source = self._source(iterator, fetched=1)
            source.fetches, _, indices = self.unclaimed.popleft()
            source.pending_indices.append(indices)
            return
        fetched = [one for _, one, _ in self.unclaimed]
        found = (
            0 if fetched[0] is batch else min(_held_alone(fetched, [batch]), default=None)
        )  # mostly nothing is done to it
        if found is None or any(fetches is not self.unclaimed[0][0] for fetches, _, _ in self.unclaimed):
            self.unclaimed.clear()  # another batch, or one that is made of several
            return
        source = self._source(iterator, fetched=1)
        source.fetches, _, indices = self.unclaimed[found]
        source.pending_indices.append(indices)
        for _ in range(found + 1):
            self.unclaimed.popleft()

    def _source(self, iterator: Any, *, fetched: int = 0, chosen: int = 0) -> Loader:
        """What is known of a loader's iterator. It may have begun before anybody looked.

        `fetched`, `chosen`: how many of the last batches and of the last indices are about to be counted.
        """
        if self.latest_iterator is not None and self.latest_iterator() is iterator and self._latest_source is not None:
            return self._latest_source
        source, count = self.sources.get(iterator), max(getattr(iterator, "_num_yielded", 0) - fetched, 0)
        if source is None:
            source = self.sources[iterator] = Loader(count=count)
            source.pending_indices.extend(kept_indices(iterator, count, chosen))
        elif fetched and source.count < count:  # a forked process fetches its first batches before it is seen to train
            for _ in range(min(count - source.count, len(source.pending_indices))):
                source.pending_indices.popleft()
            source.count = count
        return source

    def epoch_begins(self, iterator: Any) -> None:
        """Counts batches from 0 again: persistent workers keep their iterator over all epochs."""
        source = self._source(iterator)
        source.count = 0
        source.pending_indices.clear()

    def sampled(self, iterator: Any, indices: Any) -> None:
        """The sampler chose these indices for a future batch; batches arrive in the order in which they were chosen."""
        self._last_sampled = weakref.ref(iterator)
        if getattr(iterator, "_in_order", True):
            source = self._source(iterator, chosen=1)
            if type(indices) is int:
                indices = samples_of(iterator, source.count + len(source.pending_indices), indices)
            source.pending_indices.append(indices)

    def position(self, *, training: bool = True) -> int | None:
        """The index of the batch at hand, also if a loader of torch was used directly.

        Not `training`: the batch of another loader than that of the training steps.
        """
        if self.latest is not None and training:
            return self.latest.index
        iterator = self._last_sampled() if self._last_sampled is not None else None
        if self.latest_iterator is not None and self.latest_iterator() is iterator:
            return None
        given: int = getattr(iterator, "_num_yielded", 0)
        return given - 1 if given else None

    def _look_for_changes(self, handout: Handout) -> None:
        # If the program writes into its batches, only a copy can be handed out again.
        self.modified = self.modified or was_written(handout)

    def watch_buffers(self, slots: list[Slot]) -> None:
        self._buffers = [(slot, b._version) for slot in slots if (b := slot.tensor()) is not None]

    def drop_buffers(self) -> None:
        """The step begins with the next batch, not before."""
        self._kept = []

    def _step_buffers(self, updates: int) -> list[tuple[Slot, Tensor, Tensor]]:
        """Copies of the buffers at the start of a step, in the same memory every step."""
        if updates == self._kept_at and self._kept:
            return self._kept
        self._kept_at = updates
        if not self._kept or updates % _TESTED == 0 or not self._are_in_place():
            self._kept = self.copied_buffers()
            self._kept_lists = [copy for *_, copy in self._kept], [buffer for _, buffer, _ in self._kept]
            holders = [slot.holder() for slot, _, _ in self._kept]
            known = [holder for holder in holders if holder is not None]
            self._kept_places = (known, [s.name for s, _, _ in self._kept]) if len(known) == len(holders) else None
        else:
            recording = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)  # a context manager costs as much as the copies
            try:
                torch._foreach_copy_(*self._kept_lists)
            finally:
                torch._C._set_grad_enabled(recording)
        return self._kept

    def _are_in_place(self) -> bool:
        """Whether the modules still hold the buffers that are kept."""
        if self._kept_places is None:
            return all(slot.tensor() is buffer for slot, buffer, _ in self._kept)
        return all(map(operator.is_, map(dict.get, *self._kept_places), self._kept_lists[1]))

    def copied_buffers(self) -> list[tuple[Slot, Tensor, Tensor]]:
        """Copies of the buffers that a step may change: all small ones, and large ones that have changed before."""
        budget, copies = _BUFFER_BYTES, []
        for slot, version in self._buffers:
            buffer = slot.tensor()
            if buffer is None:
                continue
            size = buffer.numel() * buffer.element_size()
            # Batch norm writes its running statistics without increasing their version.
            if size <= budget and (size <= SMALL_BUFFER or buffer._version != version):
                budget -= size
                copies.append((slot, buffer, buffer.detach().clone()))
        return copies

    def of_this_step(self) -> list[list[Handout]]:
        """The batches of the current step, by the loaders they came from."""
        latest, sources = self.latest, list(self.sources.values())
        if self._latest_source is not None and all(s is not self._latest_source for s in sources):
            sources.append(self._latest_source)  # its iterator is gone
        steps = [[h for h in s.recent if latest is not None and h.updates == latest.updates] for s in sources]
        return [step for step in steps if step]

    @property
    def batches_of_step(self) -> int:
        return sum(map(len, self.of_this_step()))

    def _count_updates(self, made: int) -> None:
        """So many updates were made with one batch."""
        self.updates_per_batch = max(self.updates_per_batch, min(made, _MOST_UPDATES))

    def are_left(self, updates: int) -> bool:
        """Whether more updates were made since the last batch than ever with one: steps get their data elsewhere.

        `itertools.cycle(loader)` asks the loader in its first pass only, and a second stage may use none. The first
        batch may be meant for all steps.
        """
        return self.latest is not None and self.number > 1 and updates - self.latest.updates > self.updates_per_batch

    def leave(self, updates: int) -> None:
        """The loop does not ask the loaders any more: from here on it is one without a loader."""
        if self.latest is not None:
            self._count_updates(updates - self.latest.updates)  # should it ask again: they were made with one batch
        self.forget()
        self._turns.clear()
        self.number = 0

    def forget(self) -> None:
        """Drops every batch."""
        self.sources.clear()
        self._generators, self.state = [], ProgramState()
        self._before = self._earlier = self._part = self._left = None
        self.unclaimed.clear()
        self.latest = self.latest_iterator = self._latest_source = None

    # After a trip.

    def settle_on_used(self, used: Iterable[Any], updates: int, needed: Callable[[], Iterable[Any]] = tuple) -> bool:
        """The step reads these values: if they are an earlier batch than the latest, that is the step's batch.

        Some loaders fetch a batch ahead, to know which is the last one, and some loops all batches of a step. False if
        none is seen in use. It is the step after so many updates. `needed`: those values that the failing statement
        depends on, for a loop that has its next batch in a variable too.
        """
        latest = self.latest
        if latest is None:
            return False
        self._random_at_fetch = [h.random for h in self._fetched_in_step()]
        if self._at_end is not None and self._at_end[0] is latest:
            _, latest.random, latest.buffers = self._at_end
        used, known = list(used), self._newest_first(latest)
        batches, held = [batch for batch, _, _ in known], {id(value) for value in used}
        quick = [not held.isdisjoint(_quickly_known(batch)) for batch in batches]
        if quick[0] and not any(quick[1:]):  # the usual case, and the rest takes longer than a step
            self._begin_at_part(latest)
            return True
        several = _held_alone(batches, used)
        if len(several) > 1 and len(alone := _held_alone(batches, list(needed()))) == 1:
            several = alone
        found = min(several, default=0 if quick[0] else None)
        if found:  # if None, it is not seen at all
            self.is_ahead = True
            latest.batch, latest.index, latest.indices = known[found]
            latest.versions, latest.pristine = tensor_versions(latest.batch), None
        self._begin_at_part(latest)
        if found is None and self.are_left(updates + 1):
            self.leave(updates)
        return found is not None

    def settle_on_read(self, read: Sequence[TensorStat]) -> Handout | None:
        """The latest batch as an earlier one, if the failing operator has read numbers of that one and none of this.

        A program may keep the batches that it has fetched ahead where no variable is seen to hold them.
        """
        latest = self.latest
        if latest is None or self._part is not None or self.batches_of_step > 1:
            return None
        known = self._newest_first(latest)
        holds = [i for i, (batch, _, _) in enumerate(known) if _has_numbers(batch, read)]
        if len(holds) != 1 or not holds[0]:
            return None
        latest.batch, latest.index, latest.indices = known[holds[0]]
        latest.versions, latest.pristine, self.is_ahead = tensor_versions(latest.batch), None, True
        return latest

    def _begin_at_part(self, latest: Handout) -> None:
        """A batch that was fetched together with others is used after the backward call of the one before it."""
        together = self.is_ahead or (self._latest_source is not None and len(self._latest_source.recent) > 1)
        number, states = self._random_in_parts
        if together and states and number == self.number:
            latest.random = states[-1]

    @property
    def blamed(self) -> Handout | None:
        """The batch of the failing step that is to blame; the latest one unless another was found."""
        return self._part or self.latest

    @property
    def batches_since_blamed(self) -> int:
        """How many batches of the failing step were used after the one that is to blame."""
        return self.latest.index - self._part.index if self._part is not None and self.latest is not None else 0

    def blame(self, part: int, backwards: int) -> None:
        """In a step with so many backward calls, the gradients became non-finite with its batch number `part`."""
        parts = self.parts(backwards)
        self._part, self._part_number = parts[part] if part < len(parts) > 1 else None, part

    @property
    def part(self) -> int | None:
        """The number of the batch that was blamed among those of its step; None if none was."""
        return self._part_number if self._part is not None else None

    def _fetched_in_step(self) -> list[Handout]:
        latest, source = self.latest, self._latest_source
        return [h for h in source.recent if latest is not None and h.updates == latest.updates] if source else []

    def parts(self, backwards: int) -> list[Handout]:
        """The batches that a step with so many backward calls has used, in their order; empty if they are not known.

        A loader that fetches ahead has fetched the first of them before the last update.
        """
        latest, source, fetched = self.latest, self._latest_source, self._fetched_in_step()
        if latest is None or source is None or not fetched or len(self.of_this_step()) != 1:
            return []
        count, states = len(fetched), list(self._random_at_fetch)
        if self._at_end is not None and self._at_end[0] is latest and backwards == count + 1:
            count, states = count + 1, [*states, self._at_end[1]]
        if backwards < count or backwards % count or len(states) != count:
            return []
        number, later = self._random_in_parts
        if self.in_parts and number == self.number and len(later) >= backwards:
            each = backwards // count
            states = [states[len(fetched) - 1], *(later[i - backwards - 1] for i in range(each, backwards, each))]
        known = {one[1]: one for one in (source.carried, *map(_known, fetched)) if one is not None}
        used = [known.get(index) for index in range(latest.index - count + 1, latest.index + 1)]
        return (
            [
                Handout(one[0], one[1], latest.updates, random, fetched[0].buffers, tensor_versions(one[0]), one[2])
                for one, random in zip(used, states, strict=True)
                if one is not None
            ]
            if None not in used
            else []
        )

    def _newest_first(self, latest: Handout) -> list[_Known]:
        """What the same loader has handed out for this step, and the last one before."""
        source = self._latest_source
        step = [_known(h) for h in reversed(source.recent) if h is not latest] if source is not None else []
        others = [*step, self._before, source.carried if source is not None else None]
        found = {latest.index: _known(latest)}
        for one in others:
            if one is not None and one[1] < latest.index:  # otherwise of the loader before
                found.setdefault(one[1], one)
        return sorted(found.values(), key=lambda one: -one[1])

    def possible(self, updates: int) -> bool:
        """Whether the batch that the current step began with is still available."""
        latest = self.latest
        if self.is_ahead:
            return False
        return latest is not None and 0 <= updates - latest.updates <= _MOST_UPDATES and not was_written(latest)

    def begin(self, iterator: Any, updates: int) -> int:
        """Restores random state and buffers; returns the number of updates of this step already in the weights."""
        source = self.sources.get(iterator)
        latest = self.latest
        if latest is None or source is None or not source.recent or source.recent[-1].updates != latest.updates:
            raise ReplayError
        first = source.recent[0]
        self._repeats = True
        for s in self.sources.values():
            s.again = [h for h in s.recent if h.updates == latest.updates]
            for h in s.again:
                h.pristine = copy_batch(h.batch) if h.pristine is None else h.pristine
        first.random.restore()
        restore_buffers(first.buffers)
        torch.clear_autocast_cache()
        return updates - latest.updates

    def hand_out_again(self) -> None:
        """The batches of the current step come again, to whoever asks for them."""
        latest = self.latest
        self._repeats = True
        for source in self.sources.values():
            source.again = [h for h in source.recent if latest is not None and h.updates == latest.updates]

    def latest_first(self) -> list[Handout]:
        """The batches of the current step, the latest first; only that one if there are many."""
        first = self.blamed
        if first is None:
            return []
        others = [h for step in self.of_this_step() for h in step if h is not first]
        if self._part is not None:  # the same batch, as it was handed out
            first = next((h for h in others if h.index == first.index), first)
            return [first]
        return [first, *others] if len(others) < _MOST_SEARCHED else [first]

    def previous(self) -> Any:
        """The batch before the latest of the same loader; None if it is not known."""
        known = self._before is not None and not self.is_ahead and self._part is None
        return self._before[0] if known and self._before is not None else None

    def batch_after(self, updates: int) -> Batch | None:
        """What is known of the batch that was handed out after so many updates, if that was in the step before."""
        if self._earlier is None or self._earlier[0] != updates or self.is_ahead:
            return None
        index, before = self._earlier[1], self._before
        known = before is not None and before[1] == index
        return Batch(index, sample_count(before[0], before[2]) if known and before is not None else None)

    def first_buffers(self) -> list[tuple[Slot, Tensor, Tensor]]:
        """The buffers at the beginning of the current step, which may have used several batches."""
        step = self.of_this_step()
        return step[0][0].buffers if step else []

    def knows(self, iterator: Any) -> bool:
        return iterator in self.sources

    def iterator_of(self, handout: Handout) -> Any:
        """The iterator that handed out this batch; None if it is gone."""
        if handout is self._part and self.latest_iterator is not None:
            return self.latest_iterator()
        return next((it for it, s in list(self.sources.items()) if any(h is handout for h in s.recent)), None)

    def fetched_by(self, handout: Handout) -> Any:
        """The iterator of the loader that has fetched this batch; the one that handed it out may be another."""
        iterator = self.iterator_of(handout)
        if iterator is None and handout is self.latest and self._left is not None:
            return self._left.iterator()
        source = self.sources.get(iterator) if iterator is not None else None
        fetches = source.fetches() if source is not None and source.fetches is not None else None
        return iterator if fetches is None else fetches

    def first_batch(self) -> FirstBatch | None:
        """The samples of the latest batch, if it came from a dataset that gives any sample at any time."""
        blamed = self.blamed
        dataset = getattr(self.fetched_by(blamed), "_dataset", None) if blamed is not None else None
        if blamed is None or dataset is None or not isinstance(blamed.indices, list):
            return None
        try:
            is_of_loop = self._first_dataset is not None and self._first_dataset() is not dataset
            return FirstBatch(tuple(int(i) for i in blamed.indices), len(dataset), is_of_loop)
        except Exception:  # other keys than numbers, or no length
            return None

    def requests(self, iterator: Any) -> object:
        """A value that changes whenever this iterator is asked for a batch."""
        source = self.sources.get(iterator) if iterator is not None else None
        return source is not None and source.count, id(self._at_end)

    def stop_again(self) -> None:
        """Ends a replay: its remaining batches are not handed out."""
        self._repeats = False
        for source in self.sources.values():
            source.again = []

    @property
    def more_to_come(self) -> bool:
        """Whether a replay has batches left; a loop that counts its batches may then try to update too early."""
        return any(source.again for source in self.sources.values())

    def has_more(self, iterator: Any) -> bool:
        """Whether this loader has batches of a replay left to hand out."""
        source = self.sources.get(iterator) if self._repeats else None
        return source is not None and bool(source.again)

    def again(self, iterator: Any) -> Handout:
        return self.sources[iterator].again.pop(0)


def _itself(dataset: Any) -> Any:
    return dataset


def _known(handout: Handout) -> _Known:
    return handout.batch, handout.index, handout.indices


def _has_numbers(batch: Any, read: Sequence[TensorStat]) -> bool:
    """Whether a tensor of the batch has the form and the range of one that was read."""
    forms = {(stat.shape, stat.dtype) for stat in read}
    for _, t in tensors_in(batch):
        form = tuple(t.shape), str(t.dtype).removeprefix("torch.")
        if t.is_floating_point() and form in forms and 1 < t.numel() <= _MOST_COMPARED:
            low, high = (float(bound) for bound in t.detach().aminmax())
            if low < high and any((s.shape, s.dtype, s.min, s.max) == (*form, low, high) for s in read):
                return True
    return False


def _quickly_known(batch: Any) -> set[int]:
    members = batch if isinstance(batch, list | tuple) else [batch]
    return {id(batch), *(id(t) for t in members if isinstance(t, Tensor))}


def _held_alone(batches: list[Any], used: list[Any]) -> set[int]:
    """Which of these batches the variables hold: those that a variable holds alone, if there are such."""
    members = [{id(t) for _, t in tensors_in(batch)} for batch in batches]
    held = [{id(t): t for _, t in tensors_in(value, depth=2)} for value in used]
    touched = [{i for i, own in enumerate(members) if not own.isdisjoint(read)} for read in held]
    if not any(touched):  # the loader may have copied it
        copies = [[t for t in read.values() if not t.requires_grad] for read in held]
        counts = [[_copied(batch, read) for batch in batches] for read in copies]
        most = max((max(one) for one in counts), default=0)  # many batches have the same labels, or a mask of ones
        touched = [{i for i, n in enumerate(one) if n == most > 0} for one in counts]
    return {i for one in touched if len(one) == 1 for i in one} or {i for one in touched for i in one}


def _copied(batch: Any, used: list[Tensor]) -> int:
    """How many tensors of the batch are among these with the same numbers."""
    members = [t for _, t in tensors_in(batch) if 1 < t.numel() <= _MOST_COMPARED and t.is_cpu]
    return sum(any(o.is_cpu and same_numbers(t, o) for o in used) for t in members)
