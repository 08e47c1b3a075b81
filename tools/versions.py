"""Runs the test suite under several versions of torch, each in a virtual environment of its own, and prints a table.

    python tools/versions.py [--torch VERSION,VERSION] [--folder FOLDER] [pytest arguments]

Without pytest arguments the whole suite runs, on two processes. The environments stay in FOLDER (several gigabytes
each) and are used again. The table is also written to FOLDER/results.md; the exit code is 1 if any test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import urllib.request
import venv
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST, PINNED, NEWEST = "2.6.0", "2.13.0", "newest"
WHOLE_SUITE = ("-n", "2", "--dist", "worksteal", "--timeout=300")


@dataclass(frozen=True)
class Result:
    torch: str
    python: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: tuple[str, ...]

    def row(self) -> str:
        counts = f"{self.passed} | {self.failed} | {self.skipped}"
        return f"| {self.torch} | {self.python} | {counts} | {self.seconds / 60:.0f} min |"


def newest_release() -> str:
    with urllib.request.urlopen("https://pypi.org/pypi/torch/json", timeout=60) as answer:
        return str(json.load(answer)["info"]["version"])


def environment(folder: Path, version: str) -> Path:
    """The Python of an environment with this torch and what the tests need; made or brought up to date."""
    python = folder / f"torch-{version}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parents[1], with_pip=True)
    # Without constraints.txt: each torch wants its own versions of what it needs.
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, f"torch=={version}", "-e", f"{ROOT}[dev]"], check=True)
    return python


def run_tests(python: Path, folder: Path, version: str, arguments: list[str]) -> Result:
    record = folder / f"results-{version}.xml"
    record.unlink(missing_ok=True)
    # An environment's cache of failed tests would be overwritten by the next one's.
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={record}"]
    subprocess.run([*command, *(arguments or WHOLE_SUITE)], cwd=ROOT, check=False)
    if not record.exists():
        sys.exit(f"versions: pytest wrote no results for torch {version}; its messages are above")
    (suite,) = ElementTree.parse(record).getroot().iter("testsuite")
    cases = [case for case in suite.iter("testcase") if {child.tag for child in case} & {"failure", "error"}]
    failures = tuple(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in cases)
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    facts = "import sys, torch; print(torch.__version__, sys.version.split()[0])"
    done = subprocess.run([str(python), "-c", facts], check=True, capture_output=True, text=True)
    name, _, python_version = done.stdout.strip().partition(" ")
    passed = total - len(failures) - skipped
    return Result(name, python_version, passed, len(failures), skipped, float(suite.get("time", 0)), failures)


def table(results: list[Result], arguments: list[str]) -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    what = f"`pytest {' '.join(arguments)}`" if arguments else "the whole suite"
    lines = [
        f"{datetime.date.today().isoformat()}, commit {commit or 'unknown'}, {what}:",
        "",
        "| torch | Python | passed | failed | skipped | time |",
        "| --- | --- | --- | --- | --- | --- |",
        *(result.row() for result in results),
    ]
    failed = [f"- torch {result.torch}: `{test}`" for result in results for test in result.failures]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else [])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tests under several versions of torch.")
    parser.add_argument("--torch", default=f"{OLDEST},{PINNED},{NEWEST}", help="versions, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / ".versions", help="where the environments are kept")
    options, arguments = parser.parse_known_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # The newest may be one of the others: each version once.
    versions = list(dict.fromkeys(newest_release() if v == NEWEST else v for v in options.torch.split(",")))
    results = []
    for version in versions:
        print(f"versions: torch {version}", flush=True)
        results.append(run_tests(environment(folder, version), folder, version, arguments))
        # Written after each, so that an interrupted run leaves what it has.
        (folder / "results.md").write_text(table(results, arguments), encoding="utf-8")
    print(table(results, arguments))
    return int(any(result.failed for result in results))


if __name__ == "__main__":
    sys.exit(main())
