"""What a process holds of a kind, wherever it is kept: models, schedulers, optimizers that nobody handed over."""

from __future__ import annotations

import gc
from typing import Any


def alive(*kinds: type) -> list[Any]:
    """Every object of these types and of all that derive from them (slow: all objects are looked at)."""
    # By identity: to ask a type whether it is a subclass takes several times as long, and some cannot be hashed.
    types = {id(t) for kind in kinds for t in _derived(kind)}
    return [thing for thing in gc.get_objects() if id(type(thing)) in types]


def _derived(kind: type) -> list[type]:
    found = [kind]
    for derived in found:
        found += type.__subclasses__(derived)
    return found
