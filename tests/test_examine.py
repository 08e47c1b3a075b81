"""One operator that wrote something non-finite: what was born there, what was only handed on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstnan.records import OpEvent
from firstnan.tensors.finite import stat
from firstnan.tracing.examine import examine, mask_like
from firstnan.tracing.operators import info, plain_name
from traced import trace_of

NAN, INF = math.nan, math.inf


def seen(run: Callable[[], Any], op: str) -> OpEvent:
    """The last event of this name."""
    _, trace, _ = trace_of(run)
    return [e for e in trace.events if e.op == op][-1]


def t(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def judged(e: OpEvent) -> tuple[int, int, list[bool]]:
    return e.born, e.nan_from_inf, [i.guilty for i in e.inputs]


# Each: born, NaN made of an infinity, which inputs are guilty.
POINTWISE: list[tuple[str, Callable[[], Any], str, tuple[int, int, list[bool]]]] = [
    ("log", lambda: t(0, -1, 1).log(), "log", (2, 0, [False])),
    ("handed on", lambda: t(NAN, 1).exp(), "exp", (0, 0, [True])),
    ("both", lambda: t(NAN, 1000).exp(), "exp", (1, 0, [True])),
    ("inf minus inf", lambda: t(INF, 1) - t(INF, 1), "sub", (0, 1, [True, True])),
    ("inf minus one", lambda: t(INF, 1) - t(1, 1), "sub", (0, 0, [True, False])),
    ("zero times inf", lambda: t(0, 1) * t(INF, 1), "mul", (0, 1, [False, True])),
    ("nan and inf", lambda: t(NAN, 1) + t(INF, 1), "add", (0, 0, [True, True])),
    ("one over inf is fine elsewhere", lambda: t(1, 0) / t(INF, 0), "div", (1, 0, [False, False])),
    ("broadcast", lambda: t(1, 2, 0)[:, None] / t(0, 1), "div", (3, 0, [False, False])),
    ("number", lambda: t(1, 0) / 0.0, "div", (2, 0, [False])),
    ("infinite number", lambda: t(0, 1) * INF, "mul", (0, 1, [False])),
    ("nan number", lambda: t(0, 1) * NAN, "mul", (0, 0, [False])),
    ("cast", lambda: t(1e5, 1).half(), "to", (1, 0, [False])),
    ("where takes the good side", lambda: torch.where(t(1, 0) > 0, t(INF, NAN), t(NAN, 1)), "where",
     (0, 0, [False, True, False])),
    ("masked_fill", lambda: t(1, NAN).masked_fill(t(1, 0) > 0, -INF), "masked_fill", (1, 0, [True, False])),
    ("masked_fill over a nan", lambda: t(NAN, 1).masked_fill(t(1, 0) > 0, -INF), "masked_fill", (1, 0, [False, False])),
    ("complex", lambda: torch.tensor([0j, 1j]) / torch.tensor([0j, 1j]), "div", (2, 0, [False, False])),
]  # fmt: skip


@pytest.mark.parametrize(("run", "op", "expected"), [p[1:] for p in POINTWISE], ids=[p[0] for p in POINTWISE])
def test_element_by_element(run: Callable[[], Any], op: str, expected: tuple[int, int, list[bool]]) -> None:
    assert judged(seen(run, op)) == expected


WHOLE: list[tuple[str, Callable[[], Any], str, tuple[int, int, list[bool]]]] = [
    ("overflowing sum", lambda: t(6e4, 6e4, dtype=torch.float16).sum(), "sum", (1, 0, [False])),
    ("sum over a nan", lambda: t(NAN, 1).sum(), "sum", (0, 0, [True])),
    ("sum of both infinities", lambda: t(INF, -INF).sum(), "sum", (0, 1, [True])),
    ("product", lambda: torch.full((2, 2), 1e30) @ torch.full((2, 2), 1e30), "mm", (4, 0, [False, False])),
    ("softmax of a masked row", lambda: t(-INF, -INF).softmax(0), "softmax", (0, 2, [True])),
    ("mean of nothing", lambda: torch.empty(0).mean(), "mean", (1, 0, [False])),
    ("std of one", lambda: t(1).std(), "std", (1, 0, [False])),
    ("product on top of a mask", lambda: torch.baddbmm(
        torch.tensor([[[-INF, 0.0]]]), torch.full((1, 1, 1), 1e30), torch.full((1, 1, 2), 1e30)), "baddbmm",
     (1, 1, [True, False, False])),
    ("concatenated", lambda: torch.cat([t(1), t(INF), t(NAN)]), "cat", (0, 0, [False, True, True])),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("run", "op", "expected"), [p[1:] for p in WHOLE], ids=[p[0] for p in WHOLE])
def test_operators_that_mix_their_elements(
    run: Callable[[], Any], op: str, expected: tuple[int, int, list[bool]]
) -> None:
    assert judged(seen(run, op)) == expected


def test_lists_are_judged_pair_by_pair() -> None:
    def run() -> None:
        torch._foreach_div_([t(1, 2), t(NAN, 1), t(0, 1)], [t(1, 1), t(1, 1), t(0, 1)])

    e = seen(run, "div")
    assert e.born == 1
    assert [i.guilty for i in e.inputs] == [False, True, False, False, False, False]


def test_what_was_overwritten_is_known() -> None:
    e = seen(lambda: t(0, NAN, 1).log_(), "log")
    assert judged(e) == (1, 0, [True])
    assert e.inputs[0].stat is not None
    assert (e.inputs[0].stat.zeros, e.inputs[0].stat.nan) == (1, 1)


@pytest.mark.parametrize(
    "write",
    [lambda o: o.copy_(t(0, INF)), lambda o: torch.log(t(0, 1), out=o), lambda o: o.fill_(INF)],
    ids=["copy", "out", "fill"],
)
def test_what_is_only_written_to_is_not_read(write: Callable[[Tensor], Any]) -> None:
    _, trace, _ = trace_of(lambda: write(torch.full((2,), NAN)))
    event = trace.events[-1]
    assert all(i.producer is None or trace.events[i.producer].op != "full" for i in event.inputs)
    assert not any(o.nan for o in event.outputs)


def test_a_large_tensor_is_judged_like_a_small_one() -> None:
    big = torch.ones(200_000)
    big[7] = -1.0

    def run() -> Tensor:
        return torch.log(big).mul_(2).clamp_(max=3)

    assert judged(seen(run, "log"))[0] == 1
    assert judged(seen(run, "mul")) == (0, 0, [True])
    assert judged(seen(run, "clamp")) == (0, 0, [True])


def test_an_overflow_in_place_among_masked_elements() -> None:
    def run() -> Tensor:
        scores = torch.full((300, 300), 1e38).masked_fill(torch.ones(300, 300).triu(1) > 0, -INF)
        return scores.mul_(10)

    e = seen(run, "mul")
    assert e.born == 300 * 301 // 2
    assert [i.guilty for i in e.inputs] == [True]


# --- on purpose -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda: torch.full((3,), -INF), "full"),
        (lambda: torch.tensor(INF), "tensor"),
        (lambda: torch.tensor([0.0, -INF, 0.0]), "tensor"),
        (lambda: t(1, 2).masked_fill(t(1, 0) > 0, -INF), "masked_fill"),
        (lambda: torch.zeros(2).fill_(INF), "fill"),
        (lambda: torch.tensor([1.0, 0.0]).log(), "log"),
        (lambda: torch.nn.functional.pad(t(1), (1, 1), value=-INF), "constant_pad_nd"),
        (lambda: torch.tensor(NAN), "tensor"),
    ],
    ids=["full", "scalar", "table", "masked_fill", "fill", "log of a mask", "pad", "nan"],
)
def test_constants_that_the_program_asks_for(run: Callable[[], Any], op: str) -> None:
    assert seen(run, op).on_purpose


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda: t(0.0, 0.5).log(), "log"),
        (lambda: torch.sigmoid(t(-200, 200).requires_grad_()).log(), "log"),
        (lambda: torch.tensor([1.0, NAN, 2.0]), "tensor"),
        (lambda: torch.tensor([1.0, INF, 2.0]), "tensor"),
        (lambda: 1 / t(0, 1), "reciprocal"),
        (lambda: t(100, 1).exp(), "exp"),
    ],
    ids=["log", "log of a learned 0", "data with nan", "data with inf", "division", "exp"],
)
def test_accidents(run: Callable[[], Any], op: str) -> None:
    assert not seen(run, op).on_purpose


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([0.0, -INF, 0.0], True),
        ([-INF, -INF], True),
        ([5.0, INF], True),
        ([0.0, -INF, INF], False),
        ([0.0, 1.0, -INF], False),
        ([0.0, NAN, -INF], False),
    ],
)
def test_what_looks_like_a_mask(values: list[float], mask: bool) -> None:
    assert mask_like(stat("m", torch.tensor(values))) is mask


# --- evidence ---------------------------------------------------------------------------------------------------------


def test_the_witness_is_the_first_element_that_went_wrong_here() -> None:
    e = seen(lambda: t(NAN, 4, 0) / t(1, 2, 0), "div")
    witness = dict(e.witness)
    assert (witness["self"], witness["other"]) == (0.0, 0.0)
    assert math.isnan(witness["result"])


def test_the_witness_of_a_nan_from_infinities() -> None:
    e = seen(lambda: t(INF, 1, INF) - t(1, 1, INF), "sub")
    assert (dict(e.witness)["self"], dict(e.witness)["other"]) == (INF, INF)


def test_rows_are_those_where_something_was_born() -> None:
    x = torch.ones(5, 3)
    x[1, 2], x[4, 0], x[2, 2] = 0.0, 0.0, NAN
    assert seen(lambda: x.log(), "log").bad_rows == (1, 4)


def test_rows_are_bounded() -> None:
    assert len(seen(lambda: torch.zeros(500, 2).log(), "log").bad_rows) == 64


def test_nothing_bad_is_examined_quietly() -> None:
    op = info(torch.ops.aten.add.Tensor)
    detail = examine(op, [("self", t(1)), ("other", t(NAN))], [t(1)], ())
    assert (detail.born, detail.guilty) == (0, (False, True))


def test_several_results_and_integer_arguments() -> None:
    e = seen(lambda: t(1, NAN, 3).topk(2), "topk")
    assert e.inputs[0].guilty
    e = seen(lambda: t(1, INF).gather(0, torch.tensor([1])), "gather")
    assert [i.guilty for i in e.inputs] == [True, False]
    assert e.inputs[1].stat is not None
    assert e.inputs[1].stat.max == 1


# --- what is known of operators ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aten", "name"),
    [
        ("aten::_log_softmax", "log_softmax"),
        ("aten::native_layer_norm", "layer_norm"),
        ("aten::_foreach_addcdiv_", "addcdiv"),
        ("aten::linalg_vector_norm", "norm"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention"),
        ("aten::exp_", "exp"),
        ("aten::div.Tensor", "div"),
    ],
)
def test_names_that_people_know(aten: str, name: str) -> None:
    assert plain_name(aten) == name


def test_facts_of_operators() -> None:
    aten = torch.ops.aten
    assert info(aten.copy_.default).overwritten == {"self"}
    assert info(aten.log.out).overwritten == {"out"}
    assert info(aten.add_.Tensor).overwritten == frozenset()
    assert info(aten.add_.Tensor).mutated == {"self"}
    assert info(aten.native_batch_norm.default).mutated == {"running_mean", "running_var"}
    assert info(aten.view.default).view
    assert info(aten._unsafe_view.default).view
    assert not info(aten.lift_fresh.default).view
    assert info(aten.empty.memory_format).empty


# Whatever is called tame must turn finite numbers into finite numbers.
TAME = {
    "relu": lambda x: x.relu(),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: x.softmax(-1),
    "neg": lambda x: -x,
    "clamp": lambda x: x.clamp(-1, 1),
    "maximum": lambda x: torch.maximum(x, -x),
    "sort": lambda x: x.sort().values,
    "cat": lambda x: torch.cat([x, -x]),
    "sin": lambda x: x.sin(),
}


@pytest.mark.parametrize("name", TAME)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tame_operators_at_the_edge_of_the_range(name: str, dtype: torch.dtype) -> None:
    edge = torch.finfo(dtype)
    x = torch.tensor([edge.max, edge.min, edge.tiny, 0.0, 1.0], dtype=dtype)
    assert torch.isfinite(TAME[name](x)).all()


def test_a_copy_into_a_narrower_type_is_looked_at() -> None:
    def run() -> Tensor:
        return torch.zeros(2, dtype=torch.float16).copy_(t(1e6, 1))

    assert seen(run, "copy").born == 1
