"""Views of one memory: overlap and cover against a slow, obvious comparison of element numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from firstnan.tracing.memory import Memory, Region, covers, overlap

VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: t[0],
    lambda t: t[1:],
    lambda t: t[:, 1],
    lambda t: t[:, ::2],
    lambda t: t[::2, 1:],
    lambda t: t.T,
    lambda t: t.T[2],
    lambda t: t.reshape(-1)[3:7],
    lambda t: t.diagonal(),
    lambda t: t[1, 2],
    lambda t: t[:1].expand(3, 4),
]


@pytest.mark.parametrize(("a", "b"), list(itertools.product(range(len(VIEWS)), repeat=2)))
def test_overlap_and_cover(a: int, b: int) -> None:
    base = torch.arange(12).reshape(3, 4)
    one, two = VIEWS[a](base), VIEWS[b](base)
    elements_a, elements_b = set(one.flatten().tolist()), set(two.flatten().tolist())
    region_a, region_b = Region.of(one), Region.of(two)
    assert overlap(region_a, region_b) == bool(elements_a & elements_b)
    assert covers(region_a, region_b) == (elements_b <= elements_a)


def test_an_empty_view_overlaps_nothing() -> None:
    base = torch.zeros(3, 4)
    assert not any(overlap(Region.of(base[2:2]), Region.of(view(base))) for view in VIEWS)


def test_views_of_another_type_are_compared_by_their_span() -> None:
    base = torch.zeros(8)
    assert overlap(Region.of(base.view(torch.int16)[:4]), Region.of(base[:2]))
    assert not overlap(Region.of(base.view(torch.int16)[:4]), Region.of(base[2:]))
    assert not covers(Region.of(base.view(torch.int16)), Region.of(base))


def test_a_key_belongs_to_one_storage_for_ever() -> None:
    memory = Memory()
    t = torch.ones(4)
    assert memory.key(t) == memory.key(t[1:]) == memory.key(t.view(2, 2).T) == memory.key(torch.nn.Parameter(t))
    seen = set()
    for _ in range(100):
        fresh = torch.ones(64)
        seen.add(memory.key(fresh))
        del fresh
        memory.roots()
        memory.renumber({}, set())
    assert len(seen) == 100


def test_bad_writers_by_place() -> None:
    memory = Memory()
    t = torch.zeros(3, 3)
    key = memory.key(t)
    assert key is not None
    memory.wrote(key, t, 0, bad=False)
    memory.wrote(key, t[0], 1, bad=True)
    memory.wrote(key, t[2], 2, bad=True)
    assert memory.bad_writers(key, t) == (1, 2)
    assert memory.bad_writers(key, t[0]) == (1,)
    assert memory.bad_writers(key, t[1]) == ()
    memory.wrote(key, t[:2], 3, bad=False)
    assert memory.bad_writers(key, t) == (2,)
    memory.wrote(key, t, 4, bad=False)
    assert not memory.may_be_bad(key, t)
    assert memory.writer[key] == 4


def test_memory_that_nobody_wrote_to() -> None:
    memory = Memory()
    t = torch.empty(4)
    key = memory.key(t)
    assert key is not None
    memory.allocated(key, 7)
    assert memory.may_be_bad(key, t)
    assert memory.bad_writers(key, t) == (7,)
    memory.wrote(key, t[:2], 8, bad=False)
    assert memory.bad_writers(key, t) == (7,)
    memory.wrote(key, t, 9, bad=False)
    assert memory.bad_writers(key, t) == ()


def test_what_comes_from_outside() -> None:
    memory = Memory()
    good, bad = torch.ones(4), torch.tensor([1.0, math.nan])
    assert not memory.may_be_bad(memory.key(good), good)
    assert memory.may_be_bad(memory.key(bad), bad)
    part = torch.tensor([1.0, 2.0, math.nan])[:2]
    assert memory.may_be_bad(memory.key(part), part), "of a part nothing follows for the rest"
    assert memory.bad_writers(memory.key(bad), bad) == ()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_memory() -> None:
    memory = Memory()
    for t in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        key = memory.key(t)
        assert key is not None
        memory.wrote(key, t, 3, bad=True)
        assert memory.bad_writers(key, t) == (3,)
