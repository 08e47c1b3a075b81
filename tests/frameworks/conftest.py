"""Tests with the frameworks themselves, in an environment of their own: `make test-frameworks`."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from firstnan import Report, load

SOURCE = Path(__file__).resolve().parents[2] / "src"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for wrappers in ("lightning.fabric.wrappers", "lightning_fabric.wrappers"):
    with contextlib.suppress(ImportError):  # they replace torch.compile for good, which is not our doing
        importlib.import_module(wrappers)


@pytest.fixture(autouse=True)
def _environment_of_frameworks() -> Iterator[None]:
    """Forgets what frameworks put into the environment (seeds, where their services are); what we put there stays."""
    before = dict(os.environ)
    yield
    for name in [name for name in os.environ if name not in before and not name.startswith("FIRSTNAN")]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if not name.startswith("FIRSTNAN")})


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str
    report: Report | None


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Runs a program in a folder of its own, as `firstnan run` does or with other words."""

    def run(program: str, *arguments: str, words: tuple[str, ...] = (), **environment: str) -> Ended:
        (tmp_path / "train.py").write_text(program)
        report = tmp_path / "report.json"
        command = words or (sys.executable, "-m", "firstnan", "run", "--verify", "0", "--json", str(report), "train.py")
        settings = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environment}
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        found = load(report) if report.exists() else None
        return Ended(done.returncode, done.stdout, done.stderr, found)

    return run
