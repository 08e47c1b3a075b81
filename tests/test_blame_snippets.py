"""Blame on short pieces of training code, written the way different people write it.

`snippets/*.txt` holds them: a head line `### name | phase | operator` (`-`: the value came from outside, no operator
made it; `none`: healthy), then the code. What stands before `# step` runs untraced; the guilty line is marked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traced import marked_line, run_snippet


def read_snippets() -> list[Any]:
    """Phase, operator and source of every snippet, as parameters of a test."""
    found = []
    for path in sorted(Path(__file__).with_name("snippets").glob("*.txt")):
        for piece in path.read_text().split("### ")[1:]:
            head, source = piece.split("\n", 1)
            name, phase, op = (word.strip() for word in head.split("|"))
            found.append(pytest.param(phase, "" if op == "-" else op, source, id=name))
    return found


SNIPPETS = read_snippets()
GUILTY = [s for s in SNIPPETS if s.values[1] != "none"]
HEALTHY = [s for s in SNIPPETS if s.values[1] == "none"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("phase", "op", "source"), GUILTY)
def test_the_marked_line_is_blamed(phase: str, op: str, source: str) -> None:
    line = marked_line(source)
    assert line is not None
    assert run_snippet(source).place == (phase, op, line)


@pytest.mark.parametrize(("phase", "op", "source"), HEALTHY)
def test_nothing_is_noticed_in_healthy_code(phase: str, op: str, source: str) -> None:
    outcome = run_snippet(source)
    assert outcome.verdict.origin is None
    assert outcome.noticed == "buffer"  # the last thing looked at: nothing before it was bad
    assert outcome.names["loss"].isfinite().all()


def test_the_snippets_are_read() -> None:
    assert len(GUILTY) > 120
    assert len(HEALTHY) > 5
    assert len({s.id for s in SNIPPETS}) == len(SNIPPETS)
