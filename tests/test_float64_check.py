"""Repeating one operator in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from firstnan.observe.sites import Ownership
from firstnan.records import OpEvent
from firstnan.tracing.tracer import Tracer

HALF = torch.tensor([300.0, 2.0], dtype=torch.float16)


def born(act: Callable[[], Any]) -> OpEvent:
    """The event of the block in which something non-finite was born."""
    with Tracer(Ownership((__file__,))) as tracer:
        act()
    return next(e for e in tracer.trace().events if e.born)


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        pytest.param(lambda: HALF * HALF, "finite", id="a product in float16"),
        pytest.param(lambda: torch.tensor([1e30]) ** 2, "finite", id="a square in float32"),
        pytest.param(lambda: torch.tensor([1e5]).half(), "finite", id="a cast"),
        pytest.param(lambda: torch.tensor([1e30]).mul_(1e30), "finite", id="in place"),
        pytest.param(lambda: torch._foreach_mul([torch.tensor([1e30])], 1e30), "finite", id="a list of tensors"),
        pytest.param(lambda: torch.tensor([800.0]).exp(), "nonfinite", id="beyond float64 too"),
        pytest.param(lambda: torch.zeros(2).log(), "nonfinite", id="a logarithm of zero"),
        pytest.param(lambda: torch.zeros(2) / torch.zeros(2), "nonfinite", id="nothing over nothing"),
        pytest.param(lambda: torch.zeros(2, dtype=torch.float64).log(), None, id="float64 itself"),
    ],
)
def test_what_float64_gives(act: Callable[[], Any], expected: str | None) -> None:
    assert born(act).in_float64 == expected


def test_attention_whose_sums_were_rounded_says_nothing_about_float64() -> None:
    """`exp(score - sum)` overflows with scores in float64, because the sum is the float32 one."""
    torch.manual_seed(0)
    q, k, v = ((torch.randn(2, 2, 24, 8) * 1e10).requires_grad_() for _ in range(3))

    def act() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    act()
    if q.grad is not None and q.grad.isfinite().all():
        pytest.skip("the attention of this processor does not overflow")
    assert born(act).in_float64 is None


def test_what_was_overwritten_is_not_touched_again() -> None:
    w = torch.tensor([1e30])
    assert born(lambda: w.mul_(1e30)).in_float64 == "finite"
    assert torch.isinf(w).all()


def test_no_random_number_is_drawn_twice() -> None:
    def draw() -> Tensor:
        torch.manual_seed(0)
        noise = torch.empty(3).exponential_(1e-44)  # mostly beyond float32
        return torch.cat([noise, torch.rand(3)])

    plain = draw()
    with Tracer(Ownership((__file__,))):
        traced = draw()
    assert torch.equal(plain, traced)
