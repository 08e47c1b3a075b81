"""The objects and variables that steps change."""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any

import numpy as np
import torch

from firstnan.tensors.program_state import BadSince, ProgramState, _carried


def here() -> FrameType:
    return sys._getframe(1)


def test_what_one_turn_of_a_loop_leaves_for_the_next() -> None:
    def train(state: Any, table: Any) -> FrameType:
        best = 0.0
        for turn in range(2):
            x = state * turn
            for _ in range(2):
                x, age = x + table, best
            state = x + age
            best += 1
            frame = here()
            found.append(_carried(frame.f_code, frame.f_lasti))
            y = x
        return y  # type: ignore[no-any-return]

    found: list[frozenset[str]] = []
    train(1, 2)
    assert found == [{"state", "best"}] * 2


class Buffer:
    def __init__(self) -> None:
        self.rewards, self.count = np.zeros(9), 0
        self.least: deque[Any] = deque([float("inf")])

    def add(self, reward: float) -> None:
        self.rewards[self.count] = reward
        self.count += 1


# What pytest makes of an assertion reads all variables, and those of such a function are left alone.


def since_when() -> tuple[Any, bool]:
    buffer, state, since = Buffer(), ProgramState(), BadSince()
    since._began -= 1e6  # as if much time had passed, so looking is always allowed
    for updates, reward in enumerate((1.0, 2.0, 3.0, np.inf, 4.0)):
        buffer.add(reward)
        state.look(here(), updates)
        since.look(state, updates)
    return since.found, bool(state.bad())


def test_since_when_an_object_is_bad() -> None:
    assert since_when() == ((2, 3), True)


def kept() -> tuple[Any, Any, bool]:
    state, weight = ProgramState(), torch.ones(3, requires_grad=True)
    hidden = (torch.zeros(3), torch.zeros(3))
    for updates in range(3):
        hidden = (hidden[0] + weight, hidden[1] * weight)
        state.look(here(), updates)
        state.keep(here())
    code = here().f_code
    return state.variables(code)["hidden"], hidden, state.has_changed(code, {"hidden": hidden})


def test_a_state_is_kept_without_its_graph() -> None:
    before, hidden, changed = kept()
    assert [t.requires_grad for t in before] == [False, False]
    assert torch.equal(before[0], hidden[0])
    assert changed
