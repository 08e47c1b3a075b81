"""Finding objects of a type in the process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from torch.nn import Linear, Module
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.observe.standstill import collector_paused
from firstnan.tensors.live_objects import find_live_objects, live_iterator, visit_before_fork
from firstnan.tensors.models import switch_on


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


@pytest.mark.parametrize("collected", [(), (0,), (1,), (2,), (0, 1), (1, 0), (2, 0)])
def test_a_model_is_found_once_whatever_was_collected_since(collected: tuple[int, ...]) -> None:
    before, old = find_live_objects(Module), Linear(2, 2)
    gc.collect()
    assert ids(find_live_objects(Module)) == ids([*before, old])
    new = Linear(2, 2)
    for generation in collected:
        gc.collect(generation)
    assert ids(find_live_objects(Module)) == ids([*before, old, new])
    assert ids(find_live_objects(Optimizer, Linear)) == ids(o for o in (*before, old, new) if isinstance(o, Linear))
    del old
    assert ids(find_live_objects(Module)) == ids([*before, new])


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="objects grow old a few at a time")
def test_old_objects_are_visited_once_until_more_of_them_grow_old(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Linear(2, 2)
    gc.collect()
    visits, all_objects = list[int | None](), gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda age=None: (visits.append(age), all_objects(age))[1])
    for kind in (Module, LRScheduler, Module):
        gc.collect(0)
        found = find_live_objects(kind)
    assert any(one is model for one in found)
    assert visits.count(2) == 1
    assert None not in visits
    gc.collect(1)
    find_live_objects(Module)
    assert visits.count(2) == 2


def ids(things: Iterable[Any]) -> list[int]:
    return sorted(map(id, things))


def test_what_a_gan_has_switched_off_is_told_from_what_is_frozen() -> None:
    first, second, frozen = (Linear(2, 2) for _ in range(3))
    stepped = SGD(first.parameters(), lr=0.1)
    waiting = SGD(second.parameters(), lr=0.1)
    partly = SGD([*Linear(2, 2).parameters(), *frozen.parameters()], lr=0.1)
    second.requires_grad_(False)  # before the first step of its optimizer
    frozen.requires_grad_(False)
    assert all(any(p is q for q in second.parameters()) for p in switch_on([stepped]))
    assert all(p.requires_grad for p in second.parameters())
    assert not any(p.requires_grad for p in frozen.parameters())
    del waiting, partly


@pytest.mark.parametrize("age", [0, 1, 2])
def test_an_iterator_is_found_by_its_address_and_nothing_else_is(age: int) -> None:
    iterator, other = enumerate([1, 2]), {"not": ["an iterator"]}
    for generation in range(age):
        gc.collect(generation)
    next(iterator)
    assert live_iterator(id(iterator)) is iterator
    assert live_iterator(id(other)) is None
    assert live_iterator(id(iterator) + 8) is None
    assert live_iterator(0) is None


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="objects grow old a few at a time")
def test_old_objects_are_visited_before_a_fork_and_not_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Linear(2, 2)
    optimizer, iterator = SGD(model.parameters(), lr=0.1), iter([1])
    gc.collect()
    with collector_paused():
        visit_before_fork()
        visits, all_objects = list[int | None](), gc.get_objects
        monkeypatch.setattr(gc, "get_objects", lambda age=None: (visits.append(age), all_objects(age))[1])
        garbage = [[] for _ in range(100_000)]  # enough for a collection
        del garbage
        switch_on([])
        assert live_iterator(id(iterator)) is iterator
        assert any(one is optimizer for one in find_live_objects(Optimizer))
    assert {*visits} == {0, 1}
    assert gc.isenabled()
