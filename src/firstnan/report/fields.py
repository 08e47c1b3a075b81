"""Checked reading of JSON values: each method hands out one field in its type or raises ReportError naming it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**63 - 1
DEEPEST = 24
MOST_DIMS = 64


class ReportError(ValueError):
    """A report that cannot be read or written; the message is one line that says what is wrong."""


class Fields:
    """One JSON object and its place in the report (`origin.inputs[0]`); null counts as missing."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(where or "the report", "an object", value)
        self._data: dict[str, Any] = value
        self._where = where

    def _at(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def error(self, message: str) -> ReportError:
        return ReportError(f"{self._where}: {message}")

    def text(self, key: str, *, required: bool = False) -> str:
        value = self._data.get(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str):
            raise _wrong(self._at(key), "a string", value)
        return value

    def integer(self, key: str) -> int | None:
        value = self._data.get(key)
        return None if value is None else _integer(value, self._at(key))

    def count(self, key: str, default: int = 0) -> int:
        value = self._data.get(key)
        return default if value is None else _integer(value, self._at(key), least=0)

    def real(self, key: str) -> float | None:
        return None if self._data.get(key) is None else self.number(key)

    def number(self, key: str) -> float:
        """A number that has to be there; the strings "nan", "inf" and "-inf" are numbers too."""
        return _number(self._data.get(key), self._at(key))

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(_number(value, where) for value, where in self.items(key))

    def flag(self, key: str) -> bool | None:
        value = self._data.get(key)
        if value is not None and not isinstance(value, bool):
            raise _wrong(self._at(key), "true or false", value)
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        value, allowed = self._data.get(key), tuple(allowed)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise _wrong(self._at(key), "one of " + ", ".join(allowed), value)
        return value

    def items(self, key: str) -> list[tuple[Any, str]]:
        """The elements of a list, each with its place."""
        value = self._data.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise _wrong(self._at(key), "a list", value)
        return [(v, f"{self._at(key)}[{i}]") for i, v in enumerate(value)]

    def texts(self, key: str) -> tuple[str, ...]:
        items = self.items(key)
        for value, where in items:
            if not isinstance(value, str):
                raise _wrong(where, "a string", value)
        return tuple(value for value, _ in items)

    def indices(self, key: str) -> tuple[int, ...] | None:
        """Whole numbers from 0 up: a shape, an index, samples; None where the field is missing."""
        if self._data.get(key) is None:
            return None
        items = self.items(key)
        if key in ("shape", "first_index") and len(items) > MOST_DIMS:  # torch itself stops at 64 dimensions
            raise ReportError(f"{self._at(key)}: {len(items)} dimensions are too many")
        return tuple(_integer(value, where, least=0) for value, where in items)

    def child(self, key: str) -> Fields | None:
        value = self._data.get(key)
        return None if value is None else Fields(value, self._at(key))

    def made(self, key: str, make: Callable[[Fields], T]) -> T | None:
        """What `make` builds from the object at `key`; None where there is no object."""
        child = self.child(key)
        return None if child is None else make(child)

    def children(self, key: str) -> list[Fields]:
        return [Fields(value, where) for value, where in self.items(key)]

    def mapping(self, key: str) -> dict[str, Any]:
        """An object whose values may be any JSON."""
        value = self._data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise _wrong(self._at(key), "an object", value)
        checked: dict[str, Any] = json_value(value, self._at(key))
        return checked


def names_and_values(fields: Fields, key: str) -> Iterator[tuple[str, Any, str]]:
    """The (name, value, place) of a list of {"name": ..., "value": ...}."""
    for value, where in fields.items(key):
        entry = Fields(value, where)
        yield entry.text("name"), value.get("value"), where


def json_value(value: Any, where: str, depth: int = 0) -> Any:
    """`value` itself if it is JSON of a bearable depth with bearable numbers."""
    if depth > DEEPEST:
        raise ReportError(f"{where}: nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _wrong(where, "only strings as keys", key)
            json_value(item, where, depth + 1)
    elif isinstance(value, list):
        for item in value:
            json_value(item, where, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        _integer(value, where)
    elif value is not None and not isinstance(value, bool | float | str):
        raise _wrong(where, "a JSON value", value)
    return value


def _integer(value: object, where: str, least: int = -LARGEST) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(where, "a whole number", value)
    if value > LARGEST:
        raise ReportError(f"{where}: the number is too large")
    if value < least:
        raise ReportError(f"{where}: the number is too small")
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
        raise _wrong(where, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise ReportError(f"{where}: the number is too large") from None


def _wrong(where: str, expected: str, value: object) -> ReportError:
    if value is None:
        return ReportError(f"{where} is missing")
    shown = ascii(reprlib.repr(value))[1:-1] if isinstance(value, str | bool | float) else type(value).__name__
    return ReportError(f"{where}: expected {expected}, found {shown}")
