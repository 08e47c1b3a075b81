"""Which operation of numpy in a line made a value non-finite: the line is computed again, as far as that is safe."""

from __future__ import annotations

import ast
import math
from typing import Any

import numpy as np
import pytest

from firstnan.observe.line_operations import line_operation, operation_of_comprehension


class Table:
    def __init__(self) -> None:
        self.price = np.array([2.0, 0.0])

    @property
    def noted(self) -> Any:
        raise AssertionError("a property may do anything")


def draw() -> float:
    raise AssertionError("a function of the program is not called again")


VARIABLES = {
    "np": np,
    "math": math,
    "x": np.array([1.0, 2.0]),
    "zero": np.zeros(2),
    "n": 0,
    "flat": np.array([3.0, 3.0]),
    "table": Table(),
    "draw": draw,
}


@pytest.mark.parametrize(
    ("line", "op", "code"),
    [
        ("y = x / zero", "div", "x / zero"),
        ("y = 1 + np.log(zero / x)", "log", "np.log(zero / x)"),
        ("return (flat - flat.mean()) / flat.std()", "div", "(flat - flat.mean()) / flat.std()"),
        ("x /= zero", "div", None),
        ("y = np.sqrt(zero - x).sum()", "sqrt", "np.sqrt(zero - x)"),
        ("y = torch.from_numpy(np.log(zero)), draw()", "log", "np.log(zero)"),
        ("y = np.exp(x * 1000)", "exp", "np.exp(x * 1000)"),
        ("y = table.price[:1] / table.price[1]", "div", "table.price[:1] / table.price[1]"),
        ("y = np.mean(x[:0])", "mean", "np.mean(x[:0])"),
    ],
)
def test_the_operation(line: str, op: str, code: str | None) -> None:
    found = line_operation(ast.parse(line).body[0], VARIABLES)
    assert found is not None
    assert (found.name, ast.unparse(found.node) if found.node else None) == (op, code)


@pytest.mark.parametrize(
    "line",
    [
        "y = x / 2",
        "y = draw() / zero",
        "y = table.noted / zero",
        "y = [v / zero for v in x]",
        "np.log(zero)",
        "y = np.log(zero, out=x)",
        "y = 1 / n",
        "y = unknown / zero",
    ],
)
def test_what_is_not_computed_again(line: str) -> None:
    assert line_operation(ast.parse(line).body[0], VARIABLES) is None
    assert VARIABLES["x"].tolist() == [1.0, 2.0]


def test_what_it_read() -> None:
    found = line_operation(ast.parse("y = x / zero").body[0], VARIABLES)
    assert found is not None
    assert [(name, value.tolist()) for name, value in found.read] == [("self", [1.0, 2.0]), ("other", [0.0, 0.0])]


@pytest.mark.parametrize(
    ("line", "at", "code"),
    [
        ("y = np.stack([row / row.sum() for row in rows])", 1, "row / row.sum()"),
        ("y = [a / b for a, b in zip(rows, rows)]", 1, "a / b"),
        ("y = np.stack([row / row.sum() for row in rows])", 0, None),
        ("y = [a / b for a in rows for b in rows]", 1, None),
        ("y = [row / row.sum() for row in rows if row.any()]", 1, None),
        ("y = sum(now / now.sum() for now in rows)", None, "now / now.sum()"),
    ],
)
def test_the_element_of_a_comprehension(line: str, at: int | None, code: str | None) -> None:
    variables = VARIABLES | {"rows": [np.ones(2), np.zeros(2)], "now": np.zeros(2)}
    found = operation_of_comprehension(ast.parse(line).body[0], variables, at)
    assert (ast.unparse(found.node) if found is not None and found.node is not None else None) == code
