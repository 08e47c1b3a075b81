"""The report as Markdown, and as an annotation of GitHub."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firstnan.records import Cause, Report
from firstnan.report.markdown import github_annotation, render_markdown
from hostile_report import hostile
from report_samples import SAMPLES, clean, forward, minimal, tried

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("name", ["forward", "backward", "tried"])
def test_markdown_is_the_golden(name: str) -> None:
    golden, text = GOLDENS / f"{name}.md", render_markdown(SAMPLES[name]())
    if os.environ.get("FIRSTNAN_UPDATE_GOLDENS"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES.keys())
def test_every_report_has_one(make: Callable[[], Report]) -> None:
    text = render_markdown(make())
    assert text.startswith("### firstnan: ")
    assert text.endswith("\n")
    assert text.count("```") % 2 == 0
    assert "\n\n\n" not in re.sub(r"```.*?```", "code", text, flags=re.DOTALL)


def test_names_cannot_become_markup() -> None:
    text = render_markdown(hostile())
    outside = re.sub(r"(`{3,}).*?\n\1", "", text, flags=re.DOTALL)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    assert not re.search(r"(?<!\\)<(?!/?sub>)", outside)
    assert not re.search(r"(?<!\\)\[", outside)
    assert "\u202e" not in text
    assert len(text) < 60_000


def test_a_fence_is_longer_than_those_in_the_source() -> None:
    report = tried()
    best = replace(report.remedies[0], diff=report.remedies[0].diff.replace("import torch", 'text = "````"'))
    assert "`````diff\n--- a/nowhere/train.py" in render_markdown(report.with_(remedies=(best,)))


def test_an_annotation_is_one_line_that_names_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", os.getcwd())
    line = github_annotation(forward())
    assert line.startswith("::error file=nowhere/train.py,line=10,endLine=10,col=16,endColumn=34,title=firstnan%3A log")
    assert line.count("\n") == 1
    assert "::NaN created in forward, step 11, at nowhere/train.py:10" in line
    assert "%0AProven fix: clamp before the logarithm%0A--- train.py%0A" in line


def test_an_annotation_escapes_what_has_a_meaning() -> None:
    report = forward().with_(cause=Cause("slug", "100 % : a, b\r\n::error::x", "why\n::stop-commands::x"))
    line = github_annotation(report)
    assert "title=firstnan%3A 100 %25 %3A a%2C b" in line
    assert line.count("\n") == 1
    assert "\r" not in line
    assert "%0A::stop-commands::x" in line  # in the message, not at the start of a line
    assert github_annotation(hostile()).count("\n") == 1


def test_a_report_without_a_place_is_annotated_without_one_and_a_clean_one_not_at_all() -> None:
    assert github_annotation(minimal()) == "::error title=firstnan::a non-finite value; its origin is unknown\n"
    assert github_annotation(clean()) == ""
