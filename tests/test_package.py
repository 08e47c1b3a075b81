"""The sdist and the wheel: built without network, installed into a fresh environment and tried there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest
import torch

import firstnan

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"firstnan-{firstnan.__version__}"
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
# Only what is installed counts: neither the checkout nor settings of the one who runs the tests.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path
    sources: Path
    """The unpacked sdist, from which the wheel was built."""


def python(code: str, *words: str | Path, cwd: Path) -> str:
    command = [sys.executable, "-c", code, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """What `python -m build --no-isolation` makes: an sdist of the checkout, and a wheel of that sdist."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    shutil.copytree(ROOT, checkout, ignore=NOT_SOURCE)
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    build = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    sdist = folder / python(build, "build_sdist", folder, cwd=checkout)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    wheel = folder / python(build, "build_wheel", folder, cwd=folder / NAME)
    return Built(sdist, wheel, folder / NAME)


@dataclass(frozen=True)
class Installed:
    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, outside of any checkout."""
        words = [str(self.folder / "bin" / command[0]), *map(str, command[1:])]
        return subprocess.run(
            words, cwd=self.folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A new virtual environment with the wheel; torch and the like come from where this Python has them."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, env=ENVIRONMENT, timeout=120)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", built.wheel]
    subprocess.run(install, check=True, env=ENVIRONMENT, timeout=120)
    # A folder named in a .pth file is not searched for further .pth files, so no editable firstnan comes with it.
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return Installed(folder)


def test_the_sdist_holds_what_a_contributor_needs(built: Built) -> None:
    for name in (
        *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
        *("Makefile", "constraints.txt", ".ci/run", "tools/versions.py", "docs/design.md", "docs/versions.md"),
        *("tests/conftest.py", "tests/test_package.py", "tests/snippets/forward.txt", "tests/goldens/forward.txt"),
    ):
        assert (built.sources / name).is_file(), name
    tests = {p.relative_to(ROOT) for p in (ROOT / "tests").rglob("*") if p.suffix in (".py", ".txt")}
    packed = {p.relative_to(built.sources) for p in (built.sources / "tests").rglob("*")}
    assert tests <= packed, sorted(map(str, tests - packed))[:5]
    assert not [p for p in built.sources.rglob("*") if p.name == "__pycache__"]


def test_the_wheel_holds_the_package_alone(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    package = ROOT / "src"
    expected = {
        p.relative_to(package).as_posix()
        for p in (package / "firstnan").rglob("*")
        if p.suffix in (".py", ".toml", ".typed")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert "firstnan/py.typed" in names


def test_the_metadata(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = message_from_string(archive.read(f"{NAME}.dist-info/METADATA").decode())
    assert metadata["Version"] == firstnan.__version__
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed == PROJECT["dependencies"]
    assert [line.split(",")[0] for line in metadata.get_all("Project-URL", [])] == list(PROJECT["urls"])


def test_the_version(installed: Installed) -> None:
    done = installed.run("firstnan", "--version")
    assert (done.returncode, done.stdout.split()[-1]) == (0, firstnan.__version__), done.stderr


def test_it_is_the_installed_package_that_runs(installed: Installed) -> None:
    done = installed.run("python", "-c", "import firstnan; print(firstnan.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(installed.folder), done.stderr


def test_a_demo_finds_its_nan(installed: Installed) -> None:
    done = installed.run("firstnan", "demo", "siamese")
    assert done.returncode == 3, done.stderr
    assert "sqrt" in done.stderr


def test_the_causes_are_listed(installed: Installed) -> None:
    done = installed.run("firstnan", "causes")
    assert done.returncode == 0, done.stderr
    assert "log_of_zero" in done.stdout
