"""The batches of a loader, and which step of a training each belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from firstnan.engine.handouts import Handouts
from firstnan.tensors.state import batch_size


@dataclass(frozen=True, slots=True)
class Fetched:
    index: int
    """Its position in the loader's order."""
    batch: Any
    indices: tuple[int, ...] | None = None
    size: int | None = None


class BatchOrder:
    """Assigns batch i of the loader to step i; after its last batch the loader starts over."""

    def __init__(self, loader: Iterable[Any], handouts: Handouts) -> None:
        self._loader, self._handouts = loader, handouts
        self._only: Iterator[Fetched] | None = self._pass() if isinstance(loader, Iterator) else None
        try:
            self.length: int | None = len(loader)  # type: ignore[arg-type]
        except TypeError:
            self.length = None

    @property
    def repeats(self) -> bool:
        """False for a generator, which yields each batch once."""
        return self._only is None

    @property
    def shuffles(self) -> bool:
        return isinstance(self._loader, DataLoader) and isinstance(self._loader.sampler, RandomSampler)

    def once(self) -> Iterator[Fetched]:
        """One pass over the loader."""
        return self._only or self._pass()

    def _pass(self) -> Iterator[Fetched]:
        iterator = iter(self._loader)
        index = 0
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"firstnan: raised while fetching batch {index} of the loader")
                raise
            yield Fetched(index, batch, self._indices(iterator, batch, index), batch_size(batch))
            index += 1

    def _indices(self, iterator: Any, batch: Any, index: int) -> tuple[int, ...] | None:
        if not isinstance(iterator, _BaseDataLoaderIter):
            return None
        latest = self._handouts.latest  # the session may have noted it when the loader was asked
        known = latest if latest is not None and latest.batch is batch else None
        indices = (known or self._handouts.fetched(iterator, batch, index)).indices
        if isinstance(indices, int):
            return (indices,)
        is_list = isinstance(indices, list | tuple) and all(isinstance(i, int) for i in indices)
        return tuple(indices) if is_list else None

    def first(self, most: int) -> list[Fetched]:
        """The first batches; a generator's are kept and yielded again later."""
        found = list(islice(self.once(), most))
        if self._only is not None:
            self._only = chain(found, self._only)
        return found

    def from_step(self, step: int) -> Iterator[Fetched]:
        """The batch of this step and all after it."""
        if self._only is not None:
            yield from (fetched for fetched in self._only if fetched.index >= step)
            return
        to_skip = step % self.length if self.length else step
        while True:
            empty = True
            for fetched in self._pass():
                empty = False
                if to_skip:
                    to_skip -= 1
                else:
                    yield fetched
            if empty:
                return
