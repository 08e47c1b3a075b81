"""What the options of a detector may be; an error names the option and what was given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any


def whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")


def positive(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is a positive number, not {value!r}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is a positive number, not {value!r}")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is True or False, not {value!r}")


def function(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} is a function, not {value!r}")


def types_and_names(name: str, value: Any) -> tuple[type | str, ...]:
    """A single one is as good as several."""
    if isinstance(value, type | str):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} holds types, names and globs, not {value!r}")
    found = tuple(value)
    for one in found:
        if not isinstance(one, type | str):
            raise TypeError(f"{name} holds types, names and globs, not {one!r}")
    return found
