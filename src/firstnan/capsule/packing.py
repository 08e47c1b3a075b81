"""Values of a program -> nodes and tensors of a capsule, and back into the shape of what the program has there."""

from __future__ import annotations

import base64
import copy
import ctypes
import enum
import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.capsule.file import Opened, Part
from firstnan.capsule.values import DEEPEST, DTYPES, RAW, Array, Foreign, Missing, Packed, Sparse
from firstnan.tensors.finite import dtype_name

_MOST_VALUES = 200_000
_CHUNK = 4 << 20


# --- into the file ------------------------------------------------------------------------------------------------


class Packer:
    """Makes nodes of values and gathers their tensors; `copies` where these may change before they are written."""

    def __init__(self, prefix: str = "t", *, copies: bool = False) -> None:
        self._prefix = prefix
        self.parts: list[Part] = []
        self.left_out: set[str] = set()
        """What could not be kept, in words."""
        self._copies = copies
        self._known: dict[tuple[Any, ...], str] = {}
        self._alive: list[Tensor] = []
        """Memory that is let go of could come back as another tensor's."""
        self._budget = _MOST_VALUES

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def node(self, value: Any, depth: int = DEEPEST // 2) -> Any:
        if value is None or type(value) in (bool, str):
            return value
        self._budget -= 1
        if type(value) is int:
            return value if abs(value) < 1 << 64 else self._missing("a very large number")
        if isinstance(value, float) and type(value).__module__ == "builtins":
            if math.isfinite(value):
                return value
            return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
        if isinstance(value, Tensor):
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return self._tensor(value)
        if depth <= 0 or self._budget < 0:
            return self._missing("values nested too deeply" if depth <= 0 else "a very large structure")
        return self._container(value, depth - 1)

    def _container(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is list:
            return [self.node(v, depth) for v in value]
        if kind is tuple:
            return {"tuple": [self.node(v, depth) for v in value]}
        if kind is dict:
            return {"dict": self._pairs(value.items(), depth)}
        if kind is complex:
            return {"complex": [value.real, value.imag]} if math.isfinite(abs(value)) else self._missing("a number")
        if kind in (bytes, bytearray):
            return {"bytes": base64.b64encode(value).decode()}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._array(numpy, value)
        members = members_of(value)
        if members is None:
            return self._missing(f"{kind.__module__}.{kind.__qualname__}")
        return {"object": {"kind": kind.__qualname__, "how": members[0], "members": self._pairs(members[1], depth)}}

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
        return [[self.node(k, depth), self.node(v, depth)] for k, v in list(pairs)]

    def _missing(self, kind: str) -> dict[str, str]:
        self.left_out.add(kind)
        return {"missing": kind}

    def _tensor(self, t: Tensor) -> Any:
        local = getattr(t, "_local_tensor", t)  # of a sharded tensor the part that is here
        plain: Tensor = local.detach()
        what = _unkeepable(plain)
        if what:
            return self._missing(what)
        if plain.layout is torch.sparse_coo:
            indices, values = self._tensor(plain._indices()), self._tensor(plain._values())
            shape, coalesced = list(plain.shape), plain.is_coalesced()
            return {"sparse": {"indices": indices, "values": values, "shape": shape, "coalesced": coalesced}}
        node: dict[str, Any] = {"dtype": dtype_name(plain), "shape": list(plain.shape)}
        strides = _strides(plain)
        if strides is not None:
            node["strides"] = strides
            plain = plain[tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)]
        if plain.device.type != "cpu":
            node["device"] = str(plain.device)
        if t.requires_grad and t.is_leaf:
            node["grad"] = True
        return {"tensor": {"name": self._store(plain), **node}}

    def _store(self, t: Tensor) -> str:
        """The name under which the elements of this tensor are kept; the same memory is kept once."""
        key = (t.device, t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, tuple(t.shape), t.stride())
        if t.numel() and key in self._known:
            return self._known[key]
        name = self._known[key] = f"{self._prefix}{len(self.parts)}"
        self._alive.append(t)
        kept = t.contiguous().clone() if self._copies else t
        kind = dtype_name(t)
        shape = tuple(t.shape) if kind in DTYPES else (t.numel() * RAW[kind],)
        self.parts.append(Part(name, DTYPES.get(kind, "U8"), shape, lambda: _bytes(kept)))
        return name

    def _array(self, numpy: Any, value: Any) -> Any:
        array = numpy.asarray(value)
        scalar = not isinstance(value, numpy.ndarray)
        if array.dtype.hasobject or array.dtype.names:
            return self._missing(f"numpy.{array.dtype}"[:80])
        kind = array.dtype.str.lstrip("<>=|")[0]
        if array.dtype.name in DTYPES and array.dtype.isnative:
            # A copy: torch warns of an array that cannot be written.
            data = self.node(torch.from_numpy(numpy.array(array, order="C")))
            return {"array": {"data": data, "shape": list(array.shape), "scalar": scalar}}
        if kind not in "USMmcf":
            return self._missing(f"numpy.{array.dtype}"[:80])
        data = self.node(torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8))
        return {"array": {"data": data, "dtype": array.dtype.str, "shape": list(array.shape), "scalar": scalar}}


def _unkeepable(t: Tensor) -> str:
    """What keeps a tensor from being written; empty where nothing does."""
    if t.is_meta or type(t).__name__ == "FakeTensor":
        return "a tensor without values (meta)"
    if t.is_nested:
        return "a nested tensor"
    if t.is_quantized or dtype_name(t) not in (*DTYPES, *RAW):
        return f"a tensor of {dtype_name(t)}"
    if t.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of layout {str(t.layout).removeprefix('torch.')}"
    dispatches = type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return type(t).__name__ if dispatches and type(t) is not Tensor else ""


def _strides(t: Tensor) -> list[int] | None:
    """The strides of a tensor that is expanded, or dense in another order of dimensions; None for a contiguous one."""
    if t.is_contiguous() or t.numel() == 0:
        return None
    strides = [0 if s == 0 and n > 1 else s or 1 for n, s in zip(t.shape, t.stride(), strict=True)]
    kept = [(n, s) for n, s in zip(t.shape, strides, strict=True) if s and n > 1]
    dense = 1 + sum((n - 1) * s for n, s in kept) == math.prod(n for n, _ in kept)
    return strides if dense else None


def _bytes(t: Tensor) -> Iterator[Any]:
    """The memory of a tensor, in order, without another copy of it where it lies in order already."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        kept = t.detach().resolve_conj().resolve_neg().cpu().contiguous()
    size = kept.numel() * kept.element_size()
    memory = memoryview((ctypes.c_char * size).from_address(kept.data_ptr())) if size else memoryview(b"")
    for at in range(0, size, _CHUNK):
        yield memory[at : at + _CHUNK]
    del kept


def members_of(value: Any) -> tuple[str, Iterable[tuple[Any, Any]]] | None:
    """What an object consists of, and how: key by key, item by item, or attribute by attribute; None for a thing."""
    if isinstance(value, dict):
        return "mapping", value.items()
    if isinstance(value, list | tuple | deque):
        return "sequence", enumerate(value)
    if isinstance(value, type | enum.Enum | torch.nn.Module) or callable(value):
        return None
    if is_dataclass(value):
        return "attributes", [(f.name, getattr(value, f.name, None)) for f in fields(value)]
    own = getattr(value, "__dict__", None)
    package = type(value).__module__.partition(".")[0]
    if isinstance(own, dict) and package not in ("builtins", "torch", "numpy", "pandas", "weakref"):
        return "attributes", own.items()
    return None


# --- and out of it ------------------------------------------------------------------------------------------------


class Unpacker:
    """Makes tensors and objects of a capsule's values, on this machine and in this program."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._made: dict[tuple[int, str], Tensor] = {}
        self._packed: list[Packed] = []
        self.notes: set[str] = set()

    def tensor(self, packed: Packed, device: torch.device | str = "cpu") -> Tensor:
        """The tensor in fresh memory; the same one each time, where the program had one."""
        key = (id(packed), str(device))
        if key not in self._made:
            self._packed.append(packed)
            self._made[key] = self.fresh(packed).to(device).requires_grad_(packed.grad)
        return self._made[key]

    def fresh(self, packed: Packed) -> Tensor:
        """The tensor in memory of its own, whoever else has it."""
        memory, kept = self._opened.bytes_of(packed.name), packed.kept_shape
        if len(memory):
            flat = torch.frombuffer(memory, dtype=torch.uint8).clone()
        else:
            flat = torch.empty(0, dtype=torch.uint8)
        t: Tensor = flat.view(getattr(torch, packed.dtype)).reshape(kept)
        if packed.strides is not None:
            strides = [s or 1 for s in packed.strides]
            t = torch.empty_strided(kept, strides, dtype=t.dtype).copy_(t)
        return t.expand(packed.shape)

    def value(self, value: Any, like: Any = None, home: Tensor | None = None) -> Any:
        """The value as this program has it: `like` is what it has there itself, `home` the parameter it belongs to."""
        if isinstance(value, Packed):
            if home is not None and (value.device != "cpu" or value.shape == home.shape):
                return self.tensor(value, home.device)
            return self.tensor(value, like.device if isinstance(like, Tensor) else "cpu")
        if isinstance(value, Sparse):
            indices, values = self.tensor(value.indices), self.tensor(value.values)
            made = torch.sparse_coo_tensor(indices, values, value.shape, check_invariants=True)
            return made._coalesced_(value.coalesced)
        if isinstance(value, Array):
            return self._array(value)
        if isinstance(value, Missing):
            self.notes.add(f"{value.kind} could not be kept; the program's own is used")
            return like
        if isinstance(value, Foreign):
            return self._foreign(value, like)
        if type(value) in (list, tuple):
            inner = like if isinstance(like, list | tuple) else ()
            return type(value)(self.value(v, _at(inner, i), home) for i, v in enumerate(value))
        if type(value) is dict:
            known = like if isinstance(like, dict) else {}
            return {self.value(k): self.value(v, known.get(k), home) for k, v in value.items()}
        return value

    def _array(self, value: Array) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            self.notes.add("numpy arrays are tensors here, since numpy is not loaded")
            return self.tensor(value.data)
        data = self.tensor(value.data).numpy()
        if value.text:
            kind = numpy.dtype(value.text)
            data = numpy.frombuffer(data.tobytes()[: kind.itemsize * math.prod(value.shape)], dtype=kind).copy()
        data = data.reshape(value.shape)
        return data[()] if value.scalar else data

    def _foreign(self, value: Foreign, like: Any) -> Any:
        """A copy of what the program has there, if that is of the same kind, with the captured members in it."""
        if type(like).__qualname__ != value.kind or (own := members_of(like)) is None or own[0] != value.how:
            self.notes.add(f"a {value.kind} is handed out as a plain value: the program has none at that place")
            return self._stripped(value)
        known = dict(own[1])
        first = next(iter(known.values()), None) if value.how == "sequence" else None
        members = [(self.value(k), self.value(v, known.get(k, first))) for k, v in value.members]
        if isinstance(like, tuple):
            items = [v for _, v in members]
            return like._make(items) if hasattr(like, "_make") else type(like)(items)
        made = copy.copy(like)
        if value.how == "attributes":
            for name, member in members:
                if name in known:
                    object.__setattr__(made, name, member)  # frozen dataclasses have no other way
            return made
        made.clear()
        if value.how == "sequence":
            made.extend(v for _, v in members)
        for key, member in members if value.how == "mapping" else ():
            made[key] = member
        return made

    def _stripped(self, value: Foreign) -> Any:
        members = [(self.value(k), self.value(v)) for k, v in value.members]
        return tuple(v for _, v in members) if value.how == "sequence" else dict(members)


def _at(items: Any, i: int) -> Any:
    """What stands at this place, or (a longer list than the program's) what stands there first."""
    if i < len(items):
        return items[i]
    return next(iter(itertools.islice(items, 1)), None)
