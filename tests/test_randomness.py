"""The state of the random generators: read quickly, and identical to what the generators' own functions return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from firstnan.tensors.state import RandomState, _python
from loops import differences, randomness


@pytest.fixture(autouse=True)
def _same_random_numbers_afterwards() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch dropout": lambda: torch.nn.functional.dropout(torch.ones(20), 0.5).tolist(),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "python shuffle": lambda: random.sample(range(100), 100),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy randn": lambda: np.random.randn(3).tolist(),
    "numpy permutation": lambda: np.random.permutation(50).tolist(),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_the_same_numbers_are_drawn_again(draw: Callable[[], Any]) -> None:
    for _ in range(3):
        state = RandomState.now()
        expected = [draw() for _ in range(700)]  # more than the 624 words of one block
        state.restore()
        assert [draw() for _ in range(700)] == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_it_is_what_the_generators_say(draw: Callable[[], Any]) -> None:
    """A state that was kept before is used again only while nothing was drawn."""
    for _ in range(5):
        RandomState.now()
        draw()
        before = randomness()
        RandomState.now().restore()
        assert not differences(before, randomness())


def test_asking_draws_nothing() -> None:
    before = randomness()
    for _ in range(3):
        RandomState.now()
    assert not differences(before, randomness())


@pytest.mark.parametrize("seed", [random.seed, np.random.seed, torch.manual_seed])
def test_a_new_seed_is_seen(seed: Callable[[int], Any]) -> None:
    seed(1)
    one = RandomState.now()
    seed(2)
    two = RandomState.now()
    seed(1)
    assert one == RandomState.now()
    assert one != two


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_a_drawn_number_makes_another_state(draw: Callable[[], Any]) -> None:
    before = RandomState.now()
    assert before == RandomState.now()
    draw()
    assert before != RandomState.now()


@pytest.mark.parametrize("draw", [lambda: random.gauss(0, 1), lambda: float(np.random.randn())])
def test_half_of_a_pair_of_normal_numbers(draw: Callable[[], float]) -> None:
    """Both libraries draw normal numbers in pairs and keep the second, outside the generator's own memory."""
    draw()
    RandomState.now()
    draw()
    state = RandomState.now()
    expected = [draw() for _ in range(3)]
    state.restore()
    assert [draw() for _ in range(3)] == expected


@pytest.mark.filterwarnings("error")
def test_another_numpy_generator_is_seen() -> None:
    RandomState.now()
    old = np.random.mtrand._rand._bit_generator
    try:
        np.random.set_bit_generator(np.random.PCG64(3))
        state = RandomState.now()
        expected = np.random.rand(4).tolist()
        state.restore()
        assert np.random.rand(4).tolist() == expected
    finally:
        np.random.set_bit_generator(old)


def test_the_quick_look_at_python_is_in_use_here() -> None:
    """It is never trusted blindly, so that it could be off without a test noticing."""
    assert _python._known_layout
