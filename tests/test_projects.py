"""Training programs of several files, as public repositories have them: three defects each, and a healthy control.

A folder of `projects/` is one program. Its `truth.jsonl` has one object a variant: how it is started, which edits make
the defect, and the answer. The guilty line is given by its file and a text that occurs there only.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from test_cases import same_op
from zygote import Result, Zygote

pytest_plugins = ["zygote"]

PROJECTS = Path(__file__).parent / "projects"
TRUTHS: dict[str, dict[str, Any]] = {
    f"{path.parent.name}-{truth['id']}": truth | {"project": path.parent.name}
    for path in sorted(PROJECTS.glob("*/truth.jsonl"))
    for line in path.read_text().splitlines()
    if line.strip()
    for truth in [json.loads(line)]
}
HEALTHY = [name for name, truth in TRUTHS.items() if truth["phase"] == "none"]
FAILING = [name for name in TRUTHS if name not in HEALTHY]


def variants(names: list[str]) -> list[Any]:
    """Some need a package that is not among the development tools."""
    needs = {name: TRUTHS[name].get("needs", "json") for name in names}
    skip = {n: pytest.mark.skipif(importlib.util.find_spec(n) is None, reason=f"needs {n}") for n in needs.values()}
    return [pytest.param(name, marks=skip[needs[name]]) for name in names]


def project(truth: dict[str, Any], folder: Path) -> Path:
    """A copy of the program with the defect in it."""
    shutil.copytree(PROJECTS / truth["project"], folder, ignore=shutil.ignore_patterns("truth.jsonl", "__pycache__"))
    for edit in truth["edits"]:
        file = folder / edit["file"]
        text = file.read_text()
        assert text.count(edit["old"]) == 1, f"{edit['old']!r} is not in {edit['file']} once"
        file.write_text(text.replace(edit["old"], edit["new"]))
    return folder


def places(truth: dict[str, Any], folder: Path) -> list[tuple[str, int]]:
    """File and line of the answer, the preferred one first."""
    found = []
    for name, text in [(truth["file"], truth["text"]), *truth.get("alt_places", [])]:
        lines = [n for n, line in enumerate((folder / name).read_text().splitlines(), 1) if text in line]
        assert len(lines) == 1, f"{text!r} is in {name} {len(lines)} times"
        found.append((name, lines[0]))
    return found


def wrong_points(truth: dict[str, Any], result: Result, folder: Path) -> dict[str, str]:
    """What the report says differently from the truth: point -> what was said and what was wanted."""
    report = result.report
    if report is None or report["verdict"] != "nonfinite" or report["origin"] is None:
        return {"found": f"nothing was found (exit code {result.code})\n{result.stderr}"}
    origin, batch = report["origin"], report["batch"] or {}
    file = str(Path(origin["file"] or "").resolve()).removeprefix(f"{folder.resolve()}/")
    slug = (report["cause"] or {}).get("slug")
    wanted: dict[str, tuple[Any, list[Any]]] = {
        "exit code": (result.code, [3]),
        "phase": (origin["phase"], [truth["phase"], *truth.get("alt_phases", [])]),
        "line": ((file, origin["line"]), list(places(truth, folder))),
        "step": (report["step"], [truth["step"], *truth.get("alt_steps", [])]),
        "cause": (slug, [truth["cause"], *truth.get("alt_causes", [])]),
    }
    if truth["batch"] is not None:
        wanted["batch"] = batch.get("index"), [truth["batch"], *truth.get("alt_batches", [])]
    if truth.get("bad_samples"):
        wanted["samples"] = batch.get("bad_samples"), [truth["bad_samples"]]
    if truth.get("dataset_indices"):
        # In the dataset itself, behind a subset or a split.
        behind = [element["index"] for element in batch.get("elements") or []]
        wanted["dataset indices"] = behind or batch.get("dataset_indices"), [truth["dataset_indices"]]
    wrong = {
        p: f"said {said!r}, wanted {' or '.join(map(repr, ok))}" for p, (said, ok) in wanted.items() if said not in ok
    }
    ops = [truth["op"], *truth.get("alt_ops", [])]
    if not any(same_op(origin["op"], op) for op in ops):
        wrong["op"] = f"said {origin['op']!r}, wanted {' or '.join(map(repr, ops))}"
    return wrong


def proven(report: dict[str, Any]) -> dict[str, Any] | None:
    """The best fix that was tried and helped."""
    helped = [r for r in report["remedies"] if r["tried"] and r["failing_step_finite"]]
    return next((r for r in helped if r["steps_finite_after"] is not None), None)


def wrong_fix(firstnan: Zygote, result: Result, report: Path, words: list[str], folder: Path) -> dict[str, str]:
    """Applies the proven fix to the program and runs it to its end."""
    if proven(result.found) is None:
        tried = "\n".join(f"{r['title']}: {r['note']}" for r in result.found["remedies"])
        return {"fix": f"none is proven\n{tried}"}
    applied = firstnan(["fix", report, "--apply", "--root", folder], cwd=folder)
    if applied.code != 0:
        return {"fix": f"cannot be applied: {applied.stderr}"}
    again = firstnan(["run", "--replay", "never", *words], cwd=folder)
    if again.code != 0 or again.report is None or again.report["verdict"] != "clean":
        return {"fix lasts": f"exit code {again.code}\n{again.stderr}"}
    return {}


@pytest.mark.parametrize("name", variants(FAILING))
def test_a_defect_is_found_explained_and_fixed(firstnan: Zygote, tmp_path: Path, name: str) -> None:
    truth = TRUTHS[name]
    folder = project(truth, tmp_path / truth["project"])
    report = tmp_path / "report.json"
    result = firstnan(["run", "--verify", "20", "--json", report, *truth["run"]], cwd=folder)
    wrong = wrong_points(truth, result, folder)
    if "found" not in wrong:
        wrong |= wrong_fix(firstnan, result, report, truth["run"], folder)
    assert "internal error" not in result.stderr
    points = "\n".join(f"{point}: {text}" for point, text in wrong.items())
    assert not wrong, f"{truth['note']}\n{points}\n{result.stderr}"


@pytest.mark.parametrize("name", variants(HEALTHY))
def test_a_healthy_program_is_left_in_peace(firstnan: Zygote, tmp_path: Path, name: str) -> None:
    truth = TRUTHS[name]
    folder = project(truth, tmp_path / truth["project"])
    result = firstnan(["run", *truth["run"]], cwd=folder)
    assert result.code == 0, result.stderr
    assert result.report is not None
    assert result.report["verdict"] == "clean", result.stderr
    assert "firstnan:" not in result.stderr
