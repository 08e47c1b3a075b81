"""Tracks which event wrote each part of each storage, view by view, and what was there before the trace."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.nn import Parameter

from firstnan.records import Role
from firstnan.tensors.finite import is_finite, is_from_collective, nested_values, surely_finite

_STRIDED = torch.strided
_MAX_EXACT = 1 << 22  # Elements; in a larger storage, views that interleave count as overlapping.


@dataclass(frozen=True, slots=True)
class Region:
    """The elements of a storage that a view covers."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, t: Tensor) -> Region | None:
        """None if the layout has no strides; that stands for the whole storage."""
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
    return max(a.end, b.end) > _MAX_EXACT or bool(torch.isin(a.indices(), b.indices()).any())


def covers(a: Region | None, b: Region | None) -> bool:
    """Whether every element of `b` is certain to lie in `a`."""
    if a == b:
        return True
    if a is None or b is None or a.itemsize != b.itemsize or a.offset > b.offset or a.end < b.end:
        return False
    return max(a.end, b.end) <= _MAX_EXACT and bool(torch.isin(b.indices(), a.indices()).all())


_MOST_FREED = 256
"""So many storages are forgotten together."""


class _StorageRef(weakref.ref[UntypedStorage]):
    """A weak reference to a storage, which torch represents by one Python object as long as it exists.

    Not torch's own weak reference: that keeps a small block of the C++ heap where a large tensor was, and the next
    large tensor does not fit there any more. A backward pass of thousands of operators then takes gigabytes.
    """

    __slots__ = ("address", "key")
    address: int
    key: int


class Memory:
    """For each storage seen: which event wrote to it last, and which events left non-finite values in it."""

    def __init__(self) -> None:
        self.roles: dict[int, tuple[Role, str]] = {}
        self.parameters: dict[int, Tensor] = {}
        """Storage key -> the weights in it, whose range is read when there is something to explain."""
        self.writer: dict[int, int] = {}
        """Storage key -> the event that wrote to it last."""
        self._bad: dict[int, list[tuple[int, Region | None]]] = {}
        self._unwritten: dict[int, int] = {}
        """Storages allocated but not yet completely written -> the event that allocated them."""
        self._outside: dict[int, bool] = {}
        """Storages from before the trace -> whether they may hold non-finite values."""
        self._storages: dict[int, _StorageRef] = {}
        """By address."""
        self._freed: deque[_StorageRef] = deque()
        """Storages freed by any thread and not forgotten yet; their addresses may be in use again."""
        self.from_elsewhere: set[int] = set()
        """Storages that hold results of autograd, but of no operator that was recorded."""
        self._next_key = 0

    def key(self, t: Tensor) -> int | None:
        """A number for this tensor's storage that is never given to another one."""
        kind = type(t)
        if (kind is not Tensor and kind is not Parameter) or t.layout is not _STRIDED or t.is_nested:
            plain = _plain_part(t)
            if plain is None:
                return None
            t = plain
        try:
            storage = t.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        address: int = storage._cdata
        known = self._storages.get(address)
        if known is None or known() is None:
            if len(self._freed) >= _MOST_FREED:
                self._forget_freed()
            known = self._storages[address] = _StorageRef(storage, self._freed.append)
            known.address, known.key = address, self._next_key
            self._next_key += 1
        return known.key

    def _forget_freed(self) -> None:
        while self._freed:
            gone = self._freed.popleft()
            if self._storages.get(gone.address) is gone:
                del self._storages[gone.address]
            key = gone.key
            self.writer.pop(key, None)
            self._outside.pop(key, None)
            if self._bad:
                self._bad.pop(key, None)
            if self._unwritten:
                self._unwritten.pop(key, None)

    def read(self, tensors: list[tuple[str, Tensor]]) -> tuple[list[int | None], dict[int, tuple[int, ...]]]:
        """Who wrote each tensor and its storage; by position, who left bad values in those that may hold some."""
        reads: list[int | None] = []
        dirty: dict[int, tuple[int, ...]] = {}
        bad, unwritten, outside = self._bad, self._unwritten, self._outside
        for position, (_, t) in enumerate(tensors):
            key = self.key(t)
            writer = None if key is None else self.writer.get(key)
            reads += (writer, key)
            # As in `may_be_bad`, which is asked only if it is not certain.
            uncertain = key is None or key in bad or key in unwritten or outside.get(key, writer is None)
            if uncertain and self.may_be_bad(key, t):
                dirty[position] = self.bad_writers(key, t)
                if writer is None and key is not None and key not in self.roles and t.grad_fn is not None:
                    self.from_elsewhere.add(key)
        return reads, dirty

    def may_be_bad(self, key: int | None, t: Tensor) -> bool:
        """Whether this storage may hold non-finite values; one from before the trace is read once."""
        if key is None or key in self._bad or key in self._unwritten:
            return True
        if key not in self.writer and key not in self._outside:
            if t.dtype is torch.uint8:
                return False  # maybe the bytes of other numbers, of which they say nothing
            # A finite part says nothing about the rest.
            self._outside[key] = not (_is_whole(t) and (surely_finite(t) or is_finite(t)))
        return self._outside.get(key, False)

    def bad_writers(self, key: int | None, t: Tensor) -> tuple[int, ...]:
        """The events that left non-finite values in the elements of this tensor, oldest first."""
        if key is None:
            return ()
        bad = self._bad.get(key, ())
        if bad:
            region = Region.of(t)
            found = tuple(index for index, written in bad if overlap(written, region))
            if found:
                return found
        return (self._unwritten[key],) if key in self._unwritten else ()

    def wrote(self, key: int, t: Tensor, index: int, bad: bool) -> None:
        self.writer[key] = index
        if key in self._bad or key in self._unwritten or key in self._outside:
            self._overwrote(key, t)
        if bad:
            self._bad.setdefault(key, []).append((index, Region.of(t)))

    def _overwrote(self, key: int, t: Tensor) -> None:
        if _is_whole(t):
            self._bad.pop(key, None)
            self._unwritten.pop(key, None)
            self._outside.pop(key, None)
        elif key in self._bad:
            region = Region.of(t)
            left = [(index, written) for index, written in self._bad[key] if not covers(region, written)]
            if left:
                self._bad[key] = left
            else:
                del self._bad[key]

    def allocated(self, key: int, index: int) -> None:
        """Notes a new storage that has not been written."""
        self.writer[key] = self._unwritten[key] = index
        self._bad.pop(key, None)
        self._outside.pop(key, None)

    def arrived(self, t: Tensor) -> None:
        """Notes a storage filled elsewhere, for example by a worker process; what is known of one stays true."""
        key = self.key(t)
        if key is not None and (key not in self.writer or key in self._unwritten):
            for table in (self.writer, self._bad, self._unwritten, self._outside):
                table.pop(key, None)

    def copied_bytes(self, key: int, t: Tensor, writers: tuple[int, ...]) -> None:
        """Notes that these elements are, byte by byte, those of a storage in which `writers` left bad values."""
        self._bad.setdefault(key, []).extend((index, Region.of(t)) for index in writers)

    def roots(self) -> set[int]:
        """The events that left non-finite or unwritten values in storages still in use; forgets the others."""
        self._forget_freed()
        return self.bad() | set(self._unwritten.values())

    def bad(self) -> set[int]:
        """The events that left non-finite values."""
        return {index for writers in self._bad.values() for index, _ in writers}

    def renumber(self, new: dict[int, int], in_use: set[int | None]) -> None:
        """Gives events new numbers; those without one were dropped."""
        # What a dropped event wrote was finite, so it counts as known from before the trace.
        self._outside = {k: False for k, w in self.writer.items() if w not in new} | self._outside
        self.writer = {k: new[w] for k, w in self.writer.items() if w in new}
        self._bad = {k: [(new[i], r) for i, r in writers] for k, writers in self._bad.items()}
        self._unwritten = {k: new[w] for k, w in self._unwritten.items()}
        kept = in_use | {ref.key for ref in self._storages.values()}
        self.roles = {k: role for k, role in self.roles.items() if k in kept}


def _plain_part(t: Tensor) -> Tensor | None:
    """The tensor that holds the numbers of a sharded, nested or sparse one; None if there is none."""
    t = _local(t)
    return t if t.layout is torch.strided else _values(t)


def _local(t: Tensor) -> Tensor:
    """The part of a sharded tensor that this process holds; the numbers of a nested one.

    Of what a collective returns, the tensor that it writes to.
    """
    if t.is_nested:
        return nested_values(t)
    if type(t) is not Tensor:
        local = getattr(t, "_local_tensor", None)
        if local is None and is_from_collective(t):
            local = t.elem  # type: ignore[attr-defined]
        if isinstance(local, Tensor):
            return _local(local)
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
