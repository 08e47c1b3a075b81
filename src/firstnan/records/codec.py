"""Records as JSON values and back: one codec for all of them, driven by the fields and their types.

A record becomes an object of its fields. Reading trusts nothing: every value is checked against the type of its
field, and ReportError says in one line which field is wrong, what it must be and what was found. A field without a
default must be there, null counts as missing, and unknown fields are ignored, so a record may gain fields with
defaults. Where the JSON is not simply the fields, `FORMS` says how it differs.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

LARGEST = 2**63 - 1
DEEPEST = 24


class ReportError(ValueError):
    """A report that cannot be read or written; the message is one line that says what is wrong."""


@dataclass(frozen=True, slots=True)
class Form:
    """How the JSON of one record differs from its fields."""

    own: tuple[str, ...] = ()
    """Fields that only `write` and `read` below handle."""
    first: tuple[str, ...] = ()
    """Keys that are written first, in this order."""
    write: Callable[[Any], dict[str, Any]] = lambda record: {}
    """Keys to add, or to write differently."""
    check: Callable[[dict[str, Any], str], None] = lambda data, where: None
    """Raises ReportError where the object as a whole is wrong; called before any field is read."""
    read: Callable[[dict[str, Any], str, dict[str, Any]], dict[str, Any]] = lambda data, where, values: {}
    """Values for fields that were not read: those in `own`, and substitutes for missing ones."""


FORMS: dict[type, Form] = {}
"""Filled by `firstnan.records`."""


# --- writing ---------------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """`value` as JSON values: records as objects, tuples as lists, non-finite numbers as "nan", "inf" and "-inf"."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        form = FORMS.get(type(value), Form())
        data = {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.name not in form.own}
        data |= form.write(value)
        return {key: data[key] for key in form.first if key in data} | data
    return str(value)


def encode_record(record: Any) -> dict[str, Any]:
    """`encode` for a record, whose JSON is an object."""
    return cast(dict[str, Any], encode(record))


def dumps(value: Any) -> str:
    """`value` as the text of a JSON file."""
    return json.dumps(encode(value), indent=1, allow_nan=False) + "\n"


# --- reading ---------------------------------------------------------------------------------------------------


def loads(text: str | bytes) -> Any:
    """The value in the text of a JSON file; ReportError where it is not strict JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ReportError("not a firstnan report: nested too deeply") from None
    except ReportError:
        raise
    except ValueError as error:  # bad JSON, bad UTF-8, or a number with thousands of digits
        raise ReportError(f"not JSON: {str(error).splitlines()[0]}" if text else "the file is empty") from None


def _refuse_constant(name: str) -> Any:
    text = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}[name]
    raise ReportError(f'not a firstnan report: {name} must be written as the string "{text}"')


def decode(cls: type[T], data: object, where: str = "") -> T:
    """The record of this class that `encode` wrote; `where` is its place in the report (`origin.inputs[0]`)."""
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    form, (hints, required) = FORMS.get(cls, Form()), _types(cast(Any, cls))
    form.check(data, where)
    values: dict[str, Any] = {
        name: decode_value(hint, data[name], field_at(where, name))
        for name, hint in hints.items()
        if name not in form.own and data.get(name) is not None
    }
    values = form.read(data, where, values) | values
    for name in required:
        if name not in values:
            values[name] = decode_value(hints[name], None, field_at(where, name))
    try:
        return cls(**values)
    except ValueError as error:  # what the record itself refuses
        raise ReportError(f"{where or 'the report'}: {error}") from None


def decode_value(hint: Any, value: Any, where: str) -> Any:
    """`value` checked against the type `hint`, as Python has it: lists as tuples, the string "nan" as a float."""
    kind, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return _json_value(value, where)
    if kind in (Union, UnionType):
        (inner,) = (option for option in options if option is not type(None))
        return None if value is None else decode_value(inner, value, where)
    if kind is Literal:
        if not isinstance(value, str) or value not in options:
            raise _wrong(where, "one of " + ", ".join(options), value)
        return value
    if kind is tuple:
        return _items(options, value, where)
    if kind is dict:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        return {_key(key, where): decode_value(options[1], item, where) for key, item in value.items()}
    if is_dataclass(hint):
        return decode(cast("type[Any]", hint), value, where)
    return _SIMPLE[hint](value, where)


def field_at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


@cache
def _types(cls: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a record's fields by name, and the names of those without a default."""
    hints = get_type_hints(cls)
    required = tuple(f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in fields(cls)}, required


def prepare(hint: Any) -> None:
    """Resolves a record's types and those of the records inside it; TypeError if the codec cannot read one of them.

    Done at import: reading a file then evaluates no annotation, and cannot fail on a type.
    """
    if is_dataclass(hint):
        for inner in _types(cast(Any, hint))[0].values():
            prepare(inner)
    elif get_origin(hint) in (Union, UnionType, tuple, dict):
        for inner in get_args(hint):
            prepare(inner)
    elif hint not in (*_SIMPLE, Any, type(None), ...) and get_origin(hint) is not Literal:
        raise TypeError(f"a record cannot have a field of type {hint}")


def _items(options: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    """The elements of `tuple[X, ...]`, or of a tuple that names the type of each."""
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    kinds = [options[0]] * len(value) if options[1:] == (...,) else options
    if len(kinds) != len(value):
        raise ReportError(f"{where} must have {len(kinds)} elements, got {len(value)}")
    return tuple(decode_value(kind, v, f"{where}[{i}]") for i, (kind, v) in enumerate(zip(kinds, value, strict=True)))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a string", value)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


def _count(value: Any, where: str) -> int:
    """A count, a position or an index: no record has a negative integer."""
    if _integer(value, where) < 0:
        raise _wrong(where, "0 or more", value)
    return cast(int, value)


def _integer(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, "an integer", value)
    if abs(value) > LARGEST:
        raise ReportError(f"{where} is too large: the limit is {LARGEST}")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
        raise _wrong(where, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise ReportError(f"{where} is too large for a number") from None


_SIMPLE: dict[Any, Callable[[Any, str], Any]] = {str: _text, bool: _flag, int: _count, float: _number}


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise _wrong(f"each key of {where}", "a string", key)
    return key


def _json_value(value: Any, where: str, depth: int = 1) -> Any:
    """`value` itself, if it is JSON of limited depth with limited integers."""
    if depth > DEEPEST:
        raise ReportError(f"{where} is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            _key(key, where)
            _json_value(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _json_value(item, where, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        _integer(value, where)
    elif value is not None and not isinstance(value, bool | float | str):
        raise _wrong(where, "a JSON value", value)
    return value


def _wrong(where: str, expected: str, value: object) -> ReportError:
    where = where or "the report"
    if value is None:
        return ReportError(f"{where} is missing")
    return ReportError(f"{where} must be {expected}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A value in a few printable characters; of a container, or a huge integer, only what it is."""
    if isinstance(value, str | float) or (isinstance(value, int) and abs(value) <= LARGEST):
        return ascii(reprlib.repr(value))[1:-1]
    return {list: "a list", dict: "an object", int: "a huge integer"}.get(type(value), type(value).__name__)
