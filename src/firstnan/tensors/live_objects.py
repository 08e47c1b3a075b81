"""Finds every live object of a type in the process: models, schedulers and optimizers that nobody passed to us."""

from __future__ import annotations

import gc
from typing import Any


def find_live_objects(*kinds: type) -> list[Any]:
    """Every object of these types and their subclasses (slow: it visits all objects)."""
    # Compared by identity: `issubclass` is several times slower, and some types cannot be hashed.
    types = {id(t) for kind in kinds for t in _with_subclasses(kind)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in types]


def _with_subclasses(kind: type) -> list[type]:
    found = [kind]
    for derived in found:
        found += type.__subclasses__(derived)
    return found
