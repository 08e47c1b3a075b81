"""Every demo fails by itself, and `firstnan run` says where and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from firstnan.cli.demos import Demo, demos, find
from zygote import Zygote

pytest_plugins = ["zygote"]


@dataclass(frozen=True)
class Expected:
    phase: str
    slugs: frozenset[str]
    step: int
    line: str | None
    """Text of the guilty line; None where more than one line is a right answer."""
    bad_samples: list[int] | None = None


EXPECTED = {
    "checkpoint": Expected("parameter", frozenset({"nan_parameter", "nan_constant"}), 0, None),
    "churn": Expected("forward", frozenset({"log_of_zero"}), 9, "torch.log(1 - p)", [12]),
    "clip": Expected("forward", frozenset({"low_precision_overflow"}), 5, "similarity * self.log_scale.exp()", [10]),
    "factors": Expected("forward", frozenset({"divergence_lr"}), 9, "(model(user, film) - star) ** 2"),
    "pooling": Expected("forward", frozenset({"fully_masked_softmax"}), 5, "torch.softmax(scores, dim=1)", [1]),
    "rmsprop": Expected("optimizer", frozenset({"optimizer_eps"}), 0, "optimizer.step()"),
    "router": Expected("forward", frozenset({"exp_overflow"}), 9, "torch.exp(self.gate(x))", [21]),
    "siamese": Expected("backward", frozenset({"sqrt_grad_at_zero"}), 9, "torch.sqrt(", [6]),
    "sinc": Expected("backward", frozenset({"where_grad_trap"}), 5, "torch.sin(x) / x", [18]),
    "spread": Expected("forward", frozenset({"single_sample_variance"}), 8, "a.std(dim=0)"),
    "telemetry": Expected("input", frozenset({"nan_input"}), 8, None, [3]),
}


def test_every_demo_is_expected_here() -> None:
    assert [demo.name for demo in demos()] == sorted(EXPECTED)


def test_titles_say_what_goes_wrong() -> None:
    for demo in demos():
        assert re.fullmatch(r"[^\n:]+: [^\n]+[^.\n]", demo.title), demo


def test_find_knows_names_and_only_names() -> None:
    assert find("siamese") in demos()
    assert find("no_such_demo") is None
    assert find("../demos/programs/siamese") is None


@pytest.mark.parametrize("demo", demos(), ids=lambda demo: demo.name)
def test_demo_fails_under_plain_python(demo: Demo, tmp_path: Path, firstnan: Zygote) -> None:
    done = firstnan.python([demo.path], cwd=tmp_path)
    assert done.code == 0, done.stderr
    losses = re.findall(r"loss (\S+?),?(?:\s|$)", done.stdout)
    assert losses
    assert losses[-1] == "nan"


@pytest.mark.parametrize("demo", demos(), ids=lambda demo: demo.name)
def test_demo_is_explained(demo: Demo, tmp_path: Path, firstnan: Zygote) -> None:
    expected = EXPECTED[demo.name]
    report = firstnan(["run", demo.path], cwd=tmp_path).found
    assert report["verdict"] == "nonfinite"
    assert report["cause"]["slug"] in expected.slugs
    assert report["origin"]["phase"] == expected.phase
    assert report["step"] == expected.step
    source = demo.path.read_text(encoding="utf-8").splitlines()
    if expected.line is not None:
        assert expected.line in source[report["origin"]["line"] - 1]
    if expected.bad_samples is not None:
        assert report["batch"]["bad_samples"] == expected.bad_samples
