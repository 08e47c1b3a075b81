"""`firstnan.rule`: a program's own causes, in the process itself and in the second run of the program."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import firstnan as package
from firstnan.diagnose.rules import explain
from firstnan.diagnose.rules.base import RULES, Failure
from firstnan.records import Cause, History, Operand, OpEvent, Origin, TensorStat, Trace
from zygote import Zygote

pytest_plugins = ["zygote"]

LOADER = "DataLoader(TensorDataset(readings), batch_size=4)"
PROGRAM = """\
import torch
from torch.utils.data import DataLoader, TensorDataset

import firstnan


@firstnan.rule("gauge_reset", title="The pressure gauge was reset"{options})
def gauge_reset(failure):
    {body}


torch.manual_seed(0)
readings = torch.rand(64, 2) + 0.1
readings[21, 1] = 0.0
scale = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([scale], lr=0.01)
for (x,) in {batches}:
    loss = torch.log(scale * x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ANSWERS = 'return f"{failure.op} of {failure.at(\'self\')}" if failure.op == "log" else None'


@pytest.fixture(autouse=True)
def _rules_as_before() -> Iterator[None]:
    before = list(RULES)
    yield
    RULES[:] = before


def program(folder: Path, *, body: str = ANSWERS, options: str = "", batches: str = LOADER) -> Path:
    path = folder / "train.py"
    path.write_text(PROGRAM.format(body=body, options=options, batches=batches), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "batches", [LOADER, "((readings[i : i + 4],) for i in range(0, 64, 4))"], ids=["loader", "none"]
)
def test_a_rule_of_the_program_wins(firstnan: Zygote, tmp_path: Path, batches: str) -> None:
    result = firstnan(["run", program(tmp_path, batches=batches)], cwd=tmp_path)
    assert result.cause == "gauge_reset"
    cause = result.found["cause"]
    assert (cause["title"], cause["why"], cause["link"]) == ("The pressure gauge was reset", "log of 0.0", None)
    assert "firstnan causes" not in result.stderr
    assert [c["slug"] for c in result.found["other_causes"]] == ["log_of_zero"]


def test_confidence_decides(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", program(tmp_path, options=", confidence=0.5")], cwd=tmp_path)
    assert result.cause == "log_of_zero"
    assert [c["slug"] for c in result.found["other_causes"]] == ["gauge_reset"]


def test_an_error_in_it_costs_the_rule_and_is_told(firstnan: Zygote, tmp_path: Path) -> None:
    result = firstnan(["run", program(tmp_path, body="return failure.weather")], cwd=tmp_path)
    assert result.cause == "log_of_zero"
    told = "your rule gauge_reset raised AttributeError: 'Failure' object has no attribute 'weather'"
    assert told in result.found["cause"]["evidence"]
    assert result.found["other_causes"] == []
    assert "internal error" not in result.stderr


def causes_of_log() -> list[Cause]:
    made = TensorStat("result", (2,), "float32", neginf=1)
    read = TensorStat("self", (2,), "float32", min=0.0, max=1.0, zeros=1)
    event = OpEvent(0, "log", "aten.log.default", "forward", 0, (Operand("self", read),), (made,), born=1)
    return explain(Origin("forward", "log", "aten.log.default", event=event), Trace((event,)), History())


def test_a_rule_that_is_defined_again_replaces_itself() -> None:
    def define(answer: str) -> None:
        @package.rule("mine", title="Mine")
        def look(failure: Failure) -> str:
            return answer

    define("first")
    define("second")
    causes = causes_of_log()
    assert (causes[0].slug, causes[0].why) == ("mine", "second")
    assert sum(rule.slug == "mine" for rule in RULES) == 1


def test_an_error_leaves_even_an_unexplained_failure_told() -> None:
    @package.rule("mine", title="Mine")
    def look(failure: Failure) -> str:
        raise KeyError("x")

    event = OpEvent(0, "odd", "aten.odd.default", "forward", 0)
    causes = explain(Origin("forward", "odd", "aten.odd.default", event=event), Trace((event,)), History())
    assert causes[0].slug == "unexplained"
    assert causes[0].evidence[-1].endswith("look raised KeyError: 'x'")


def test_an_answer_that_is_no_sentence_is_told_and_is_no_cause() -> None:
    @package.rule("mine", title="Mine")
    def look(failure: Failure) -> Any:
        return failure.op == "log"

    causes = causes_of_log()
    assert causes[0].slug == "log_of_zero"
    assert causes[0].evidence[-1].endswith("raised TypeError: a rule must return a sentence or None, got True")


@pytest.mark.parametrize("slug", ["", "Log of zero", "log-of-zero", "1st"])
def test_a_slug_looks_like_a_slug(slug: str) -> None:
    with pytest.raises(
        ValueError, match="slug must be lowercase words joined by underscores, such as log_of_zero, got"
    ):
        package.rule(slug, title="x")
