"""The sdist and the wheel: built without network, installed into a fresh environment and tried there."""

from __future__ import annotations

import json
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

    def run(self, *command: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, outside of any checkout, with these environment variables."""
        words = [str(self.folder / "bin" / command[0]), *map(str, command[1:])]
        return subprocess.run(
            words,
            cwd=self.folder,
            env=ENVIRONMENT | settings,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
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
        *(
            "Makefile",
            "setup.py",
            "firstnan.pth",
            "constraints.txt",
            ".ci/run",
            "tools/versions.py",
            "docs/design.md",
            "docs/versions.md",
            "docs/requirements.txt",
            "mkdocs.yml",
        ),
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
        if p.suffix in (".py", ".toml", ".typed", ".html", ".css", ".js")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected | {"firstnan.pth"}
    assert "firstnan/py.typed" in names


def test_an_editable_install_has_the_startup_file(built: Built, tmp_path: Path) -> None:
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    with zipfile.ZipFile(tmp_path / python(build, tmp_path, cwd=built.sources)) as archive:
        assert archive.read("firstnan.pth") == (ROOT / "firstnan.pth").read_bytes()
        assert b"\nfirstnan.pth," in b"\n" + archive.read(f"{NAME}.dist-info/RECORD")


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


FAILS = """\
import sys
import torch

w = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
for x in torch.tensor([1.0, 2.0, 0.0, 3.0]):
    loss = (w * x).log().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("went on", sys.argv[1:])
"""


def test_a_variable_is_enough_to_watch_a_program(installed: Installed) -> None:
    (installed.folder / "train.py").write_text(FAILS)
    plain = installed.run("python", "train.py", "--lr", "1")
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "went on ['--lr', '1']\n", "")
    off = installed.run("python", "train.py", "--lr", "1", FIRSTNAN="0")
    assert (off.returncode, off.stdout, off.stderr) == (0, plain.stdout, "")
    on = installed.run("python", "-u", "train.py", "--lr", "1", FIRSTNAN="1")
    assert (on.returncode, on.stdout) == (3, ""), on.stderr
    assert "created in forward, step 2, at train.py:7" in on.stderr
    wrong = installed.run("python", "train.py", FIRSTNAN="yes")
    assert (wrong.returncode, wrong.stdout) == (0, "went on []\n")
    assert "FIRSTNAN must be 1 or" in wrong.stderr


def test_a_job_of_several_processes_leaves_the_report_of_the_one_that_failed(installed: Installed) -> None:
    """The launcher ends last, imports torch too, and is clean."""
    (installed.folder / "train.py").write_text(FAILS)
    launcher = "import subprocess, sys, torch\nsys.exit(subprocess.call([sys.executable, '-m', 'train']))\n"
    (installed.folder / "launch.py").write_text(launcher)
    done = installed.run("python", "launch.py", FIRSTNAN="report.json")
    assert done.returncode == 3, done.stderr
    report = json.loads((installed.folder / "report.json").read_text())
    assert (report["verdict"], report["origin"]["line"], report["step"]) == ("nonfinite", 7, 2)
    (installed.folder / "report.json").unlink()
    assert installed.run("python", "-c", "import torch", FIRSTNAN="report.json").returncode == 0
    (installed.folder / "healthy.py").write_text("import torch\ntorch.ones(2).log()\n")
    assert installed.run("python", "healthy.py", FIRSTNAN="report.json").returncode == 0
    assert not (installed.folder / "report.json").exists()


def test_the_startup_file_loads_nothing_if_the_variable_is_not_set(installed: Installed) -> None:
    code = "import sys; print(sorted(n for n in sys.modules if 'firstnan' in n))"
    assert installed.run("python", "-c", code).stdout == "[]\n"
