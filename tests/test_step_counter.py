"""Counting steps, and picking the parameters to check."""

from __future__ import annotations

import torch

from firstnan.gate.gate import Gate
from firstnan.gate.step_counter import CHUNK, ROTATION, SMALL_MODEL, ParameterRotation, StepCounter


class Optimizer:
    """A stand-in for an optimizer: steps are counted by identity."""


def made(*optimizers: Optimizer) -> StepCounter:
    steps = StepCounter()
    for optimizer in optimizers:
        steps.done[optimizer] = 0
    return steps


def test_one_optimizer_counts_from_zero() -> None:
    one = Optimizer()
    steps = made(one)
    seen = []
    for _ in range(3):
        seen.append(steps.current)
        steps.add(one)
    assert seen == [0, 1, 2]


def test_long_runs_of_one_optimizer_are_counted_when_another_steps_or_a_step_is_undone() -> None:
    one, other = Optimizer(), Optimizer()
    steps = made(one, other)
    assert [steps.add(one) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert steps.of(one) == 5
    steps.take_back(one)
    assert [steps.add(one) for _ in range(3)] == [4, 5, 6]
    assert [steps.add(other), steps.add(one), steps.add(other)] == [0, 7, 1]
    assert dict(steps.done) == {one: 8, other: 2}
    assert steps.total == 10
    steps.resume(20, 0, {one: 15, other: 5}, one, [])
    assert [steps.add(one) for _ in range(3)] == [15, 16, 17]
    assert dict(steps.done) == {one: 18, other: 5}


def test_two_alternating_optimizers_count_their_own_steps() -> None:
    one, other = Optimizer(), Optimizer()
    steps = made(one, other)
    seen = []
    for _ in range(3):
        for optimizer in (one, other):
            seen.append(steps.current)
            steps.add(optimizer)
    assert seen == [0, 0, 1, 1, 2, 2]


def test_a_loss_counts_for_an_optimizer_that_trains_what_it_depends_on() -> None:
    """Both optimizers share one place of `backward`, as in `def update(optimizer, loss)`."""
    one, other = Optimizer(), Optimizer()
    steps = made(one, other)
    for _ in range(3):
        for optimizer in (one, other):
            steps.backward_from("update")
            steps.add(optimizer)
    steps.backward_from("update")
    steps.expect_one_of([one, other])
    assert (steps.current_optimizer(updated=False), steps.current) == (one, 3)
    steps.add(one)
    steps.backward_from("update")
    steps.expect_one_of([other])
    assert (steps.current_optimizer(updated=False), steps.current) == (other, 3)
    steps.backward_from("update")
    steps.expect_one_of([one])
    assert (steps.current_optimizer(updated=False), steps.current) == (one, 4)


def test_the_count_goes_on_if_the_program_deletes_its_optimizers() -> None:
    one, other = Optimizer(), Optimizer()
    steps = made(one, other)
    for _ in range(3):
        steps.add(one)
        steps.add(other)
    assert (steps.current, steps.total) == (3, 6)
    del one, other
    assert steps.current == 3
    for _ in range(2):
        steps = made(alone := Optimizer())
        assert [steps.add(alone) for _ in range(4)] == [0, 1, 2, 3]
        steps.take_back(alone)
        del alone
        assert steps.current == 3


def test_a_small_model_is_checked_whole() -> None:
    parameters = [torch.zeros(10), torch.zeros(20)]
    assert ParameterRotation(thorough=False).due(parameters) == (parameters, True)


def test_every_element_of_a_large_model_is_checked_in_rotation() -> None:
    parameters = [torch.zeros(3 * CHUNK + 5), torch.zeros(7), torch.zeros(CHUNK)]
    rotation = ParameterRotation(thorough=False)
    for _ in range(ROTATION):
        parts, whole = rotation.due(parameters)
        assert not whole
        for part in parts:
            part += 1
    assert all(bool((p > 0).all()) for p in parameters)


def test_a_thorough_check_covers_everything() -> None:
    parameters = [torch.zeros(SMALL_MODEL + 1)]
    assert ParameterRotation(thorough=True).due(parameters)[1]


def test_an_optimizer_of_a_second_phase_tells_its_first_step() -> None:
    gate, weight = Gate(), torch.ones(2, requires_grad=True)
    first, second = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    gate.optimizer_made(first)
    for _ in range(5):
        gate.steps.add(first)
    assert gate.past().first_step == 0
    gate.optimizer_made(second)
    for _ in range(3):
        gate.steps.add(second)
    assert (gate.steps.of(second), gate.past().first_step) == (8, 5)
