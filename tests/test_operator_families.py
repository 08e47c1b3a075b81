"""The table of operator families: its names and facts are those of torch, and no rule writes a family down again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import firstnan.diagnose
from firstnan.records import operator_families
from firstnan.tracing.operators import plain_name

DIAGNOSE = Path(firstnan.diagnose.__file__).parent
FAMILIES = {name: frozenset(value) for name, value in vars(operator_families).items() if name.isupper()}
KNOWN = frozenset().union(*FAMILIES.values())


def aten_names() -> list[str]:
    return [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]


def test_every_name_is_an_operator_of_torch() -> None:
    names = {plain_name(name) for name in aten_names()} | {name[6:].split(".")[0].strip("_") for name in aten_names()}
    names |= {name.removeprefix("linalg_").removeprefix("special_") for name in names}
    assert sorted(KNOWN - names) == []


def test_torch_calls_the_random_ones_random() -> None:
    seeded = set()
    for name in aten_names():
        base, _, overload = name[6:].partition(".")
        found = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if found is not None and torch.Tag.nondeterministic_seeded in found.tags:
            seeded.add(plain_name(name))
    assert seeded >= operator_families.RANDOM


@pytest.mark.parametrize("name", operator_families.INVERSE_FUNCTIONS)
def test_inverse_functions_are_nan_outside_their_interval_only(name: str) -> None:
    low, high = operator_families.INVERSE_FUNCTIONS[name]
    function = getattr(torch, name, None) or getattr(torch.special, name)
    inside = torch.tensor([low + 0.25, min(high, 9.0) - 0.25])
    assert torch.isfinite(function(inside)).all()
    assert torch.isnan(function(torch.tensor([low - 0.25]))).all()
    assert high == float("inf") or torch.isnan(function(torch.tensor([high + 0.25]))).all()


@pytest.mark.parametrize("name", ["log", "log2", "log10", "log1p"])
def test_logarithms_are_infinite_at_their_edge(name: str) -> None:
    edge = operator_families.LOGS[name][1]
    below, at = getattr(torch, name)(torch.tensor([edge - 0.5, edge])).tolist()
    assert below != below
    assert at == float("-inf")


def literal_sets(source: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that write down several operator names: in a set, tuple or list, or in one string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            found = [e.value for e in node.elts if isinstance(e, ast.Constant) and e.value in KNOWN]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "words":
            found = ast.literal_eval(node.args[0]).split()
        else:
            continue
        yield node.lineno, found


@pytest.mark.parametrize("path", sorted(DIAGNOSE.rglob("*.py")), ids=lambda path: path.name)
def test_rules_write_down_no_family_again(path: Path) -> None:
    for line, names in literal_sets(path.read_text(encoding="utf-8")):
        same = [name for name, family in FAMILIES.items() if len(family) > 2 and family <= {*names}]
        assert same == [], f"{path.name}:{line} repeats {same}"


def test_a_repeated_family_is_found() -> None:
    (found,) = literal_sets('SPLITS = ("chunk", "split", "split_with_sizes", "unbind")')
    assert FAMILIES["SPLITS"] <= {*found[1]}
    (found,) = literal_sets('SPLITS = words("chunk split split_with_sizes unbind")')
    assert FAMILIES["SPLITS"] <= {*found[1]}
