"""Turns values of a program into JSON nodes and tensors, and those back into values like the program's own."""

from __future__ import annotations

import base64
import copy
import enum
import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from firstnan.capsule.content import DEEPEST, DTYPES, RAW, Array, Missing, Packed, ProgramObject, Sparse
from firstnan.capsule.file import CapsuleFile
from firstnan.tensors.finite import dtype_name

_MOST_VALUES = 200_000


# --- packing ------------------------------------------------------------------------------------------------------


class Packer:
    """Turns values into nodes and collects their tensors; `copies` them if they may change before they are written."""

    def __init__(self, prefix: str = "t", *, copies: bool = False) -> None:
        self._prefix = prefix
        self.tensors: dict[str, Tensor] = {}
        self.left_out: set[str] = set()
        """What could not be stored."""
        self._copies = copies
        self._known: dict[tuple[Any, ...], str] = {}
        self._referenced: list[Tensor] = []
        """Freed memory could be reused by another tensor, which would then be taken for a known one."""
        self._budget = _MOST_VALUES

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())

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
        local = getattr(t, "_local_tensor", t)  # the local part of a sharded tensor
        plain: Tensor = local.detach()
        if unsupported := _unsupported(plain):
            return self._missing(unsupported)
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
        """The name under which the elements of this tensor are stored; the same memory is stored once."""
        key = (t.device, t.untyped_storage().data_ptr(), t.storage_offset(), t.dtype, tuple(t.shape), t.stride())
        if t.numel() and key in self._known:
            return self._known[key]
        name = self._known[key] = f"{self._prefix}{len(self.tensors)}"
        self._referenced.append(t)
        kept = t.contiguous().clone() if self._copies else t
        if dtype_name(t) in RAW:
            kept = kept.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        self.tensors[name] = kept
        return name

    def _array(self, numpy: Any, value: Any) -> Any:
        array = numpy.asarray(value)
        scalar = not isinstance(value, numpy.ndarray)
        if array.dtype.hasobject or array.dtype.names:
            return self._missing(f"numpy.{array.dtype}"[:80])
        kind = array.dtype.str.lstrip("<>=|")[0]
        if array.dtype.name in DTYPES and array.dtype.isnative:
            # A copy, because torch warns about arrays that are read-only.
            data = self.node(torch.from_numpy(numpy.array(array, order="C")))
            return {"array": {"data": data, "shape": list(array.shape), "scalar": scalar}}
        if kind not in "USMmcf":
            return self._missing(f"numpy.{array.dtype}"[:80])
        data = self.node(torch.frombuffer(bytearray(array.tobytes() or b"\0"), dtype=torch.uint8))
        return {"array": {"data": data, "dtype": array.dtype.str, "shape": list(array.shape), "scalar": scalar}}


def _unsupported(t: Tensor) -> str:
    """What kind of tensor this is, if it cannot be stored; otherwise empty."""
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
    """The strides of a tensor that is expanded or has another order of dimensions; None for a contiguous one."""
    if t.is_contiguous() or t.numel() == 0:
        return None
    strides = [0 if s == 0 and n > 1 else s or 1 for n, s in zip(t.shape, t.stride(), strict=True)]
    kept = [(n, s) for n, s in zip(t.shape, strides, strict=True) if s and n > 1]
    dense = 1 + sum((n - 1) * s for n, s in kept) == math.prod(n for n, _ in kept)
    return strides if dense else None


def members_of(value: Any) -> tuple[str, Iterable[tuple[Any, Any]]] | None:
    """The members of an object and whether they are keys, items or attributes; None if it has no members."""
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


# --- unpacking ----------------------------------------------------------------------------------------------------


class Unpacker:
    """Turns stored values into tensors and objects of this program."""

    def __init__(self, file: CapsuleFile) -> None:
        self._file = file
        self._made: dict[tuple[int, str], Tensor] = {}
        self._packed: list[Packed] = []
        """Keeps the ids in `_made` from being reused."""
        self.notes: set[str] = set()

    def tensor(self, packed: Packed, device: torch.device | str = "cpu") -> Tensor:
        """The tensor in new memory; always the same one if the program had one."""
        key = (id(packed), str(device))
        if key not in self._made:
            self._packed.append(packed)
            self._made[key] = self.fresh(packed).to(device).requires_grad_(packed.grad)
        return self._made[key]

    def fresh(self, packed: Packed) -> Tensor:
        """The tensor in memory of its own."""
        t, kept = self._file.tensor(packed.name).reshape(-1).clone(), packed.kept_shape
        if packed.dtype in RAW:
            t = t.view(getattr(torch, packed.dtype))
        t = t.reshape(kept)
        if packed.strides is not None:
            strides = [s or 1 for s in packed.strides]
            t = torch.empty_strided(kept, strides, dtype=t.dtype).copy_(t)
        return t.expand(packed.shape)

    def value(self, value: Any, like: Any = None, parameter: Tensor | None = None) -> Any:
        """The value for this program: `like` is the program's own in that place, `parameter` the one it belongs to."""
        if isinstance(value, Packed):
            if parameter is not None and (value.device != "cpu" or value.shape == parameter.shape):
                return self.tensor(value, parameter.device)
            return self.tensor(value, like.device if isinstance(like, Tensor) else "cpu")
        if isinstance(value, Sparse):
            indices, values = self.tensor(value.indices), self.tensor(value.values)
            made = torch.sparse_coo_tensor(indices, values, value.shape, check_invariants=True)
            return made._coalesced_(value.coalesced)
        if isinstance(value, Array):
            return self._array(value)
        if isinstance(value, Missing):
            self.notes.add(f"{value.kind} could not be stored, so the program's own value is used")
            return like
        if isinstance(value, ProgramObject):
            return self._object(value, like)
        if type(value) in (list, tuple):
            inner = like if isinstance(like, list | tuple) else ()
            return type(value)(self.value(v, _at(inner, i), parameter) for i, v in enumerate(value))
        if type(value) is dict:
            known = like if isinstance(like, dict) else {}
            return {self.value(k): self.value(v, known.get(k), parameter) for k, v in value.items()}
        return value

    def _array(self, value: Array) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            self.notes.add("numpy arrays are restored as tensors, because numpy is not loaded")
            return self.tensor(value.data)
        data = self.tensor(value.data).numpy()
        if value.text:
            kind = numpy.dtype(value.text)
            data = numpy.frombuffer(data.tobytes()[: kind.itemsize * math.prod(value.shape)], dtype=kind).copy()
        data = data.reshape(value.shape)
        return data[()] if value.scalar else data

    def _object(self, value: ProgramObject, like: Any) -> Any:
        """A copy of the program's own object with the captured members, if it is of the same kind."""
        if type(like).__qualname__ != value.kind or (own := members_of(like)) is None or own[0] != value.how:
            self.notes.add(f"{value.kind} is restored as a plain value, because the program has no {value.kind} there")
            return self._plain(value)
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
                    object.__setattr__(made, name, member)  # the only way for frozen dataclasses
            return made
        made.clear()
        if value.how == "sequence":
            made.extend(v for _, v in members)
        for key, member in members if value.how == "mapping" else ():
            made[key] = member
        return made

    def _plain(self, value: ProgramObject) -> Any:
        members = [(self.value(k), self.value(v)) for k, v in value.members]
        return tuple(v for _, v in members) if value.how == "sequence" else dict(members)


def _at(items: Any, i: int) -> Any:
    """The item at this place, or the first one if the captured list is longer than the program's."""
    if i < len(items):
        return items[i]
    return next(iter(itertools.islice(items, 1)), None)
