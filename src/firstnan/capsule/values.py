"""What a capsule's JSON says, checked: plain values, and where tensors and objects of the program have to come in.

A list is a list; every other thing that is no plain JSON value is an object with one key that says what it is. No
class is ever looked up by a name from the file: objects are made after those that the program has at that place.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from firstnan.capsule.file import SIZES, CapsuleError, Stored

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
"""Types that not every safetensors knows, kept as bytes; with the size of an element."""
DEEPEST = 40
_NUMPY = re.compile(r"[<>=|]?(?P<kind>[USMmcf])(?P<size>\d{1,9})(\[\w{1,9}\])?")
"""Texts, times and wide numbers: nothing that holds objects."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor that lies in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Where they are not those of a contiguous tensor; 0 for a dimension that is expanded."""
    device: str = "cpu"
    grad: bool = False

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Without what is expanded."""
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
    """A numpy array, or (`scalar`) a number of a numpy type; `text` is its dtype where the tensor holds its bytes."""

    data: Packed
    text: str = ""
    shape: tuple[int, ...] = ()
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class Foreign:
    """An object of the program's own class: `how` says what its members are."""

    kind: str
    how: str
    members: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that could not be kept."""

    kind: str


class Reader:
    """Makes values of nodes; CapsuleError for all that the writer would not have written."""

    def __init__(self, stored: dict[str, Stored]) -> None:
        self._stored = stored
        self._known: dict[tuple[Any, ...], Packed] = {}
        self._kinds: dict[str, Callable[[Any, int], Any]] = {
            "tuple": lambda v, depth: tuple(self._items(v, depth)),
            "dict": lambda v, depth: dict(self._pairs(v, depth)),
            "float": lambda v, _: _one_of(v, {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}),
            "complex": lambda v, _: complex(*_numbers(v, 2)),
            "bytes": lambda v, _: base64.b64decode(_text(v), validate=True),
            "tensor": lambda v, _: self._tensor(v),
            "sparse": lambda v, _: self._sparse(v),
            "array": lambda v, _: self._array(v),
            "object": self._foreign,
            "missing": lambda v, _: Missing(_text(v)),
        }

    def value(self, node: Any, depth: int = DEEPEST) -> Any:
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if depth <= 0:
            raise CapsuleError("damaged: nested too deeply")
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
                    raise CapsuleError(f"damaged: nothing can be made of a {kind} in it") from None
        raise CapsuleError("damaged: a value in it is of no known kind")

    def tensor(self, node: Any) -> Packed:
        """The value of a node that has to be a tensor."""
        value = self.value(node)
        if not isinstance(value, Packed):
            raise CapsuleError("damaged: a tensor is missing")
        return value

    def _items(self, node: Any, depth: int) -> list[Any]:
        return [self.value(n, depth - 1) for n in _list(node)]

    def _pairs(self, node: Any, depth: int) -> list[tuple[Any, Any]]:
        pairs = []
        for pair in _list(node):
            key, value = _list(pair)
            pairs.append((self.value(key, depth - 1), self.value(value, depth - 1)))
        return pairs

    def _tensor(self, node: Any) -> Packed:
        name, dtype = _text(node["name"]), _text(node["dtype"])
        strides = node.get("strides")
        packed = Packed(
            name, dtype, _counts(node["shape"]), None if strides is None else _counts(strides),
            _text(node.get("device", "cpu")), bool(node.get("grad", False)),
        )  # fmt: skip
        self._check(packed)
        # What was one tensor in the program is one tensor again.
        key = (name, dtype, packed.shape, packed.strides, packed.grad)
        return self._known.setdefault(key, packed)

    def _check(self, packed: Packed) -> None:
        stored, kept = self._stored[packed.name], packed.kept_shape
        size = RAW.get(packed.dtype) or SIZES[DTYPES[packed.dtype]]
        whole = stored.dtype == DTYPES.get(packed.dtype, "U8") and math.prod(kept) * size == stored.end - stored.begin
        if packed.strides is not None and whole:
            pairs = [(n, s) for n, s in zip(kept, packed.strides, strict=True) if n > 1]
            whole = 1 + sum((n - 1) * s for n, s in pairs) == math.prod(kept)
        floating = packed.dtype.startswith(("float", "bfloat", "complex"))
        if not whole or (packed.grad and not floating) or math.prod(packed.shape) >= 1 << 48:
            raise ValueError

    def _sparse(self, node: Any) -> Sparse:
        indices, values, shape = self.tensor(node["indices"]), self.tensor(node["values"]), _counts(node["shape"])
        return Sparse(indices, values, shape, bool(node["coalesced"]))

    def _array(self, node: Any) -> Array:
        text, data, shape = _text(node.get("dtype", "")), self.tensor(node["data"]), _counts(node["shape"])
        elements, here = math.prod(shape), math.prod(data.shape)
        if text:
            kind = _NUMPY.fullmatch(text)
            if kind is None or elements * int(kind["size"]) * (4 if kind["kind"] == "U" else 1) > here:
                raise ValueError
        elif elements != here:
            raise ValueError
        return Array(data, text, shape, bool(node.get("scalar", False)))

    def _foreign(self, node: Any, depth: int) -> Foreign:
        how = _one_of(node["how"], {h: h for h in ("mapping", "sequence", "attributes")})
        return Foreign(_text(node["kind"]), how, tuple(self._pairs(node["members"], depth)))


def _list(node: Any) -> list[Any]:
    if not isinstance(node, list):
        raise TypeError
    return node


def _text(node: Any) -> str:
    if not isinstance(node, str):
        raise TypeError
    return node


def _counts(node: Any) -> tuple[int, ...]:
    counts = _list(node)
    if len(counts) > 64 or not all(type(n) is int and 0 <= n < 1 << 62 for n in counts):
        raise ValueError
    return tuple(counts)


def _numbers(node: Any, many: int) -> list[float]:
    numbers = [float(n) for n in _list(node)]
    if len(numbers) != many:
        raise ValueError
    return numbers


def _one_of(node: Any, choices: dict[str, Any]) -> Any:
    return choices[_text(node)]
