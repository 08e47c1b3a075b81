"""Every program in docs/frameworks runs, and ends as the page says; a page is shorter than a screen."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firstnan.integrations import pytest as plugin

PAGES = sorted((Path(__file__).parents[2] / "docs" / "frameworks").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_program_of_a_page_ends_as_it_says(page: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n") <= 52
    pytest.importorskip(page.stem)
    program, said = re.findall(r"```(?:python)?\n(.*?)```", text, flags=re.DOTALL)
    if page.stem == "pytest":
        (tmp_path / "test_training.py").write_text(program)
        loaded = ("-p", plugin.__name__) if "firstnan" not in _entry_points() else ()
        ended = run(program, words=(sys.executable, "-m", "pytest", *loaded, "test_training.py"))
    else:
        ended = run(program, words=(sys.executable, "train.py"))
    assert ended.code == 1
    for line in said.strip().splitlines():
        assert line.strip() in ended.stderr + ended.stdout


def _entry_points() -> set[str]:
    from importlib.metadata import entry_points

    return {one.name for one in entry_points(group="pytest11")}
