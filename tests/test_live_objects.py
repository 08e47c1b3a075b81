"""Finding objects of a type in the process."""

from __future__ import annotations

import gc
from typing import Any

from firstnan.tensors.models import find_live_objects


class Kind:
    pass


class Derived(Kind):
    pass


class Deeper(Derived):
    pass


class Strange(type):
    """Its classes cannot be hashed, nor asked for a subclass."""

    def __eq__(cls, other: object) -> bool:
        raise ArithmeticError

    __hash__ = None  # type: ignore[assignment]

    def __subclasscheck__(cls, other: Any) -> bool:
        raise ArithmeticError


class Unhashable(metaclass=Strange):
    def __init__(self) -> None:
        self.itself = self


def test_subclasses_are_found_and_other_types_are_not() -> None:
    one, two, three, other = Kind(), Derived(), Deeper(), Unhashable()
    one.held, two.held, three.held = [], [], []  # type: ignore[attr-defined]
    assert {id(o) for o in find_live_objects(Kind)} == {id(one), id(two), id(three)}
    assert {id(o) for o in find_live_objects(Derived, Unhashable)} == {id(two), id(three), id(other)}


def test_deleted_objects_are_not_found() -> None:
    one = Kind()
    del one
    gc.collect()
    assert find_live_objects(Kind) == []
