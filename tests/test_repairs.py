"""For every cause: its example fails for that reason, and a change that the report proposes repairs it for good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from firstnan.diagnose.causes import catalogue
from firstnan.records import Report
from firstnan.repair.patch import new_contents
from zygote import Zygote

pytest_plugins = ["zygote"]
GOLDENS = Path(__file__).parent / "goldens" / "repairs"
EXAMPLES = {entry.slug: entry.example for entry in catalogue().values() if entry.example is not None}
MOST = 6


@pytest.mark.parametrize("slug", EXAMPLES)
def test_an_example_is_explained_by_its_own_cause_and_repaired(slug: str, tmp_path: Path, firstnan: Zygote) -> None:
    script = tmp_path / "train.py"
    source = EXAMPLES[slug].read_text(encoding="utf-8")
    script.write_text(source, encoding="utf-8")
    result = firstnan(["run", "train.py"], cwd=tmp_path)
    assert result.cause == slug, result.stderr
    assert result.found["step"] <= 10
    assert result.found["cause"]["link"] == f"docs/causes/{slug}.md"
    assert (Path(__file__).parents[1] / result.found["cause"]["link"]).is_file()
    assert f"firstnan causes {slug}" in result.stderr
    report = Report.from_dict(result.found)
    tried = []
    for remedy in [r for r in report.remedies if r.diff][:MOST]:
        for file, content in new_contents(remedy):
            file.path.write_bytes(content)
        again = firstnan(["run", "train.py"], cwd=tmp_path)
        script.write_text(source, encoding="utf-8")
        assert again.report is not None
        clean = again.report["verdict"] == "clean" and not again.report["events"] and again.code == 0
        if clean and again.stdout.count("step") >= 50:
            break
        tried.append((remedy.title, again.report["verdict"], again.code, again.stdout.count("step")))
    else:
        pytest.fail(f"none of these helped: {tried}")
    is_golden(slug, f"{remedy.title}\n{remedy.diff.replace(str(tmp_path), '')}")


def is_golden(name: str, text: str) -> None:
    """Compares with tests/goldens/repairs/NAME.txt; FIRSTNAN_UPDATE_GOLDENS=1 writes it instead."""
    golden = GOLDENS / f"{name}.txt"
    if os.environ.get("FIRSTNAN_UPDATE_GOLDENS"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
