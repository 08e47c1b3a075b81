"""`firstnan fix`: shows the proven change, and applies it only to the files it was made for."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firstnan.cli import fix
from firstnan.cli import main as cli
from firstnan.cli.fix import apply, show
from firstnan.records import Edit, Remedy, Report
from firstnan.records.files import load
from firstnan.repair.patch import PatchError, choose, how_to_apply, new_contents, portable, render
from firstnan.report import write

OLD = "import torch\n\n\ndef f(x):\n    return torch.log(x)\n"
NEW = OLD.replace("log(x)", "log(x.clamp_min(1e-8))")


def change(title: str, path: Path, old: str, new: str, *result: Any) -> Remedy:
    """A remedy that replaces the lines that differ, as edit and diff."""
    before, after = old.split("\n"), new.split("\n")
    assert len(before) == len(after)
    pairs = [(i, a, b) for i, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b]
    edits = tuple(Edit(str(path), i, 0, i, len(a), a, b) for i, a, b in pairs)
    return Remedy(title, render(str(path), old, new), *result, edits=edits)


def both(*remedies: Remedy) -> Remedy:
    """The changes of several remedies in one."""
    return Remedy("both", "".join(r.diff for r in remedies), edits=tuple(e for r in remedies for e in r.edits))


def written(remedies: Iterable[Remedy], version: str) -> None:
    """A report with these remedies; older versions did not write edits."""
    found = tuple(remedies) if version == "new" else tuple(replace(remedy, edits=()) for remedy in remedies)
    write(Report("nonfinite", 5, remedies=found), "report.json")


@pytest.fixture(params=["new", "old"])
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def train(tmp_path: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program with a report that has one failed, one proven and one untried change of it."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(OLD)
    remedies = (
        change("add an eps", path, OLD, NEW, True, True, 20),
        change("take the absolute value", path, OLD, OLD.replace("log(x)", "log(x.abs())")),
        Remedy("look at the data"),
        change("use log2", path, OLD, OLD.replace("log", "log2"), True, False),
    )
    written(remedies, version)
    return path


def run(*words: str) -> int:
    return cli.main(["fix", "report.json", *words])


def test_the_proven_change_is_shown_and_nothing_is_changed(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "> 1  add an eps (tried: step 5 is finite, and so are the 20 steps after it; not tried beyond step 25)\n"
    )
    assert "  4  use log2 (tried: step 5 is still non-finite)\n" in out
    assert out.endswith("--- a/train.py\n+++ b/train.py\n" + render("", OLD, NEW).split("\n", 2)[2])
    assert train.read_text() == OLD
    assert sorted(os.listdir()) == ["report.json", "train.py"]


def test_edits_are_in_the_report(train: Path, version: str) -> None:
    remedy = load("report.json").remedies[0]
    assert remedy.edits == (change("", train, OLD, NEW).edits if version == "new" else ())


@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch(1)")
def test_what_is_shown_is_a_patch(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    done = subprocess.run(["patch", "-p1"], input=capsys.readouterr().out, text=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stdout
    assert train.read_text() == NEW


def test_apply_changes_the_file_and_keeps_it(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.chmod(0o750)
    assert run("--apply") == 0
    assert capsys.readouterr().out.endswith("changed train.py, backup in train.py.orig\n")
    assert train.read_text() == NEW
    assert train.stat().st_mode & 0o777 == 0o750
    backup = train.with_name("train.py.orig")
    assert backup.read_text() == OLD
    assert sorted(os.listdir()) == ["report.json", "train.py", "train.py.orig"]


def test_a_backup_is_never_overwritten(train: Path) -> None:
    for name in ("train.py.orig", "train.py.orig.1"):
        train.with_name(name).write_text("precious")
    assert run("--apply") == 0
    assert train.with_name("train.py.orig").read_text() == train.with_name("train.py.orig.1").read_text() == "precious"
    assert train.with_name("train.py.orig.2").read_text() == OLD


def test_a_file_that_changed_since_is_refused(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.write_text(OLD.replace("    return", "    x = x + 1\n    return"))
    before = train.read_bytes()
    assert run("--apply") == 2
    err = capsys.readouterr().err
    assert "train.py:5: expected '    return torch.log(x)', found '    x = x + 1" in err
    assert "nothing was changed" in err
    assert err.count("\n") == 1
    assert train.read_bytes() == before
    assert sorted(os.listdir()) == ["report.json", "train.py"]
    # What was applied once does not fit again.
    train.write_text(OLD)
    assert (run("--apply"), run("--apply")) == (0, 2)


def test_an_unproven_change_has_to_be_named(train: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    written([change("take abs", train, OLD, NEW)], version)
    assert run("--apply") == 1
    assert "no fix is proven; --number K selects one anyway" in capsys.readouterr().out
    assert train.read_text() == OLD
    assert run("--apply", "--number", "1") == 0
    assert train.read_text() == NEW


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--number", "5"), "--number must be a fix of the report, which has 4, got 5"),
        (("--number", "0"), "which has 4, got 0"),
        (("--number", "3"), "fix 3 is advice without a diff: look at the data"),
        (("--number", "-1"), "--number must be an integer of at least 0, got '-1'"),
        (("--number", "two"), "--number must be an integer of at least 0, got 'two'"),
        (("--root", "nowhere"), "--root must be a folder, got 'nowhere'"),
    ],
)
def test_a_wrong_number_is_refused(
    train: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert run("--apply", *words) == 2
    assert says in capsys.readouterr().err
    assert train.read_text() == OLD


def test_a_report_that_is_none_is_refused(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("report.json").write_text("{}")
    assert run() == 2
    assert capsys.readouterr().err.startswith("firstnan: report.json: not a firstnan report")


def test_a_report_without_changes(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(Report("nonfinite", 5), "report.json")
    assert run() == 1
    assert capsys.readouterr().out == "the report proposes no fix\n"


def test_several_files_are_changed_together_or_not_at_all(train: Path) -> None:
    other = train.with_name("other.py")
    other.write_text("a\n")
    remedy = both(change("", train, OLD, NEW), change("", other, "a\n", "b\n"))
    other.write_text("c\n")
    with pytest.raises(PatchError, match=r"other\.py:1: expected 'a', found 'c' .*; nothing was changed"):
        apply(remedy, io.StringIO())
    assert train.read_text() == OLD
    other.write_text("a\n")
    apply(remedy, io.StringIO())
    assert (train.read_text(), other.read_text()) == (NEW, "b\n")


def test_a_failure_while_writing_puts_the_first_file_back(train: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = train.with_name("other.py")
    other.write_text("a\n")
    remedy = both(change("", train, OLD, NEW), change("", other, "a\n", "b\n"))
    real, calls = os.replace, []

    def full_disk(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(PatchError, match=r"No space left on device; nothing was changed"):
        apply(remedy, io.StringIO())
    assert (train.read_text(), other.read_text()) == (OLD, "a\n")
    assert sorted(os.listdir()) == ["other.py", "report.json", "train.py"]


def test_a_link_stays_a_link(train: Path) -> None:
    real = train.with_name("real.py")
    train.rename(real)
    train.symlink_to("real.py")
    assert run("--apply") == 0
    assert train.is_symlink()
    assert real.read_text() == NEW
    assert real.with_name("real.py.orig").read_text() == OLD


# --- which files: whoever wrote the report chose their names -------------------------------------------------------


def proven(path: Path | str, old: str = OLD, new: str = NEW) -> Remedy:
    return change("x", Path(path), old, new, True, True, 20)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project, the current folder, next to a folder with a program of somebody else."""
    (tmp_path / "project").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text(OLD)
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def assert_refused(project: Path, capsys: pytest.CaptureFixture[str], says: str, *words: str) -> None:
    before = tree(project.parent)
    assert run("--apply", *words) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.endswith("; nothing was changed\n")
    assert err.count("\n") == 1
    assert tree(project.parent) == before


@pytest.mark.parametrize("way", ["dots", "dots_below", "absolute", "slash_lost", "link", "linked_folder", "moved"])
def test_a_file_outside_is_refused(
    project: Path, version: str, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = project.parent / "other" / "train.py"
    names = {
        "dots": "../other/train.py",
        "dots_below": "folder/../../other/train.py",
        "absolute": str(other),
        "slash_lost": str(other).lstrip("/"),
        "link": "link.py",
        "linked_folder": "below/linked/train.py",
        "moved": str(project / "train.py"),
    }
    (project / "folder").mkdir()
    (project / "below").mkdir()
    (project / "link.py").symlink_to(other)
    (project / "below" / "linked").symlink_to("../../other")
    (project / "mine.py").write_text(OLD)
    written([both(proven("mine.py"), proven(names[way]))], version)
    if way == "moved":
        (project / "train.py").write_text(OLD)
        shutil.copytree(project, project.parent / "copy", symlinks=True)
        monkeypatch.chdir(project.parent / "copy")
    assert_refused(project, capsys, f"{names[way]}: not inside {os.getcwd()}; --root DIR", "--number", "1")


@pytest.mark.parametrize("way", ["dots", "absolute", "link", "linked_folder"])
def test_a_file_inside_is_changed_whatever_it_is_called(project: Path, version: str, way: str) -> None:
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(OLD)
    (project / "link.py").symlink_to("src/train.py")
    (project / "linked").symlink_to("src")
    names = {
        "dots": "../project/src/../src/train.py",
        "absolute": str(project / "src" / "train.py"),
        "link": "link.py",
        "linked_folder": "linked/train.py",
    }
    written([proven(names[way])], version)
    assert run("--apply") == 0
    assert (project / "src" / "train.py").read_text() == NEW
    assert (project / "link.py").is_symlink()


def test_the_root_is_where_files_may_be_changed(
    project: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = project.parent / "other"
    (project / "train.py").write_text(OLD)
    written([proven(project / "train.py")], version)
    assert_refused(project, capsys, f"train.py: not inside {other}", "--root", "../other")
    for name, root in ((other / "train.py", "../other"), ("train.py", str(other)), ("other/train.py", "..")):
        (other / "train.py").write_text(OLD)
        written([proven(name)], version)
        assert run("--apply", "--root", root) == 0
        assert (other / "train.py").read_text() == NEW
        assert f"for patch -p1 -d {os.path.abspath(root)}:\n" in capsys.readouterr().out
    assert (project / "train.py").read_text() == OLD


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".git/hooks/pre-commit", ".git is hidden"),
        ("lib/.hg/hgrc.py", ".hg is hidden"),
        (".startup.py", ".startup.py is hidden"),
        ("env/lib/python3.11/site-packages/pkg/train.py", "site-packages is an installed package"),
        ("env/lib/python3/dist-packages/train.py", "dist-packages is an installed package"),
    ],
)
def test_what_is_not_source_of_the_program_is_refused(
    project: Path, version: str, name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(OLD)
    (project / "innocent.py").symlink_to(path)
    for named in (name, "innocent.py"):
        written([proven(named)], version)
        assert_refused(project, capsys, f"{named}: {says}, not part of the program in {project}")
    if path.name == "train.py":  # named as the root, it is the program
        written([proven("train.py")], version)
        assert run("--apply", "--root", str(path.parent)) == 0
        assert path.read_text() == NEW


@pytest.mark.parametrize(
    "name", ["pipe", "folder", "loop.py", "missing.py", "/dev/zero", "../../etc/shadow", "x" * 5000]
)
def test_what_is_not_a_source_file_is_refused(
    project: Path, version: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    Path("folder").mkdir()
    Path("loop.py").symlink_to("loop.py")
    written([proven(name)], version)
    assert_refused(project, capsys, name)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_path_that_becomes_a_link_meanwhile_is_not_followed(
    project: Path, version: str, linked: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "src").mkdir()
    (project / "src" / "train.py").write_text(OLD)
    written([proven("src/train.py")], version)

    def swapped(*given: Any) -> Any:
        found = new_contents(*given)
        path = project / "src" / ("train.py" if linked == "file" else "")
        path.rename(project / "was")
        path.symlink_to(project.parent / "other" / ("train.py" if linked == "file" else ""))
        return found

    monkeypatch.setattr(fix, "new_contents", swapped)
    assert run("--apply") == 2
    assert "became a link; nothing was changed" in capsys.readouterr().err
    assert {path.name for path in project.parent.rglob("*.py*")} == {"train.py"}
    assert (project.parent / "other" / "train.py").read_text() == OLD


@pytest.mark.parametrize(
    ("diff", "says"),
    [
        ("@@ -1,0 +2 @@\n+import os\n", "expected '@@ -1,0 +2 @@' near the change"),
        ("@@ -1 +1 @@\n-import torch\n+import os\n", "expected '@@ -1 +1 @@' near the change"),
        ("@@ -1 +1 @@\n-import os\n+import sys\n", "train.py:1: expected 'import os', found 'import torch'"),
    ],
)
def test_a_diff_without_the_lines_around_it_is_refused(
    project: Path, diff: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text(OLD)
    made_up = Remedy("x", f"--- a/train.py\n+++ b/train.py\n{diff}", True, True, 20)
    written([made_up], "old")
    assert_refused(project, capsys, says)


@pytest.mark.parametrize("text", ["", "\n" * 9, "\n    \n"])
def test_a_change_that_no_line_of_the_file_pins_is_refused(
    project: Path, version: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "train.py").write_text(text)
    edit = Edit("train.py", 1, 0, 1, 0, "", "import os\n")
    written([Remedy("x", render("train.py", text, edit.new + text), True, True, 20, edits=(edit,))], version)
    assert_refused(project, capsys, "train.py: no line of the file shows where the change belongs")


def test_an_edit_of_an_empty_file_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text(OLD)
    (project / "__init__.py").write_text("")
    written([both(proven("train.py"), Remedy("", "", edits=(Edit("__init__.py", 1, 0, 1, 0, "", ""),)))], "new")
    assert_refused(project, capsys, "__init__.py: no line of the file", "--number", "1")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_not_obeyed(train: Path) -> None:
    remedy = change("a\x1b[2Jb", train, OLD, NEW.replace("1e-8", "'\x1b[2J'"), True, True, 20)
    stream = Terminal()
    show(Report("nonfinite", 5, remedies=(remedy,)), None, stream)
    assert "\x1b" not in stream.getvalue()
    assert "\\x1b[2J" in stream.getvalue()


def test_paths_are_written_from_the_folder_where_they_are_below_it(train: Path, tmp_path: Path) -> None:
    remedy = change("", train, OLD, NEW)
    for folder, name in ((tmp_path, "train.py"), (tmp_path.parent, f"{tmp_path.name}/train.py")):
        text, base = portable(remedy, str(folder))
        assert text.startswith(f"--- a/{name}\n+++ b/{name}\n")
        assert base == str(folder)


def test_elsewhere_paths_are_written_from_the_folder_of_the_files(train: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "run"
    elsewhere.mkdir()
    helper = tmp_path / "lib" / "helper.py"
    helper.parent.mkdir()
    helper.write_text(OLD)
    for path in (train, Path(f"{elsewhere}/../train.py")):
        text, base = portable(change("", path, OLD, NEW), str(elsewhere))
        assert text.startswith("--- a/train.py\n+++ b/train.py\n")
        assert base == str(tmp_path)
    text, base = portable(both(change("", train, OLD, NEW), change("", helper, OLD, NEW)), str(elsewhere))
    assert "--- a/train.py\n" in text
    assert "--- a/lib/helper.py\n" in text
    assert base == str(tmp_path)
    # A folder whose name only begins alike is another one.
    assert portable(change("", train, OLD, NEW), str(tmp_path)[:-1])[1] == str(tmp_path)


@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch(1)")
def test_a_patch_from_elsewhere_says_where_it_belongs(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "a run"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert cli.main(["fix", "../report.json"]) == 0
    shown = capsys.readouterr().out
    assert f"\nfor patch -p1 -d {tmp_path}:\n\n--- a/train.py\n" in shown
    Path("x.patch").write_text(shown)
    command = how_to_apply(str(tmp_path), str(elsewhere), str(elsewhere / "x.patch"))
    assert command == f"patch -p1 -d {tmp_path} < '{elsewhere}/x.patch'"
    assert how_to_apply(str(elsewhere), ".") == ""
    done = subprocess.run(command, shell=True, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stdout
    assert train.read_text() == NEW


def test_the_best_is_the_first_proven_one(train: Path) -> None:
    proven = change("a", train, OLD, NEW, True, True, 3)
    report = Report("nonfinite", remedies=(Remedy("b", proven.diff), proven, replace(proven, title="c")))
    assert choose(report) is proven
    assert choose(Report("nonfinite")) is None


def test_a_diff_that_is_none_is_shown_as_it_is(tmp_path: Path) -> None:
    assert portable(Remedy("", "no diff"), str(tmp_path)) == ("no diff", str(tmp_path))


def test_lines_that_look_like_the_head_of_a_diff_keep_their_paths(train: Path) -> None:
    old = f"x = 1\n-- a/{train}\n"
    diff, _ = portable(change("", train, old, f"x = 2\n++ b/{train}\n"), str(train.parent))
    assert diff.startswith("--- a/train.py\n+++ b/train.py\n@@")
    assert f"\n--- a/{train}\n+x = 2\n+++ b/{train}\n" in diff
