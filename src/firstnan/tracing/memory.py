"""Which event wrote what lies in each piece of memory: storages, the views into them, and what was there before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from firstnan.records import Role
from firstnan.tensors.finite import is_finite, surely_finite

_MOST_EXACT = 1 << 22  # Elements; two views of a larger memory that interleave count as overlapping.


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a storage that one view covers."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, t: Tensor) -> Region | None:
        """None where the layout has no strides: then all of the memory is meant."""
        t = _local(t)
        if t.layout is not torch.strided:
            return None
        return cls(int(t.storage_offset()), tuple(t.shape), tuple(t.stride()), t.element_size())

    @property
    def end(self) -> int:
        return self.offset + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True)) + 1

    def indices(self) -> Tensor:
        return torch.arange(self.end).as_strided(self.size, self.stride, self.offset).flatten()


def overlap(a: Region | None, b: Region | None) -> bool:
    """Whether two views share an element."""
    if a is None or b is None or a == b:
        return True
    if a.itemsize != b.itemsize:
        return a.offset * a.itemsize < b.end * b.itemsize and b.offset * b.itemsize < a.end * a.itemsize
    if a.offset >= b.end or b.offset >= a.end:
        return False
    return max(a.end, b.end) > _MOST_EXACT or bool(torch.isin(a.indices(), b.indices()).any())


def covers(a: Region | None, b: Region | None) -> bool:
    """Whether every element of `b` lies in `a`, as far as that is known."""
    if a == b:
        return True
    if a is None or b is None or a.itemsize != b.itemsize or a.offset > b.offset or a.end < b.end:
        return False
    return max(a.end, b.end) <= _MOST_EXACT and bool(torch.isin(b.indices(), a.indices()).all())


class Memory:
    """Keeps, for each storage that was seen, who wrote to it last and who left something non-finite in it."""

    def __init__(self) -> None:
        self.roles: dict[int, tuple[Role, str]] = {}
        self.writer: dict[int, int] = {}
        """Memory -> the event that wrote to it last."""
        self._bad: dict[int, list[tuple[int, Region | None]]] = {}
        self._empty: dict[int, int] = {}
        """Memory that was allocated and not yet wholly written, and the event that allocated it."""
        self._outside: dict[int, bool] = {}
        """Memory from before the trace: whether it may hold something non-finite."""
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}
        self._next = 0

    def key(self, t: Tensor) -> int | None:
        """A number that belongs to the storage of this tensor alone and is never given twice."""
        if type(t) is not Tensor:
            t = _local(t)
        if t.layout is not torch.strided:
            values = _values(t)
            if values is None:
                return None
            t = values
        try:
            storage = t.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        address: int = storage._cdata
        known = self._alive.get(address)
        if known is None:
            # A weak reference keeps the address from being given to another storage.
            known = self._alive[address] = (self._next, StorageWeakRef(storage))
            self._next += 1
        return known[0]

    # What a tensor holds.

    def may_be_bad(self, key: int | None, t: Tensor) -> bool:
        """Whether something non-finite may lie in this memory; what comes from outside is looked at once."""
        if key is None or key in self._bad or key in self._empty:
            return True
        if key not in self.writer and key not in self._outside:
            # Of a part nothing follows for the rest.
            self._outside[key] = not (_is_whole(t) and (surely_finite(t) or is_finite(t)))
        return self._outside.get(key, False)

    def bad_writers(self, key: int | None, t: Tensor) -> tuple[int, ...]:
        """The events that left something non-finite where this tensor lies, oldest first."""
        if key is None:
            return ()
        bad = self._bad.get(key, ())
        if bad:
            region = Region.of(t)
            found = tuple(index for index, written in bad if overlap(written, region))
            if found:
                return found
        return (self._empty[key],) if key in self._empty else ()

    # What happens to it.

    def wrote(self, key: int, t: Tensor, index: int, bad: bool) -> None:
        self.writer[key] = index
        if key in self._bad or key in self._empty or key in self._outside:
            self._overwrote(key, t)
        if bad:
            self._bad.setdefault(key, []).append((index, Region.of(t)))

    def _overwrote(self, key: int, t: Tensor) -> None:
        if _is_whole(t):
            self._bad.pop(key, None)
            self._empty.pop(key, None)
            self._outside.pop(key, None)
        elif key in self._bad:
            region = Region.of(t)
            left = [(index, written) for index, written in self._bad[key] if not covers(region, written)]
            if left:
                self._bad[key] = left
            else:
                del self._bad[key]

    def allocated(self, key: int, index: int) -> None:
        """New memory that nobody wrote to."""
        self.writer[key] = self._empty[key] = index
        self._bad.pop(key, None)
        self._outside.pop(key, None)

    def arrived(self, t: Tensor) -> None:
        """Memory that comes from elsewhere, a worker process for one: it was not written here."""
        key = self.key(t)
        if key is not None:
            for table in (self.writer, self._bad, self._empty, self._outside):
                table.pop(key, None)

    # Forgetting.

    def roots(self) -> set[int]:
        """The events that left something non-finite, or nothing at all, in memory that is still in use."""
        gone = [address for address, (_, storage) in self._alive.items() if storage.expired()]
        for address in gone:
            key, _ = self._alive.pop(address)
            for table in (self.writer, self._bad, self._empty, self._outside):
                table.pop(key, None)
        return self.bad() | set(self._empty.values())

    def bad(self) -> set[int]:
        """The events that left something non-finite."""
        return {index for writers in self._bad.values() for index, _ in writers}

    def renumber(self, new: dict[int, int], in_use: set[int | None]) -> None:
        """Events have new numbers; those without one are gone."""
        # What a forgotten healthy event wrote was finite: as good as known from outside.
        self._outside = {k: False for k, w in self.writer.items() if w not in new} | self._outside
        self.writer = {k: new[w] for k, w in self.writer.items() if w in new}
        self._bad = {k: [(new[i], r) for i, r in writers] for k, writers in self._bad.items()}
        self._empty = {k: new[w] for k, w in self._empty.items()}
        kept = in_use | {key for key, _ in self._alive.values()}
        self.roles = {k: role for k, role in self.roles.items() if k in kept}


def _local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that lies in this process."""
    if type(t) is not Tensor:
        local = getattr(t, "_local_tensor", None)
        if isinstance(local, Tensor):
            return local
    return t


def _values(t: Tensor) -> Tensor | None:
    if t.layout is torch.sparse_coo:
        return t.detach()._values()
    try:
        return t.detach().values()
    except (NotImplementedError, RuntimeError):
        return None


def _is_whole(t: Tensor) -> bool:
    """Whether a view covers all of its storage."""
    t = _local(t)
    return t.layout is not torch.strided or t.numel() * t.element_size() >= t.untyped_storage().nbytes()
