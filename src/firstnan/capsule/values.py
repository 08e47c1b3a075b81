"""The values in a capsule's manifest, decoded and checked: plain ones, and what stands for tensors and objects.

A JSON list is a list. Everything else that JSON cannot express is an object with a single key that names its kind. No
class is looked up by a name from the file: objects are modelled on those that the program has in the same place.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firstnan.capsule.file import CapsuleError, Stored, one_line

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
"""torch's names of element types -> those of safetensors."""
RAW = {
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Element types that not every version of safetensors knows, stored as bytes; with the size of an element."""
DEEPEST = 40
_NUMPY = re.compile(r"[<>=|]?(?P<kind>[USMmcf])(?P<size>\d{1,9})(\[\w{1,9}\])?")
"""Text, times and wide numbers: nothing that holds objects."""
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """None for a contiguous tensor; 0 for an expanded dimension."""
    device: str = "cpu"
    grad: bool = False

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """The shape with a size of 1 in expanded dimensions."""
        strides = self.strides or (1,) * len(self.shape)
        return tuple(1 if s == 0 else n for n, s in zip(self.shape, strides, strict=True))


@dataclass(frozen=True, slots=True)
class Sparse:
    indices: Packed
    values: Packed
    shape: tuple[int, ...]
    coalesced: bool


@dataclass(frozen=True, slots=True)
class Array:
    """A numpy array, or (`scalar`) a numpy number; `text` is the dtype of one whose bytes the tensor holds."""

    data: Packed
    text: str = ""
    shape: tuple[int, ...] = ()
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ProgramObject:
    """An object of a class of the program; `how` says whether members are keys, items or attributes."""

    kind: str
    how: str
    members: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that could not be stored."""

    kind: str


class Reader:
    """Decodes JSON nodes; raises CapsuleError for everything that the writer would not have written."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._known: dict[tuple[Any, ...], Packed] = {}
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda v, depth: tuple(self._items(v, depth)),
            "dict": lambda v, depth: dict(self._pairs(v, depth)),
            "float": lambda v, _: _FLOATS[as_text(v)],
            "complex": lambda v, _: _complex(v),
            "bytes": lambda v, _: base64.b64decode(as_text(v), validate=True),
            "tensor": lambda v, _: self._tensor(v),
            "sparse": lambda v, _: self._sparse(v),
            "array": lambda v, _: self._array(v),
            "object": self._object,
            "missing": lambda v, _: Missing(as_text(v)),
        }

    def value(self, node: Any, depth: int = DEEPEST) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if depth <= 0:
            raise CapsuleError("corrupt capsule: values nested too deeply")
        if isinstance(node, list):
            return self._items(node, depth)
        if isinstance(node, dict) and len(node) == 1:
            ((kind, inner),) = node.items()
            if kind in self._kinds:
                try:
                    return self._kinds[kind](inner, depth - 1)
                except CapsuleError:
                    raise
                except (KeyError, TypeError, ValueError, binascii.Error):
                    raise CapsuleError(f"corrupt capsule: cannot decode {_named(kind, inner)}") from None
        raise CapsuleError("corrupt capsule: value of unknown kind")

    def tensor(self, node: Any) -> Packed:
        """The value of a node that must be a tensor."""
        value = self.value(node)
        if not isinstance(value, Packed):
            raise CapsuleError("corrupt capsule: tensor missing")
        return value

    def _items(self, node: Any, depth: int) -> list[Any]:
        return [self.value(n, depth - 1) for n in as_list(node)]

    def _pairs(self, node: Any, depth: int) -> list[tuple[Any, Any]]:
        pairs = []
        for pair in as_list(node):
            key, value = as_list(pair)
            pairs.append((self.value(key, depth - 1), self.value(value, depth - 1)))
        return pairs

    def _tensor(self, node: Any) -> Packed:
        name, dtype = as_text(node["name"]), as_text(node["dtype"])
        strides = node.get("strides")
        packed = Packed(
            name, dtype, _counts(node["shape"]), None if strides is None else _counts(strides),
            as_text(node.get("device", "cpu")), bool(node.get("grad", False)),
        )  # fmt: skip
        self._check(packed)
        # One tensor of the program is restored as one tensor.
        key = (name, dtype, packed.shape, packed.strides, packed.grad)
        return self._known.setdefault(key, packed)

    def _check(self, packed: Packed) -> None:
        stored, elements = self._stored[packed.name], math.prod(packed.kept_shape)
        expected = ("U8", elements * RAW[packed.dtype]) if packed.dtype in RAW else (DTYPES[packed.dtype], elements)
        fits = (stored.dtype, math.prod(stored.shape)) == expected
        if packed.strides is not None and fits:
            pairs = [(n, s) for n, s in zip(packed.kept_shape, packed.strides, strict=True) if n > 1]
            fits = 1 + sum((n - 1) * s for n, s in pairs) == elements
        floating = packed.dtype.startswith(("float", "bfloat", "complex"))
        if not fits or (packed.grad and not floating) or math.prod(packed.shape) >= 1 << 48:
            raise ValueError

    def _sparse(self, node: Any) -> Sparse:
        indices, values, shape = self.tensor(node["indices"]), self.tensor(node["values"]), _counts(node["shape"])
        return Sparse(indices, values, shape, bool(node["coalesced"]))

    def _array(self, node: Any) -> Array:
        text = as_text(as_dict(node).get("dtype", ""))
        data, shape = self.tensor(node["data"]), _counts(node["shape"])
        elements, here = math.prod(shape), math.prod(data.shape)
        if text:
            kind = _NUMPY.fullmatch(text)
            if kind is None or elements * int(kind["size"]) * (4 if kind["kind"] == "U" else 1) > here:
                raise ValueError
        elif elements != here:
            raise ValueError
        return Array(data, text, shape, bool(node.get("scalar", False)))

    def _object(self, node: Any, depth: int) -> ProgramObject:
        if node["how"] not in ("mapping", "sequence", "attributes"):
            raise ValueError
        return ProgramObject(as_text(node["kind"]), node["how"], tuple(self._pairs(node["members"], depth)))


def _named(kind: str, node: Any) -> str:
    name = node.get("name") if isinstance(node, dict) else None
    return f"{kind} {one_line(name, 40)!r}" if isinstance(name, str) else f"value of kind {kind!r}"


# --- types of JSON nodes ------------------------------------------------------------------------------------------


def as_dict(node: Any) -> dict[Any, Any]:
    if not isinstance(node, dict):
        raise TypeError
    return node


def as_list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError
    return node


def as_text(node: Any) -> str:
    if not isinstance(node, str):
        raise TypeError
    return node


def as_count(node: Any, below: int = 1 << 62) -> int:
    if type(node) is not int or not 0 <= node < below:
        raise ValueError
    return node


def _counts(node: Any) -> tuple[int, ...]:
    if len(as_list(node)) > 64:
        raise ValueError
    return tuple(as_count(n) for n in node)


def _complex(node: Any) -> complex:
    real, imaginary = as_list(node)
    return complex(float(real), float(imaginary))
