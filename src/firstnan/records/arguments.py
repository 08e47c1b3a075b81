"""Checks of what a caller has passed: one sentence each, `X must be Y, got Z`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any


def short(given: Any) -> str:
    """What was passed, in a word."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    plain = isinstance(given, str | bytes | bool | int | float | None)
    return repr(given)[:60] if plain else type(given).__name__


def require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function, got {short(value)}")


def require_string(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {short(value)}")


def require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {short(value)}")


def require_path(name: str, value: Any) -> None:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {short(value)}")


def require_batches(name: str, value: Any) -> None:
    """Anything that yields batches; a string or a table does not."""
    if isinstance(value, str | bytes | Mapping) or not (isinstance(value, Iterable) or hasattr(value, "__getitem__")):
        raise TypeError(f"{name} must yield batches, such as a DataLoader or a list, got {short(value)}")


def require_pairs(name: str, value: Any) -> list[tuple[Any, Any]]:
    """The pairs in `value`."""
    found = list(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) else [value]
    for one in found:
        if not isinstance(one, tuple | list) or len(one) != 2:
            raise TypeError(f"{name} must be pairs (step number, state), got {short(one)}")
    return [(one[0], one[1]) for one in found]


def require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number from 0 to 1, got {short(value)}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")
