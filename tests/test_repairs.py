"""For every cause: a change that its example's report proposes repairs the example, for all of its steps."""

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
def test_a_proposed_change_repairs_the_example(slug: str, tmp_path: Path, firstnan: Zygote) -> None:
    script = tmp_path / "train.py"
    source = EXAMPLES[slug].read_text(encoding="utf-8")
    script.write_text(source, encoding="utf-8")
    report = Report.from_dict(firstnan(["run", "train.py"], cwd=tmp_path).found)
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
