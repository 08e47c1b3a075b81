"""Wrong arguments: every public function names the argument, in one sentence."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import firstnan
from firstnan.diagnose.rules.base import RULES

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def step(batch: Any) -> Any:
    return MODEL(batch).sum()


GOOD: dict[str, dict[str, Any]] = {
    "find_bad_batch": {"step": step, "loader": [torch.ones(2, 2)], "model": MODEL},
    "find_bad_samples": {"step": step, "batch": torch.ones(4, 2)},
    "check": {"x": torch.ones(2)},
    "check_gradients": {"model": MODEL},
    "check_weights": {"model": MODEL},
    "NaNDetector": {"model": MODEL, "optimizer": OPTIMIZER},
    "load": {"path": "no such report.json"},
    "replay": {"capsule": "no such.capsule", "step": step, "model": MODEL},
    "rule": {"slug": "my_rule", "title": "Mine"},
    "trace": {},
}
"""Arguments with which each function may be called."""

VALUES: list[Any] = [
    3, -1, 0, 2.5, float("nan"), True, None, "x", "", b"x", object(), [], [object()], [3], {}, {"a": 1}, (1, 2, 3), int,
    MODEL, OPTIMIZER, torch.ones(2), Path("x"), lambda: 1, [MODEL], ["x"], "raise",
]  # fmt: skip
"""What people pass by mistake; some of it is right for some argument."""


def arguments() -> list[tuple[str, str]]:
    signatures = {name: inspect.signature(getattr(firstnan, name)).parameters.values() for name in GOOD}
    return [
        (name, parameter.name)
        for name, parameters in signatures.items()
        for parameter in parameters
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL and (name, parameter.name) not in FREE
    ]


FREE = {("find_bad_samples", "batch"), ("check", "x")}
"""These take anything."""


def test_every_public_function_is_covered() -> None:
    functions = {name for name in firstnan.__all__ if callable(getattr(firstnan, name))}
    assert functions - {"NaNEvent", "NonFiniteError", "Report"} <= GOOD.keys()


@pytest.mark.parametrize(("name", "argument"), arguments())
def test_a_wrong_argument_is_named_in_one_sentence(
    name: str, argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a path among the values is written to
    function: Callable[..., Any] = getattr(firstnan, name)
    rules = list(RULES)
    refused = 0
    for value in VALUES:
        try:
            function(**{**GOOD[name], argument: value})
        except Exception as error:
            text = str(error)
            if "No such file" in text or "not a file" in text:  # a path that could be right
                continue
            from_step = name.startswith("find_bad") and argument in ("step", "loader") and hasattr(error, "__notes__")
            if from_step or (argument == "step" and callable(value)):  # the user's own function has raised it
                continue
            refused += 1
            assert text.startswith((argument, f"on_nonfinite={value!r}")), (value, text)
            assert "must" in text or "needs" in text, (value, text)
            assert "\n" not in text
            assert len(text) < 200
    RULES[:] = rules
    assert refused >= 5


def test_what_a_detector_hands_out_or_calls_has_to_be_fit_for_it() -> None:
    model = torch.nn.Linear(2, 1)
    with firstnan.NaNDetector(model) as detector:
        with pytest.raises(TypeError, match="loader must yield batches"):
            detector.batches(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="function must be"):
            detector.step(3)  # type: ignore[arg-type]


def test_what_would_be_misread_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for call, sentence in (
        (lambda: firstnan.NaNDetector("x", OPTIMIZER), "model must be a torch.nn.Module, got 'x'"),
        (lambda: firstnan.NaNDetector(nn.Linear, OPTIMIZER), "model must be a torch.nn.Module, got the class Linear"),
        (
            lambda: firstnan.NaNDetector(MODEL, torch.optim.lr_scheduler.StepLR(OPTIMIZER, 1)),
            "optimizer must be a torch.optim.Optimizer, got the scheduler StepLR",
        ),
        (
            lambda: firstnan.NaNDetector(MODEL, capsule_dir=tmp_path / "file"),
            "capsule_dir must be a folder, got the file",
        ),
        (lambda: copy.deepcopy(firstnan.NaNDetector(MODEL)), "a NaNDetector cannot be copied or pickled"),
        (lambda: firstnan.rule("my_rule", title="Mine")(3), "the rule must be a function, got 3"),
        (
            lambda: firstnan.check_weights(MODEL, since={"epoch": 3}),
            "since must be an earlier state dict of this model",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            call()  # type: ignore[no-untyped-call]


def test_a_step_that_shows_nothing_is_pointed_out() -> None:
    silent = firstnan.find_bad_batch(lambda batch: None, [torch.ones(2, 2)], model=MODEL, progress=False)
    assert "returned no loss and did not call backward" in str(silent)
    assert "no loss" not in str(firstnan.find_bad_batch(step, [torch.ones(2, 2)], model=MODEL, progress=False))
    assert (
        "only one sample"
        in firstnan.find_bad_samples(lambda batch: step(batch).log() - torch.inf, torch.ones(1, 2)).note
    )
