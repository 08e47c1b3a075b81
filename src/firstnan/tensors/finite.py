"""Finite or not, statistics and versions of tensors, at memory speed."""

from __future__ import annotations

import ctypes
import math
import operator
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from firstnan.records import Histogram, TensorStat
from firstnan.tensors.step_function import is_step_call

# Packages whose containers read a table or a file when asked for `items()`.
_TABLES = {"pandas", "polars", "pyarrow", "xarray", "h5py", "zarr", "dask", "shelve", "lmdb"}
_USUAL = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_NARROW = tuple(getattr(torch, n) for n in dir(torch) if n.startswith(("float8", "float4")))

_FLOAT32, _STRIDED = torch.float32, torch.strided
_SHORT = 1 << 13
_MOST_WITHOUT = 1024
"""So many items of a container are looked at; if they hold no tensor (a history, a vocabulary), the rest holds none."""

# Inside vmap and similar transforms a tensor has no values that could be read.
_in_transform = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(t: Tensor) -> Tensor:
    """The tensor with values inside one that `vmap` or another transform has wrapped."""
    while _in_transform(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def readable(t: Any) -> Tensor | None:
    """A plain floating-point tensor with the values of `t`, or None if there are none to read.

    That is the local part of a sharded tensor, the values of a sparse one, the real view of a complex one.
    """
    kind = type(t)
    if (kind is Tensor or kind is torch.nn.Parameter) and t.dtype in _USUAL and t.layout is torch.strided:
        if t.is_nested:
            return readable(nested_values(t))
        return t.detach() if not (t.is_meta or _in_transform(t) or t._is_zerotensor()) else None
    if not isinstance(t, Tensor):
        return None
    if kind is Tensor or kind is torch.nn.Parameter:
        return _plain(t)
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may redefine any operator
        if t.is_nested:
            return readable(nested_values(t))
        local = getattr(t, "_local_tensor", None)
        if isinstance(local, Tensor):
            return readable(local)
        if is_from_collective(t):
            return readable(t.trigger_wait())  # type: ignore[attr-defined]
        if torch._is_functional_tensor(t) or kind.__name__ == "FakeTensor":
            return None
        if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl and not isinstance(
            t, torch.nn.Parameter | torch.nn.Buffer
        ):
            return None
        return _plain(t.as_subclass(Tensor) if t.layout is torch.strided else t)


def is_from_collective(t: Tensor) -> bool:
    """Whether this is what a functional collective returns, as DTensors use it: it has to be waited for."""
    return type(t).__name__ == "AsyncCollectiveTensor"


def nested_values(t: Tensor) -> Tensor:
    """The numbers of a nested tensor, one after the other."""
    values = getattr(t, "_values", None)  # of the jagged layout; a method of others
    return values.detach() if isinstance(values, Tensor) else t.detach().values()


def shape_of(t: Tensor) -> tuple[int, ...]:
    """The shape; that of all its numbers together for a nested tensor, which has none that is made of numbers."""
    return tuple(nested_values(t).shape) if t.is_nested else tuple(t.shape)


def _plain(t: Tensor) -> Tensor | None:
    dtype = t.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or t.is_meta or t.is_nested or _in_transform(t):
        return None
    if t._is_zerotensor():  # zeros without memory, which forward-mode derivatives are made of
        return None
    plain: Tensor = t.detach()
    if plain.layout is torch.sparse_coo:
        plain = plain._values()
    elif plain.layout is not torch.strided:
        if plain.layout is torch._mkldnn:  # type: ignore[attr-defined]
            return None
        plain = plain.values()
    if dtype.is_complex:
        plain = torch.view_as_real(plain.resolve_conj())
    return plain.float() if dtype in _NARROW else plain


def is_plain(t: Tensor) -> bool:
    """Whether `t` is a dense float32 tensor on the CPU, which the fastest functions accept as it is."""
    kind = type(t)
    return (kind is Tensor or kind is torch.nn.Parameter) and t.dtype is torch.float32 and t.is_cpu and not t.is_sparse


def reads_are_free(t: Tensor) -> bool:
    """Whether reading a value does not wait for a device."""
    return t.is_cpu


def read_all(values: list[Tensor]) -> list[float]:
    """Reads many scalars at once: on a device, the only synchronisation of a step."""
    home = values[-1].device
    numbers: list[float] = torch.stack([v.to(home, torch.float32) for v in values]).tolist()
    return numbers


def extremes(t: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum of a readable tensor, None if it is empty; a NaN anywhere makes both NaN."""
    if t.numel() == 0:
        return None
    if t.numel() == 1:
        value = t.item()
        return value, value
    low, high = torch.aminmax(t)
    return low.item(), high.item()


def shares(t: Tensor) -> tuple[float, float]:
    """The shares of zeros and of subnormal numbers in a readable tensor."""
    count = max(t.numel(), 1)
    zeros = count - int(torch.count_nonzero(t))
    below = int(torch.count_nonzero(t.abs() < torch.finfo(t.dtype).tiny))
    return zeros / count, (below - zeros) / count


def surely_finite(t: Tensor) -> bool:
    """Whether the sum of squares is finite. True is certain; False is not, since large finite numbers overflow it."""
    kind = type(t)
    if (kind is not Tensor and kind is not Parameter) or t.dtype is not _FLOAT32:
        return False
    if t.layout is not _STRIDED or not t.is_contiguous() or t.is_meta or t.is_nested or t._is_zerotensor():
        return False
    flat = (t.detach() if t.requires_grad else t).view(-1)
    return math.isfinite(own_item(torch.dot(flat, flat)))


def has_nan(t: Tensor) -> bool:
    """Whether it holds a NaN; infinities may be a mask."""
    plain = readable(t) if not is_finite(t) else None
    return plain is not None and bool(torch.isnan(plain).any())


def has_nan_or_positive_inf(t: Tensor) -> bool:
    """Whether it holds a NaN or a positive infinity; negative infinities alone are often an intended mask."""
    if is_finite(t):
        return False
    plain = readable(t)
    if plain is None:
        return False
    if plain.is_complex():
        return True
    with torch.no_grad():
        return bool((torch.isnan(plain) | torch.isposinf(plain)).any())


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of any layout are equal; a NaN equals a NaN."""
    if one.is_nested and other.is_nested:
        one, other = nested_values(one), nested_values(other)
    if (one.layout, one.shape, one.dtype) != (other.layout, other.shape, other.dtype):
        return False
    pairs = zip(_stored(one.detach()), _stored(other.detach()), strict=True)
    return all(torch.equal(a, b) or torch.equal(_without_nan(a), _without_nan(b)) for a, b in pairs)


def _without_nan(t: Tensor) -> Tensor:
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).nan_to_num()


def _stored(t: Tensor) -> tuple[Tensor, ...]:
    """The tensors that a sparse one consists of."""
    if t.layout is torch.sparse_coo:
        return t._indices(), t._values()
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return t.crow_indices(), t.col_indices(), t.values()
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return t.ccol_indices(), t.row_indices(), t.values()
    return (t,)


def is_finite(t: Any) -> bool:
    """Whether every element is finite; a tensor that cannot be read counts as finite."""
    plain = readable(t)
    if plain is None:
        return True
    ends = extremes(plain)
    return ends is None or (math.isfinite(ends[0]) and math.isfinite(ends[1]))


def dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def stat(name: str, t: Tensor) -> TensorStat:
    """The full statistics of one tensor (several passes over it: not for code that runs every step)."""
    with torch._C.DisableTorchFunctionSubclass():
        return _stat(name, t)


def _stat(name: str, t: Tensor) -> TensorStat:
    plain = readable(t)
    shape, dtype = shape_of(t), dtype_name(t)
    if plain is None or plain.numel() == 0:
        if plain is None and t.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
            return _integer_stat(name, t, shape, dtype)
        return TensorStat(name, shape, dtype)
    ends = extremes(plain)
    assert ends is not None
    nan = posinf = neginf = 0
    first = None
    values = plain
    if not (math.isfinite(ends[0]) and math.isfinite(ends[1])):
        kinds = [torch.isnan(plain), plain == math.inf, plain == -math.inf]
        bad = ~torch.isfinite(plain)
        values = plain[~bad]
        if t.dtype.is_complex:
            # The last dimension holds the real and imaginary parts; an element with a NaN part is a NaN.
            kinds, bad = [k.any(-1) for k in kinds], bad.any(-1)
            kinds[1] &= ~kinds[0]
            kinds[2] &= ~(kinds[0] | kinds[1])
        nan, posinf, neginf = (int(k.sum()) for k in kinds)
        first = _first_index(t, bad)
    low, high = extremes(values) or (None, None)
    return TensorStat(
        name,
        shape,
        dtype,
        min=low,
        max=high,
        smallest=values.abs().min().item() if values.numel() else None,
        # A complex number is 0 if both of its parts are, and has no sign.
        zeros=int((plain == 0).all(-1).sum() if t.dtype.is_complex else (values == 0).sum()),
        negative=0 if t.dtype.is_complex else int((values < 0).sum()),
        nan=nan,
        posinf=posinf,
        neginf=neginf,
        first_index=first,
        binary=bool(values.numel()) and low in (0.0, 1.0) and bool(((values == 0) | (values == 1)).all()),
    )


BINS = 32
_MOST_COUNTED = 1 << 22
_WIDE = 100.0


def histogram(t: Tensor) -> Histogram | None:
    """How often the finite values of a tensor occur; None if it has fewer than two different ones.

    Of a very large tensor, about four million evenly spaced values are counted.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        plain = readable(t)
        if plain is None or not plain.numel():
            return None
        flat = plain.flatten()
        flat = flat[:: max(1, flat.numel() // _MOST_COUNTED)].to("cpu", torch.float64)
        flat = flat[torch.isfinite(flat)]
        ends = extremes(flat)
        if ends is None or ends[0] == ends[1]:
            return None
        return _counted(flat, *ends)


def _counted(flat: Tensor, low: float, high: float) -> Histogram:
    sizes = flat.abs()
    largest, sizes = sizes.max().item(), sizes[sizes > 0]
    # Most values would be in one bin where a few are far larger than the rest.
    log = bool(largest > _WIDE * sizes.median().item())
    # A single tiny value does not stretch the axis.
    unit = sizes.kthvalue(1 + len(sizes) // 100).values.item() if log else 1.0
    ends = [math.asinh(low / unit), math.asinh(high / unit)] if log else [low, high]
    # Weighted, not low + share * (high - low): that difference may be infinite.
    marks = [ends[0] * (1 - i / BINS) + ends[1] * (i / BINS) for i in range(BINS + 1)]
    edges = [low, *(math.sinh(mark) * unit if log else mark for mark in marks[1:-1]), high]
    at = torch.bucketize(flat, torch.tensor(edges[1:-1], dtype=torch.float64), right=True)
    return Histogram(tuple(edges), tuple(torch.bincount(at, minlength=BINS).tolist()), log)


def _first_index(t: Tensor, bad: Tensor) -> tuple[int, ...] | None:
    """The index in `t` of the first marked element; None for layouts that store values in another order."""
    at = unravel(int(bad.flatten().to(torch.uint8).argmax()), tuple(bad.shape))
    if t.layout is torch.sparse_coo:
        return (*t.detach()._indices()[:, at[0]].tolist(), *at[1:])
    return at if tuple(bad.shape) == shape_of(t) else None


def _integer_stat(name: str, t: Tensor, shape: tuple[int, ...], dtype: str) -> TensorStat:
    if t.numel() == 0 or t.device.type == "meta" or t.layout is not torch.strided:
        return TensorStat(name, shape, dtype)
    t = t.detach()
    low, high = (int(v) for v in torch.aminmax(t.to(torch.int64) if t.dtype is torch.bool else t))
    return TensorStat(
        name,
        shape,
        dtype,
        min=low,
        max=high,
        zeros=int((t == 0).sum()),
        negative=0 if t.dtype in (torch.bool, torch.uint8) else int((t < 0).sum()),
        binary=low in (0, 1) and high in (0, 1),
    )


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of element `flat` of a contiguous tensor of this shape."""
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norms of many readable tensors, on the device of the first one, in as few kernels as possible."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    parts: list[Tensor] = []
    for (_, dtype), group in groups.items():
        # A 2-norm in half precision overflows on finite gradients.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        parts += torch._foreach_norm(group, 2, wide)
    if len(groups) > 1:
        home = tensors[0].device
        wide = torch.float64 if any(dtype is torch.float64 for _, dtype in groups) else torch.float32
        parts = [p.to(home, wide) for p in parts]
    return torch.stack(parts)


own_item = torch._C.TensorBase.item
"""`Tensor.item` is watched under `firstnan run`: what is read here is our own."""


_PLAIN_TYPES = {Tensor, torch.nn.Parameter}
_plainness, _PLAIN = operator.attrgetter("dtype", "is_cpu", "is_sparse"), {(torch.float32, True, False)}


def plain_norm(tensors: list[Tensor]) -> float | None:
    """The 2-norm of all these tensors together; None unless all of them are plain (`is_plain`).

    Small vectors, of which a model has dozens, are concatenated first.
    """
    # As in `is_plain`, without bytecode for every tensor.
    if not set(map(type, tensors)) <= _PLAIN_TYPES or not set(map(_plainness, tensors)) <= _PLAIN:
        return None
    vectors: list[Tensor] = []
    squares = 0.0
    for t in tensors:
        if t.dim() == 1 and t.numel() <= _SHORT:
            vectors.append(t)
        elif t.is_contiguous():
            flat = t.view(-1)
            squares += own_item(torch.dot(flat, flat))
        else:
            squares += own_item(torch.linalg.vector_norm(t)) ** 2
    for vector in [torch.cat(vectors)] if len(vectors) > 2 else vectors:
        squares += own_item(torch.dot(vector, vector))
    return math.sqrt(squares)


def tensors_in(value: Any, path: str = "", depth: int = 6) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside tuples, lists, dicts, dataclasses and similar objects, with its path as text."""
    if isinstance(value, Tensor):
        yield path, value
    elif (
        depth <= 0 or value is None or isinstance(value, str | bytes | int | float | type) or _package(value) in _TABLES
    ):
        return
    elif isinstance(value, dict) or (hasattr(value, "items") and hasattr(value, "keys")):
        entries = list(islice(value.items(), _MOST_WITHOUT))
        if (yield from _tensors_among(((f"{path}[{key!r}]", v) for key, v in entries), depth)):
            rest = list(value.items())[_MOST_WITHOUT:]
            yield from _tensors_among(((f"{path}[{key!r}]", v) for key, v in rest), depth)
    elif is_step_call(value):
        for name, item in value[0].named(*value[1:], path):
            yield from tensors_in(item, name, depth - 1)
    elif isinstance(value, list | tuple | deque):
        names: Iterable[str] | None = getattr(value, "_fields", None)
        items = ((f"{path}[{i}]" if names is None else f"{path}.{list(names)[i]}", v) for i, v in enumerate(value))
        if (yield from _tensors_among(islice(items, _MOST_WITHOUT), depth)):
            yield from _tensors_among(items, depth)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name, None), f"{path}.{f.name}", depth - 1)
    elif _package(value) not in ("builtins", "torch", "numpy") and hasattr(value, "__dict__"):
        # Graph batches such as PyG's Data keep their tensors as attributes.
        for key, item in list(vars(value).items()):
            yield from tensors_in(item, f"{path}.{key.lstrip('_')}", depth - 2)


def _tensors_among(items: Iterable[tuple[str, Any]], depth: int) -> Generator[tuple[str, Tensor], None, bool]:
    """The tensors in these items; returns whether there are any."""
    found = False
    for path, item in items:
        for pair in tensors_in(item, path, depth - 1):
            found = True
            yield pair
    return found


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


class TensorVersion:
    """The version of a plain tensor at one moment. Holds no reference to the tensor."""

    __slots__ = ("_address", "_number", "_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._version, self._address = tensor._version, tensor.data_ptr()
        self._number = _first_number(self._address) if self._address else None

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, not written to since."""
        if self._tensor() is not tensor or self._version != tensor._version:
            return False
        # A write through `.data` does not change the version, but it replaces the memory or changes all values.
        address = tensor.data_ptr()
        return self._address == address and (not address or self._number == _first_number(address))


def _first_number(address: int) -> float:
    return ctypes.c_float.from_address(address).value
