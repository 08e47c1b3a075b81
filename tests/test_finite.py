"""finite.py against a slow, obvious reading of `.tolist()`."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from firstnan.tensors.finite import (
    extremes,
    is_finite,
    norms,
    plain_norm,
    readable,
    same_numbers,
    stat,
    surely_finite,
    tensors_in,
    unravel,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
VALUES = {
    "finite": [0.0, 1.5, -2.0, 0.0, 3.0, -0.25],
    "nan": [0.0, NAN, -2.0, 0.0, NAN, 1.0],
    "inf": [0.0, 1.5, INF, 0.0, 3.0, -1.0],
    "neginf": [-INF, 1.5, -INF, 0.0, 3.0, 1.0],
    "all kinds": [-INF, NAN, INF, 0.0, 3.0, -1.0],
    "mask": [0.0, -INF, 0.0, -INF, 0.0, 0.0],
    "nothing finite": [NAN, INF, -INF, NAN, NAN, INF],
    "binary": [0.0, 1.0, 1.0, 0.0, 0.0, 1.0],
}


def elements(t: Tensor) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Every element with its index, the slow way."""
    for index in itertools.product(*(range(n) for n in t.shape)):
        yield index, t[index].tolist()


def expected(t: Tensor) -> dict[str, Any]:
    """The statistics by going through the elements one by one."""
    pairs = list(elements(t))
    good = [v for _, v in pairs if math.isfinite(v)]
    bad = [i for i, v in pairs if not math.isfinite(v)]
    return {
        "min": min(good, default=None),
        "max": max(good, default=None),
        "smallest": min((abs(v) for v in good), default=None),
        "zeros": sum(v == 0 for v in good),
        "negative": sum(v < 0 for v in good),
        "nan": sum(math.isnan(v) for _, v in pairs),
        "posinf": sum(v == INF for _, v in pairs),
        "neginf": sum(v == -INF for _, v in pairs),
        "first_index": bad[0] if bad else None,
        "binary": bool(good) and all(v in (0, 1) for v in good),
    }


def shown(t: Tensor) -> dict[str, Any]:
    s = stat("t", t)
    assert (s.shape, s.dtype) == (tuple(t.shape), str(t.dtype).removeprefix("torch."))
    return {name: getattr(s, name) for name in expected(torch.zeros(1))}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 1, 2)], ids=str)
def test_statistics_of_dense_tensors(dtype: torch.dtype, kind: str, shape: tuple[int, ...]) -> None:
    t = torch.tensor(VALUES[kind], dtype=dtype).reshape(shape)
    assert shown(t) == expected(t)
    assert is_finite(t) == all(math.isfinite(v) for _, v in elements(t))


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.reshape(2, 3).T,
        lambda t: t[::2],
        lambda t: t.reshape(2, 3)[:, 1],
        lambda t: t.flip(0),
        lambda t: t[:1].expand(4, 1),
        lambda t: t.reshape(2, 3).expand(2, 2, 3),
        lambda t: t.requires_grad_(),
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["transposed", "strided", "column", "flipped", "one expanded", "expanded", "with grad", "parameter"],
)
def test_statistics_of_views(kind: str, view: Any) -> None:
    t = view(torch.tensor(VALUES[kind]))
    assert shown(t) == expected(t)
    assert is_finite(t) == all(math.isfinite(v) for _, v in elements(t))


@pytest.mark.parametrize("value", [0.0, -3.0, NAN, INF, -INF])
def test_a_single_number(value: float) -> None:
    t = torch.tensor(value)
    assert shown(t) == expected(t)
    assert stat("t", t).first_index == (None if math.isfinite(value) else ())
    assert is_finite(t) == math.isfinite(value)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8(dtype: torch.dtype) -> None:
    t = torch.tensor([0.5, NAN, -2.0]).to(dtype)
    assert shown(t) == expected(t.float())
    assert not is_finite(t)
    assert is_finite(t[::2])
    if dtype is torch.float8_e5m2:  # the other one has no infinity
        assert stat("t", torch.tensor([INF, 1.0]).to(dtype)).posinf == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_elements_are_counted_once(dtype: torch.dtype, conjugate: bool) -> None:
    t = torch.tensor([[1 + 1j, complex(NAN, NAN)], [complex(0, INF), complex(NAN, -INF)]], dtype=dtype)
    t = t.conj() if conjugate else t
    s = stat("t", t)
    assert s.shape == (2, 2)
    assert s.nan == 2
    assert s.bad <= s.numel
    assert s.first_index == (0, 1)
    assert not is_finite(t)
    assert not is_finite(t[1, :1])
    assert is_finite(t[0, :1])


def test_a_complex_number_is_zero_if_both_parts_are() -> None:
    s = stat("t", torch.tensor([0j, -1 + 0j, -2j, complex(0, INF)]))
    assert (s.zeros, s.negative, s.posinf) == (1, 0, 1)


def test_sparse_coo() -> None:
    t = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], [3.0, NAN, -INF], (2, 3))
    s = stat("t", t)
    assert (s.shape, s.nan, s.neginf, s.max) == ((2, 3), 1, 1, 3.0)
    assert s.first_index == (1, 0)
    assert not is_finite(t)
    assert is_finite(torch.sparse_coo_tensor([[0], [1]], [3.0], (2, 3)))
    assert is_finite(torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), [], (2, 3)))


def test_rows_of_a_sparse_gradient() -> None:
    """What `nn.Embedding(sparse=True)` gives: not coalesced, one dense dimension."""
    t = torch.sparse_coo_tensor([[4, 3, 4]], [[1.0, 2.0], [3.0, NAN], [0.0, 1.0]], (5, 2))
    assert stat("t", t).first_index == (3, 1)
    assert not is_finite(t)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr"])
def test_compressed_sparse(layout: str) -> None:
    dense = torch.tensor([[0.0, 2.0], [NAN, 0.0]])
    t = {
        "csr": lambda: dense.to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: dense.to_sparse_bsr((1, 1)),
    }[layout]()
    s = stat("t", t)
    assert (s.shape, s.nan, s.max) == ((2, 2), 1, 2.0)
    assert s.first_index is None or len(s.first_index) == 2
    assert not is_finite(t)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_empty(shape: tuple[int, ...]) -> None:
    t = torch.empty(shape)
    assert is_finite(t)
    assert extremes(t) is None
    s = stat("t", t)
    assert (s.shape, s.min, s.max, s.bad, s.first_index) == (shape, None, None, 0, None)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    parts = [torch.ones(2, 3), torch.full((4, 3), NAN)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    assert not is_finite(nested)
    assert stat("t", nested).nan == 12
    assert is_finite(torch.nested.nested_tensor(parts[:1], layout=layout))


def test_what_cannot_be_read_counts_as_finite() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    for t in (torch.ones(2, device="meta"), fake, "text", None, 3.0):
        assert readable(t) is None
        assert is_finite(t)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool], ids=str)
def test_integers(dtype: torch.dtype) -> None:
    t = torch.tensor([[0, 1], [1, 0]], dtype=dtype)
    s = stat("t", t)
    assert is_finite(t)
    assert (s.min, s.max, s.zeros, s.negative, s.bad, s.binary) == (0, 1, 2, 0, 0, True)
    if dtype.is_signed:
        s = stat("t", torch.tensor([-3, 0, 9], dtype=dtype))
        assert (s.min, s.max, s.zeros, s.negative, s.binary) == (-3, 9, 1, 1, False)


def test_a_subclass_is_not_asked() -> None:
    """Reading values must not run the program's own `__torch_function__`."""
    asked = []

    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    t = torch.tensor([1.0, NAN]).as_subclass(Loud)
    asked.clear()
    assert not is_finite(t)
    assert stat("t", t).nan == 1
    assert asked == []


def test_reading_changes_nothing() -> None:
    t = torch.tensor([1.0, NAN], requires_grad=True)
    state, version = torch.get_rng_state(), t._version
    stat("t", t)
    is_finite(t)
    assert t._version == version
    assert t.grad is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_quick_yes_is_true(kind: str, dtype: torch.dtype) -> None:
    t = torch.tensor(VALUES[kind], dtype=dtype)
    assert not surely_finite(t) or is_finite(t)


def test_quick_answers() -> None:
    assert surely_finite(torch.ones(5))
    assert not surely_finite(torch.tensor([1.0, NAN]))
    assert not surely_finite(torch.full((3,), 1e30))  # a no means nothing
    for t in (
        torch.sparse_coo_tensor([[0], [1]], [3.0], (2, 3)),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ):
        assert not surely_finite(t)


@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 3, 4), (1, 1, 5)], ids=str)
def test_unravel(shape: tuple[int, ...]) -> None:
    for flat, index in enumerate(itertools.product(*(range(n) for n in shape))):
        assert unravel(flat, shape) == index


def test_norms_of_mixed_dtypes() -> None:
    tensors = [
        torch.tensor([3.0, 4.0]),
        torch.full((100,), 3e4, dtype=torch.float16),
        torch.tensor([[6.0], [8.0]], dtype=torch.float64),
        torch.ones(16, dtype=torch.bfloat16),
        torch.tensor(-2.0),
    ]
    by_hand = [math.sqrt(sum(v * v for _, v in elements(t))) for t in tensors]
    assert sorted(norms(tensors).tolist()) == pytest.approx(sorted(by_hand), rel=1e-3)


def test_norms_of_doubles_beyond_single_precision() -> None:
    assert norms([torch.tensor([1e200], dtype=torch.float64)]).tolist() == [1e200]
    both = norms([torch.tensor([1e200], dtype=torch.float64), torch.ones(1)])
    assert sorted(both.tolist()) == [1.0, 1e200]


def test_norms_show_what_is_not_finite() -> None:
    assert not torch.isfinite(norms([torch.ones(2), torch.tensor([1.0, NAN])])).all()
    assert not torch.isfinite(norms([torch.ones(2), torch.tensor([1.0, -INF])])).all()


# --- tensors in containers ------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "left right")  # the untyped kind is what old code uses


@dataclass
class Sample:
    image: Tensor
    meta: dict[str, Any] = field(default_factory=dict)


class Output(OrderedDict[str, Any]):
    """Like the outputs of transformers: a dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Graph:
    """Like a batch of a graph library: tensors as attributes."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


ONE, TWO, THREE = torch.ones(1), torch.ones(2), torch.ones(3)


@pytest.mark.parametrize(
    ("value", "places"),
    [
        (ONE, ["b"]),
        ((ONE, [TWO, (THREE,)]), ["b[0]", "b[1][0]", "b[1][1][0]"]),
        ({"x": ONE, "y": {"z": TWO}, 3: THREE}, ["b['x']", "b['y']['z']", "b[3]"]),
        (Pair(ONE, {"k": TWO}), ["b.left", "b.right['k']"]),
        (Sample(ONE, {"mask": TWO, "id": "a"}), ["b.image", "b.meta['mask']"]),
        (Output(logits=ONE, hidden=(TWO, THREE)), ["b['logits']", "b['hidden'][0]", "b['hidden'][1]"]),
        (UserDict({"ids": ONE}), ["b['ids']"]),
        (Graph(x=ONE, edge_index=TWO, _store=Graph(y=THREE)), ["b.x", "b.edge_index", "b.store.y"]),
        (deque([ONE, None, TWO]), ["b[0]", "b[2]"]),
        ([None, "text", b"bytes", 1, 2.0, torch.float32], []),
        (Sample, []),
        (torch.nn.Linear(1, 1), []),
        (torch.optim.SGD([ONE.clone().requires_grad_()], lr=0.1), []),
    ],
    ids=lambda v: type(v).__name__ if not isinstance(v, list) else None,
)
def test_tensors_in(value: Any, places: list[str]) -> None:
    assert [place for place, _ in tensors_in(value, "b")] == places


@pytest.mark.parametrize("count", [1023, 1024, 1025, 2048, 3000])
def test_tensors_in_long_containers(count: int) -> None:
    """One that begins with tensors is read to its end; others (a history, a vocabulary) are left."""
    assert [t for _, t in tensors_in([ONE] * count)] == [ONE] * count
    places = [place for place, _ in tensors_in(dict.fromkeys(range(count), ONE), "b")]
    assert places == [f"b[{i}]" for i in range(count)]
    read: list[int] = []

    class Row(UserDict[str, int]):
        def items(self) -> Any:
            read.append(1)
            return super().items()

    rows = [Row() for _ in range(count)]
    assert list(tensors_in(rows)) == list(tensors_in(dict(enumerate(rows)))) == []
    assert len(read) == 2 * min(count, 1024)


def test_tensors_in_a_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert "b.data" in [place for place, _ in tensors_in(packed, "b")]


def test_tensors_in_something_that_holds_itself() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert 1 <= len(list(tensors_in(loop))) <= 10


def test_a_table_is_not_read_cell_by_cell() -> None:
    """Containers that answer `items()` with work (a data frame, a file) are left alone."""

    class Frame:
        __module__ = "pandas.core.frame"

        def keys(self) -> list[str]:
            raise AssertionError("was read")

        items = keys

    assert list(tensors_in({"x": ONE, "table": Frame()}, "b")) == [("b['x']", ONE)]


@pytest.mark.parametrize("vectors", [0, 1, 2, 3, 9])
def test_norms_of_plain_tensors_count_every_one(vectors: int) -> None:
    tensors = [torch.full((4, 4), 1.0), *(torch.full((i + 1,), 2.0) for i in range(vectors)), torch.ones(10_000)]
    found = plain_norm(tensors)
    assert found is not None
    assert found == pytest.approx(math.hypot(*(t.norm().item() for t in tensors)))
    for t in tensors:
        t.view(-1)[-1] = NAN
        found = plain_norm(tensors)
        assert found is not None
        assert math.isnan(found)
        t.view(-1)[-1] = 1.0
    assert plain_norm([*tensors, torch.ones(3, dtype=torch.float64)]) is None
    assert plain_norm([torch.full((3, 5), 2.0).t()]) == pytest.approx(60**0.5)


@pytest.mark.parametrize("form", ["dense", "to_sparse", "to_sparse_csr", "to_sparse_csc", "cfloat"])
def test_tensors_of_any_layout_are_compared(form: str) -> None:
    rows = torch.tensor([[0.0, math.nan], [2.0, 0.0]])
    one, same, other = (getattr(t, form, t.clone)() for t in (rows, rows.clone(), rows + torch.eye(2)))
    assert same_numbers(one, same)
    assert not same_numbers(one, other)
    assert form == "dense" or not same_numbers(one, rows)
