"""What goes into a capsule comes out of it: tensors of every kind, batches of every shape, and what cannot be kept."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from firstnan.capsule import file
from firstnan.capsule.content import DTYPES, RAW, Reader
from firstnan.capsule.packing import Packer, Unpacker


@pytest.fixture
def through(tmp_path: Path) -> Any:
    """Packs a value, writes it, reads it, unpacks it; `like` is what the program has there."""

    def go(value: Any, like: Any = None) -> tuple[Any, set[str]]:
        packer = Packer()
        node = packer.node(value)
        path = file.write(tmp_path / "x", {"format": file.FORMAT, "version": 1, "value": node}, packer.tensors)
        opened = file.CapsuleFile(path)
        unpacker = Unpacker(opened)
        made = unpacker.value(Reader(opened.stored).value(opened.manifest["value"]), like)
        return made, packer.left_out | unpacker.notes

    return go


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


@pytest.mark.parametrize("name", [name for name in (*DTYPES, *RAW) if hasattr(torch, name)])  # 2.6 lacks e8m0
@pytest.mark.parametrize("shape", [(), (3, 4), (0, 2)])
def test_every_type_of_element(through: Any, name: str, shape: tuple[int, ...]) -> None:
    size = RAW.get(name) or torch.empty(0, dtype=getattr(torch, name)).element_size()
    raw = torch.arange(math.prod(shape) * size, dtype=torch.uint8) % (2 if name == "bool" else 251)
    t = raw.view(getattr(torch, name)).reshape(shape)
    made, notes = through(t)
    assert same(t, made)
    assert not notes


def test_order_in_memory_is_kept(through: Any) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    expanded = torch.randn(1, 3).expand(1_000_000, 3)
    slices = torch.randn(8, 8)[::2, 1:5]
    (a, b, c, d), notes = through((image, expanded, slices, slices.t()))
    assert not notes
    assert same(image, a)
    assert a.stride() == image.stride()
    assert b.stride() == expanded.stride()
    assert torch.equal(b[::1000], expanded[::1000])
    assert same(slices, c)
    assert same(slices.t(), d)


def test_an_expanded_tensor_takes_the_room_of_what_it_is_made_of() -> None:
    packer = Packer()
    packer.node(torch.zeros(1, 1).expand(1 << 20, 1 << 20))
    assert packer.nbytes == 4


def test_what_is_one_tensor_is_kept_once_and_comes_back_as_one(through: Any) -> None:
    t = torch.randn(5)
    packer = Packer()
    packer.node([t, t, t.detach(), t.view(5)])
    assert len(packer.tensors) == 1
    (a, b, c), _ = through([t, t, t.clone()])
    assert a is b
    assert a is not c
    (a, b), _ = through([t[:4], t[1:]])
    assert same(a, t[:4])
    assert same(b, t[1:])


def test_conjugates_gradients_and_sparse_ones(through: Any) -> None:
    wave = torch.randn(3, dtype=torch.complex64).conj()
    leaf = torch.randn(2, requires_grad=True)
    sparse = torch.sparse_coo_tensor([[0, 2], [1, 0]], [1.0, math.nan], (3, 4)).coalesce()
    (a, b, c), notes = through([wave, leaf, sparse])
    assert torch.equal(a, wave)
    assert b.requires_grad
    assert c.is_sparse
    assert c.is_coalesced()
    assert same(c.to_dense(), sparse.to_dense())
    assert not notes


class Point(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Sample:
    image: Tensor
    label: int


class Graph:
    def __init__(self, nodes: Tensor) -> None:
        self.nodes, self.parent = nodes, self


class Table(collections.OrderedDict):  # type: ignore[type-arg]
    pass


class Colour(enum.Enum):
    RED = 1


def test_plain_values(through: Any) -> None:
    value = {
        "a": [1, -2.5, True, None, "text", b"\0\xff", 1 + 2j],
        7: (1, (2,), []),
        (1, "k"): {},
        "inf": [math.inf, -math.inf],
    }
    made, notes = through(value)
    assert made == value
    assert [type(k) for k in made] == [str, int, tuple, str]
    assert type(made[7]) is tuple
    assert math.isnan(through(math.nan)[0])
    assert not notes


def test_numpy(through: Any) -> None:
    value = [
        np.arange(6, dtype="int16").reshape(2, 3)[:, ::2],
        np.array(["ab", "c"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([1 + 2j]),
        np.float32(1.5),
        np.array(3.0),
        np.zeros((0, 3)),
        np.arange(3, dtype=">i4").astype(">f4"),
    ]
    made, notes = through(value)
    for a, b in zip(value, made, strict=True):
        assert type(a) is type(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert not notes
    objects, notes = through([np.array([object()])], ["mine"])
    assert objects == ["mine"]
    assert notes


def test_objects_are_made_after_those_of_the_program(through: Any) -> None:
    x, y = torch.randn(3), torch.randn(3)
    value = [Point(x, "a"), Sample(x, 3), Table(a=x), Graph(x), [Sample(x, 1), Sample(x, 2)]]
    like = [Point(y, "b"), Sample(y, 4), Table(z=y), Graph(y), [Sample(y, 0)]]
    made, _ = through(value, like)
    assert [type(m) for m in made] == [Point, Sample, Table, Graph, list]
    assert torch.equal(made[0].x, x)
    assert made[0].name == "a"
    assert torch.equal(made[1].image, x)
    assert made[1].label == 3
    assert list(made[2]) == ["a"]
    assert torch.equal(made[3].nodes, x)
    assert [s.label for s in made[4]] == [1, 2]
    assert torch.equal(like[1].image, y), "the program's own is left alone"


def test_without_the_program_they_are_plain_values_and_that_is_said(through: Any) -> None:
    made, notes = through([Sample(torch.ones(2), 3), Point(torch.ones(2), "n")])
    assert made[0]["label"] == 3
    assert made[1][1] == "n"
    assert any("Sample" in note for note in notes)


def test_what_cannot_be_kept_is_said_and_the_programs_own_used(through: Any) -> None:
    quantised = torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8)
    meta = torch.empty(3, device="meta")
    made, notes = through([quantised, meta, Colour.RED, print], ["own 1", "own 2", "own 3", "own 4"])
    assert made == ["own 1", "own 2", "own 3", "own 4"]
    assert any("qint8" in note for note in notes)
    assert any("meta" in note for note in notes)
    assert any("Colour" in note for note in notes)


@pytest.mark.parametrize("kind", Reader({})._kinds)
@pytest.mark.parametrize("inner", [None, 3, "x", [], {}, [[]], {"name": 3}], ids=str)
def test_a_malformed_node_raises_nothing_but_a_capsule_error(kind: str, inner: Any) -> None:
    with contextlib.suppress(file.CapsuleError):
        Reader({}).value({kind: inner})


def test_a_batch_that_holds_itself_ends_somewhere(through: Any) -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    _, notes = through(endless)
    assert "values nested too deeply" in notes
