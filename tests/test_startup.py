"""`FIRSTNAN=1 python ...`: which programs are watched, and how python is started for them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from firstnan.cli.startup import Command, follow, is_launcher

RUN = ["-m", "firstnan", "run", "--if-trained"]


@pytest.mark.parametrize(
    ("words", "watched"),
    [
        (["train.py", "-m", "x"], [*RUN, "--", "train.py", "-m", "x"]),
        (["-u", "-Wignore", "-X", "dev", "train.py"], ["-u", "-Wignore", "-X", "dev", *RUN, "--", "train.py"]),
        (["-m", "pkg.train", "--lr", "1"], [*RUN, "-m", "--", "pkg.train", "--lr", "1"]),
        (["-Bum", "pkg.train"], ["-Bu", *RUN, "-m", "--", "pkg.train"]),
        (["-BW", "ignore", "--", "-odd.py"], ["-BW", "ignore", *RUN, "--", "-odd.py"]),
        (["--check-hash-based-pycs", "never", "a.py"], ["--check-hash-based-pycs", "never", *RUN, "--", "a.py"]),
        (["/venv/bin/torchrun", "train.py"], [*RUN, "--", "/venv/bin/torchrun", "train.py"]),
    ],
)
def test_a_script_and_a_module_are_watched(words: list[str], watched: list[str]) -> None:
    command = Command.of(words)
    assert command is not None
    assert command.watched("1") == watched


@pytest.mark.parametrize(
    "words",
    [
        *([], ["-"], ["-c", "import torch"], ["-Bc", "1"], ["-i", "train.py"], ["-u"], ["-m"]),
        *(["-m", "firstnan", "run", "train.py"], ["/venv/bin/firstnan", "show"], ["-m", "pip", "list"]),
        ["-c", "from multiprocessing.spawn import spawn_main; spawn_main()", "--multiprocessing-fork"],
    ],
)
def test_what_is_no_program_is_left_alone(words: list[str]) -> None:
    assert Command.of(words) is None


def test_a_file_name_asks_for_a_report() -> None:
    command = Command.of(["train.py"])
    assert command is not None
    assert command.watched("report.json") == [*RUN, "-o", "report.json", "--", "train.py"]


def test_a_launcher_is_followed_or_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_launcher("torch.distributed.run", module=True)
    assert is_launcher("/usr/bin/torchrun", module=False)
    assert not is_launcher("train.py", module=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("FIRSTNAN", "0")  # so that what `follow` sets is removed again
    monkeypatch.setenv("FIRSTNAN_OPTIONS", "")
    monkeypatch.delenv("FIRSTNAN")
    follow("torchrun", ["--json", "out.json"])
    assert "are not watched" in capsys.readouterr().err
    assert "FIRSTNAN" not in os.environ
    (tmp_path / "firstnan.pth").touch()
    follow("torchrun", ["--if-trained", "--json", "a b.json", "--verify", "0"])
    assert (os.environ["FIRSTNAN"], os.environ["FIRSTNAN_OPTIONS"]) == ("1", "--json 'a b.json' --verify 0")
