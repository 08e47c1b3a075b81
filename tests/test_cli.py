"""The command line: what it accepts, what it refuses in one line, and what it leaves to the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import firstnan
from firstnan.cli import main as cli
from firstnan.records import Report
from firstnan.report import write
from report_samples import forward

pytestmark = pytest.mark.slow

SOURCE = Path(firstnan.__file__).parents[1]


def call(folder: Path, *words: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *flags, "-m", "firstnan", *words],
        cwd=folder,
        env={**inherited, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def script(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(textwrap.dedent(text).lstrip("\n"))


def loaded(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    assert isinstance(data, dict)
    return data


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr with which a command line is refused."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("firstnan: ")
    assert err.count("\n") == 1
    return err[len("firstnan: ") : -1]


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "no command given, expected one of run, show, fix, replay, causes, demo"),
        (("train",), "unknown command 'train'"),
        (("--nonsense",), "unknown option or argument: --nonsense"),
        (("run",), "no script given: firstnan run [options] script [arguments]"),
        (("run", "--trace", "-m"), "no module given: firstnan run [options] -m module [arguments]"),
        (("run", "--nonsense", "train.py"), "unknown option or argument: --nonsense"),
        (("run", "--js", "x", "train.py"), "unknown option or argument: --js"),
        (("run", "--replay", "always", "train.py"), "--replay must be auto or never, got 'always'"),
        (("run", "--json"), "--json needs a value"),
        (("run", "-o", "a.html", "-o", "b.md", "train.py"), "-o takes one file, got 'a.html' and 'b.md': --json FILE"),
        (("show", "-o", "a.html", "-o", "b.md", "x.json"), "-o takes one file, got 'a.html' and 'b.md'"),
        (("run", "--json", "train.py"), "no script given ('train.py' is the value of --json)"),
        (("run", "--verify", "few", "train.py"), "--verify must be an integer of at least 0, got 'few'"),
        (("causes", "--example"), "--example needs a cause"),
        (("show",), "no report.json given"),
        (("show", "a.json", "b.json"), "unknown option or argument: b.json"),
        (("demo", "--nonsense"), "unknown option or argument: --nonsense"),
        (("demo", "nothing_like_it"), "unknown demo 'nothing_like_it' (firstnan demo lists them)"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], part: str
) -> None:
    assert part in refused(capsys, *words)


def test_a_forgotten_run_is_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "")
    assert refused(capsys, "train.py").endswith("to run a program: firstnan run train.py")


@pytest.mark.parametrize("option", ["--json", "-o", "--output"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/report.json", "No such file or directory"),
        ("folder.json", "Is a directory"),
        ("train.py/report.json", "Not a directory"),
        ("a\0.json", "null"),
        ("x" * 300 + ".json", "File name too long"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_the_program_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    name: str,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "print('started')")
    (tmp_path / "folder.json").mkdir()
    line = refused(capsys, "run", option, name, "train.py")
    assert line.startswith(f"can't write {name!r}: ")
    assert reason in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.json", "train.py"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root can write everywhere")
def test_a_read_only_report_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.json").touch(0o400)
    assert "Permission denied" in refused(capsys, "run", "--json", "report.json", "train.py")


@pytest.mark.parametrize("command", ["run", "show"])
@pytest.mark.parametrize("name", ["report.pdf", "report", ".json"])
def test_an_unknown_format_is_refused(capsys: pytest.CaptureFixture[str], command: str, name: str) -> None:
    assert (
        refused(capsys, command, "-o", name, "x")
        == f"can't write {name!r}: the extension must be .json, .txt, .html or .md"
    )


def test_the_check_for_writing_leaves_files_as_they_were(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("precious")
    os.utime(old, (1, 1))
    assert cli._writable(str(old)) == old
    assert cli._writable(str(tmp_path / "new.json")) == tmp_path / "new.json"
    assert old.read_text() == "precious"
    assert old.stat().st_mtime == 1
    assert list(tmp_path.iterdir()) == [old]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_the_check_for_writing_does_not_wait_for_the_reader_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli._writable(str(tmp_path / "pipe")) == tmp_path / "pipe"


def test_a_report_path_is_absolute_whatever_the_program_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli._writable("report.json") == tmp_path / "report.json"
    assert cli._writable(None) is None


# --- what belongs to whom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ours", "theirs"),
    [
        ("train.py", "", "train.py"),
        ("train.py --json x -h -- -m", "", "train.py --json x -h -- -m"),
        ("--json r.json -o r.txt train.py -o x", "--json r.json -o r.txt", "train.py -o x"),
        ("--json=r.json -or.txt --trace train.py", "--json=r.json -or.txt --trace", "train.py"),
        ("--replay never -m pkg.train --trace", "--replay never -m", "pkg.train --trace"),
        ("--trace -- -odd.py --", "--trace", "-odd.py --"),
        ("--json --trace train.py", "--json --trace", "train.py"),
        ("--help", "--help", ""),
        ("", "", ""),
    ],
)
def test_the_command_line_is_split_before_the_program(words: str, ours: str, theirs: str) -> None:
    assert cli._split_options(words.split()) == (ours.split(), theirs.split())


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["show", "-h"], ["demo", "-h"]])
def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 0
    assert "firstnan" in capsys.readouterr().out


def test_the_version_is_printed(tmp_path: Path) -> None:
    done = call(tmp_path, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"firstnan {firstnan.__version__}\n", "")


# --- run ----------------------------------------------------------------------------------------------------------

NAN = """
    import sys, torch
    from torch import nn
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x = torch.rand(8, 4)
        if step == 2:
            x[3] = -x[3] * 100
        loss = torch.sqrt(x.sum(1, keepdim=True) + model(x) * 0.01).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "stop" in sys.argv and loss.isnan():
            sys.exit("the loss is NaN")
    print("trained")
"""


def test_the_program_gets_its_arguments_untouched_and_torch_is_not_imported_before_it(tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint(sys.argv, 'torch' in sys.modules)\nsys.exit(7)")
    done = call(tmp_path, "run", "--trace", "train.py", "--json", "x", "-h", "--", "-o")
    assert done.stdout == "['train.py', '--json', 'x', '-h', '--', '-o'] False\n"
    assert done.returncode == 7
    assert done.stderr == ""


def test_a_module_gets_its_arguments_untouched(tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint(__spec__.name, sys.argv[1:], sys.path[0])", "mod.py")
    done = call(tmp_path, "run", "-m", "mod", "-m", "--trace")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mod ['-m', '--trace'] {tmp_path}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nothing.py"], "firstnan: can't open file 'nothing.py': [Errno 2] No such file or directory\n"),
        (["-m", "nothing_at_all"], "firstnan: No module named nothing_at_all\n"),
    ],
)
def test_a_program_that_cannot_start_prints_one_line_returns_2_and_writes_nothing(
    tmp_path: Path, words: list[str], line: str
) -> None:
    done = call(tmp_path, "run", "--json", "report.json", *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_program_dies_by_the_signal(tmp_path: Path) -> None:
    script(tmp_path, "raise KeyboardInterrupt")
    done = call(tmp_path, "run", "train.py")
    assert done.returncode == -2
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "firstnan" not in done.stderr


def test_a_clean_program_keeps_its_output_and_its_report_says_so(tmp_path: Path) -> None:
    script(tmp_path, "import os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\nprint('fine')")
    done = call(tmp_path, "run", "--json", "report.json", "train.py")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert loaded(tmp_path / "report.json")["verdict"] == "clean"
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("args", [(), ("stop",)])
def test_a_program_with_a_nan_ends_with_3_and_both_reports(tmp_path: Path, args: tuple[str, ...]) -> None:
    script(tmp_path, NAN)
    done = call(tmp_path, "run", "--json", "report.data", "-o", "report.txt", "train.py", *args)
    assert done.returncode == 3
    report = loaded(tmp_path / "report.data")  # --json is JSON whatever the extension
    assert (report["verdict"], report["step"], report["origin"]["op"]) == ("nonfinite", 2, "sqrt")
    assert "sqrt" in (tmp_path / "report.txt").read_text()
    assert "train.py" in done.stderr
    assert "train.py" not in done.stdout


# --- show and demo ------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(Report(verdict="clean"), tmp_path / "report.json")
    return tmp_path / "report.json"


def test_show_prints_a_report_without_torch(saved: Path) -> None:
    done = call(saved.parent, "show", "report.json", flags=("-X", "importtime"))
    assert done.returncode == 0
    assert done.stdout.strip()
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "firstnan.report" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("name", ["copy.json", "copy.txt"])
def test_show_converts_a_report(saved: Path, name: str) -> None:
    done = call(saved.parent, "show", "report.json", "-o", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    copy = saved.with_name(name)
    if name.endswith(".json"):
        assert loaded(copy) == loaded(saved)
    else:
        assert copy.read_text().strip() == call(saved.parent, "show", "report.json").stdout.strip()


def test_show_writes_a_page_and_markdown_without_torch(saved: Path) -> None:
    for name, start in (("copy.html", "<!DOCTYPE html>"), ("copy.md", "### firstnan: clean, no NaN or Inf")):
        done = call(saved.parent, "show", "report.json", "-o", name, flags=("-X", "importtime"))
        assert done.returncode == 0
        assert saved.with_name(name).read_text().startswith(start)
        assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_show_opens_a_page(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 3)
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix: str(saved.parent))
    page = saved.with_suffix(".html")
    assert cli.main(["show", str(saved), "--open"]) == 0
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["show", str(saved), "--open", "-o", str(saved.with_name("b.html"))]) == 0
    assert opened == [page.as_uri(), saved.with_name("b.html").as_uri()]
    assert cli.main(["show", str(saved), "--open"]) == 0
    assert f"no browser was found to open {page}" in capsys.readouterr().err
    assert "--open needs an .html file" in refused(capsys, "show", str(saved), "--open", "-o", "a.txt")


def test_show_annotates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(forward(), tmp_path / "r.json")
    assert cli.main(["show", str(tmp_path / "r.json"), "--annotate", "github"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "::error file=nowhere/train.py,line=10,endLine=10,col=16,endColumn=34,title=firstnan%3A logarithm"
    )
    assert out.count("\n") == 1


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"format": "other"}'])
def test_show_refuses_a_file_that_is_not_a_report_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    assert str(path) in refused(capsys, "show", str(path))


def test_show_accepts_a_reader_that_closes_the_pipe_early(saved: Path) -> None:
    code = """if True:
        import os, sys
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(reader)
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    """
    done = subprocess.run(
        [sys.executable, "-c", code, "-m", "firstnan", "show", str(saved)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_demo_lists_every_program(tmp_path: Path) -> None:
    from firstnan.cli.demos import demos

    done = call(tmp_path, "demo")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[:-2]] == [demo.name for demo in demos()]


def test_demo_suggests_a_name_that_is_close(capsys: pytest.CaptureFixture[str]) -> None:
    from firstnan.cli.demos import demos

    name = demos()[0].name
    assert refused(capsys, "demo", name + "x") == f"unknown demo {name + 'x'!r}; did you mean {name!r}?"


def test_demo_runs_a_program_that_fails(tmp_path: Path) -> None:
    from firstnan.cli.demos import demos

    done = call(tmp_path, "demo", demos()[0].name)
    assert done.returncode == 3
    assert demos()[0].path.name in done.stderr
