"""Checks the options of a detector; an error names the option, what it must be, and what was given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any


def require_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")


def require_positive(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive number, got {value!r}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {value!r}")


def require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def require_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")


def types_and_names(name: str, value: Any) -> tuple[type | str, ...]:
    """The types, names and globs in `value`, which may be a single one."""
    if isinstance(value, type | str):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must hold types, names or globs, got {value!r}")
    found = tuple(value)
    for one in found:
        if not isinstance(one, type | str):
            raise TypeError(f"{name} must hold types, names or globs, got {one!r}")
    return found
