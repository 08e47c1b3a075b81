"""The content of a capsule with every field checked; needs no torch, because tensors are read later.

A JSON list is a list. Everything else that JSON cannot express is an object with a single key that names its kind. No
class is looked up by a name from the file: objects are modelled on those that the program has in the same place.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from firstnan.capsule.file import CapsuleError, CapsuleFile, Stored, one_line
from firstnan.records import Report
from firstnan.records.codec import ReportError


@dataclass(frozen=True)
class ModelState:
    kind: str
    parameters: dict[str, Any]
    buffers: dict[str, Any]


@dataclass(frozen=True)
class ParameterState:
    """One parameter of an optimizer."""

    name: tuple[int, str] | None
    """Which model it belongs to, and its name there; None for a parameter of no model."""
    value: Any
    """Stored here only if it has no name."""
    state: Any


@dataclass(frozen=True)
class GroupState:
    settings: dict[str, Any]
    parameters: tuple[ParameterState, ...]


@dataclass(frozen=True)
class OptimizerState:
    kind: str
    groups: tuple[GroupState, ...]

    @property
    def parameters(self) -> list[ParameterState]:
        return [p for group in self.groups for p in group.parameters]


@dataclass(frozen=True)
class BatchState:
    source: int
    """Which of the step's loaders, in the order in which they were read."""
    index: int
    indices: Any
    """Its dataset indices, if the sampler is known."""
    value: Any
    random: Any


@dataclass(frozen=True)
class StepNumbers:
    current: int
    total: int
    manual: int
    done: tuple[int, ...]
    last: int | None
    follows: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Capsule:
    file: CapsuleFile
    report: Report
    environment: dict[str, Any]
    sources: dict[str, str]
    left_out: tuple[str, ...]
    steps: StepNumbers
    suppressed: int
    """How many updates of this step the weights already contain."""
    models: tuple[ModelState, ...]
    optimizers: tuple[OptimizerState, ...]
    scalers: tuple[Any, ...]
    schedulers: tuple[tuple[str, Any], ...]
    random: Any
    batches: tuple[BatchState, ...]


def load(path: str | os.PathLike[str]) -> Capsule:
    """Reads a capsule; CapsuleError says in one line what is wrong with it."""
    file = CapsuleFile(path)
    try:
        return _Manifest(file).capsule()
    except (CapsuleError, ReportError) as error:
        raise CapsuleError(f"{os.fspath(path)}: {error}") from None
    except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
        raise CapsuleError(f"{os.fspath(path)}: corrupt capsule: the manifest is incomplete or malformed") from None


class _Manifest:
    """Decodes the manifest; malformed fields raise one of the errors that `load` expects."""

    def __init__(self, file: CapsuleFile) -> None:
        self._file, self._reader = file, Reader(file.stored)

    def capsule(self) -> Capsule:
        data = self._file.manifest
        return Capsule(
            file=self._file,
            report=Report.from_dict(as_dict(data["report"])),
            environment={as_text(k): v for k, v in as_dict(data["environment"]).items()},
            sources={as_text(k): as_text(v) for k, v in as_dict(data["sources"]).items()},
            left_out=tuple(as_text(t) for t in as_list(data["left_out"])),
            steps=_steps(as_dict(data["steps"]), len(as_list(data["optimizers"]))),
            suppressed=as_count(data["suppressed"]),
            models=tuple(self._model(as_dict(m)) for m in as_list(data["models"])),
            optimizers=tuple(self._optimizer(as_dict(o), len(data["models"])) for o in data["optimizers"]),
            scalers=tuple(as_dict(self._reader.value(s)) for s in as_list(data["scalers"])),
            schedulers=tuple((as_text(k), as_dict(self._reader.value(s))) for k, s in as_list(data["schedulers"])),
            random=self._random(data["random"]),
            batches=tuple(self._batch(as_dict(b)) for b in as_list(data["batches"])),
        )

    def _model(self, data: dict[str, Any]) -> ModelState:
        parameters = {as_text(n): self._tensor(v) for n, v in as_list(data["parameters"])}
        return ModelState(as_text(data["kind"]), parameters, {as_text(n): self._tensor(v) for n, v in data["buffers"]})

    def _tensor(self, node: Any) -> Any:
        value = self._reader.value(node)
        if not isinstance(value, Packed | Sparse | Missing):
            raise TypeError
        return value

    def _optimizer(self, data: dict[str, Any], models: int) -> OptimizerState:
        groups = []
        for group in map(as_dict, as_list(data["groups"])):
            settings = as_dict(self._reader.value(group["settings"]))
            parameters = tuple(self._parameter(p, models) for p in as_list(group["parameters"]))
            groups.append(GroupState({as_text(k): v for k, v in settings.items()}, parameters))
        return OptimizerState(as_text(data["kind"]), tuple(groups))

    def _parameter(self, node: Any, models: int) -> ParameterState:
        where, value, state = as_list(node)
        name = None
        if where is not None:
            at, inside = as_list(where)
            name = (as_count(at, models), as_text(inside))
        known = None if state is None else self._reader.value(state)
        return ParameterState(name, None if value is None else self._tensor(value), known)

    def _batch(self, data: dict[str, Any]) -> BatchState:
        value, random = self._reader.value(data["value"]), self._random(data["random"])
        indices = self._reader.value(data["indices"])
        return BatchState(as_count(data["source"]), as_count(data["index"]), indices, value, random)

    def _random(self, node: Any) -> Any:
        if node is None:
            return None
        random = as_dict(self._reader.value(node))
        if set(random) != {"python", "numpy", "torch", "cuda"} or not isinstance(random["torch"], Packed):
            raise ValueError
        if not all(isinstance(state, Packed) for state in as_list(random["cuda"])):
            raise TypeError
        return random


def _steps(data: dict[str, Any], optimizers: int) -> StepNumbers:
    done = tuple(as_count(n) for n in as_list(data["done"]))
    if len(done) != optimizers:
        raise ValueError
    last = None if data["last"] is None else as_count(data["last"], optimizers)
    follows = tuple(
        (as_count(a, optimizers), as_count(b, optimizers)) for a, b in map(as_list, as_list(data["follows"]))
    )
    return StepNumbers(
        as_count(data["current"]), as_count(data["total"]), as_count(data["manual"]), done, last, follows
    )


# --- the values in the manifest: plain ones, and what stands for tensors and objects -----------------------------

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
