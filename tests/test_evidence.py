"""The numbers that a cause shows: growth per step, magnitudes before an overflow, the result in float64."""

from __future__ import annotations

import pytest
import torch

from firstnan.diagnose.rules import explain
from firstnan.diagnose.rules.base import growth
from firstnan.engine.conclude import _averaged, _bad_samples
from firstnan.records import Cause, History, StepRecord
from traced import run_snippet


def steps(*losses: float) -> History:
    return History(tuple(StepRecord(i, loss) for i, loss in enumerate(losses)))


def test_growth_shows_its_pace_and_the_step_that_left_the_ordinary_range() -> None:
    rise = growth(steps(2.0, 1.5, 1.0, 1.6, 4.0, 40.0, 400.0))
    assert rise is not None
    assert rise.per_step == 400 ** (1 / 4)
    assert (rise.usual, rise.left_step) == (2.0, 5)
    assert rise.lines() == (
        "on average the loss grew by a factor of 4.47 per step",
        "from step 5 on the loss stayed above 6, 3 times its maximum up to step 2",
    )


def test_a_step_that_came_back_did_not_leave_the_ordinary_range() -> None:
    rise = growth(steps(1.0, 2.0, 30.0, 2.5, 300.0, 3e4, 3e6))
    assert rise is not None
    assert rise.left_step == 4


def causes(code: str) -> list[Cause]:
    outcome = run_snippet(code)
    return explain(outcome.origin, outcome.trace, History())


HALF = """
w = torch.tensor([90.0, 2.0], dtype=torch.float16, requires_grad=True)
# step
energy = w * 80
loss = (energy * energy).float().sum()
loss.backward()
"""


def test_magnitudes_before_an_overflow_and_the_result_in_float64() -> None:
    first = causes(HALF)[0]
    assert first.slug == "low_precision_overflow"
    assert "magnitudes before it, as a share of the range of float16 (65504): mul 7200 (11%)" in first.evidence
    assert "the same operation in float64 is finite: only float16 is too narrow" in first.evidence


def test_what_is_undefined_in_any_precision_is_said_so() -> None:
    first = causes("w = torch.zeros(2, requires_grad=True)\n# step\nloss = w.log().sum()\nloss.backward()\n")[0]
    assert "the same operation in float64 is non-finite too: it is undefined in any precision" in first.evidence
    assert torch.is_grad_enabled()


ALL_MASKED = """
w = torch.zeros(2, 2, requires_grad=True)
# step
scores = w + torch.tensor([[-math.inf, 0.0], [-math.inf, -math.inf]])
loss = torch.logsumexp(scores, 1).exp().sum()
loss.backward()
"""


def test_the_values_shown_are_those_of_the_place_shown() -> None:
    """-inf - x is -inf in the first row; only in the second one it is -inf - -inf."""
    first = causes(ALL_MASKED)[0]
    assert first.slug == "logsumexp_grad_all_inf"
    assert "at [1, 0]: self = -inf, other = -inf -> nan" in first.evidence


def test_no_precision_matters_for_numbers_from_outside_and_for_the_spread_of_one() -> None:
    lines = causes("w = torch.ones(1, requires_grad=True)\n# step\nloss = w.std()\nloss.backward()")[0].evidence
    assert not [line for line in lines if "float64" in line]
    wide = causes("w = torch.tensor([1e30, -1e30], requires_grad=True)\n# step\nloss = w.var()\nloss.backward()")[0]
    assert [line for line in wide.evidence if "float64 is finite" in line]


def test_text_that_is_executed_is_not_shown_as_the_operation() -> None:
    code = "w = torch.zeros(1, requires_grad=True)\n# step\nexec('loss = w.log().sum()')\nloss.backward()"
    assert causes(code)[0].why.startswith("`log(...)` takes the logarithm")


def test_a_list_of_bad_rows_that_was_cut_is_not_shown_as_the_bad_samples() -> None:
    """The trace keeps 64 rows: 64 of 500 would be said where all 500 are bad."""
    outcome = run_snippet("w = torch.zeros(500, requires_grad=True)\n# step\nloss = w.log().sum()\nloss.backward()")
    assert outcome.origin.event is not None
    assert len(outcome.origin.event.bad_rows) == 64
    assert _bad_samples(outcome.origin, outcome.trace, None, 500) is None


@pytest.mark.parametrize(
    ("loss", "size"),
    [
        ("(w.log().sum() - 1).pow(2)", None),
        ("F.mse_loss(w.log().sum(), torch.tensor(1.0))", None),
        ("w.log().mean().sqrt()", 6),
        ("w.log().mean() * 2 - w.mean()", 6),
    ],
)
def test_what_is_summed_up_for_one_target_are_not_samples(loss: str, size: int | None) -> None:
    """Pairs of atoms have one energy: none of them is a sample."""
    outcome = run_snippet(f"w = torch.zeros(6, requires_grad=True)\n# step\nloss = {loss}\nloss.backward()")
    assert _averaged(outcome.trace) == size
