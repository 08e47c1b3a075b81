"""The status line of `firstnan run --live` and what the program prints on the same terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from firstnan.report.live import LiveStatus

OURS = re.compile(r"\x1b\[2K\r|\x1b\[[0-9;]*m|firstnan:  [^\r\n]*?\x1b\[0m\r")


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after this."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if part == "\n":
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif not part.startswith("\x1b"):
            lines[-1] = lines[-1].ljust(column)[:column] + part + lines[-1][column + 1 :]
            column += 1
    return lines


class Terminal:
    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.out: TextIO = open(theirs, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
        self.err: TextIO = open(theirs, "w", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed below

    def read(self) -> str:
        found = b""
        while select.select([self._ours], [], [], 0.2)[0]:
            found += os.read(self._ours, 65536)
        return found.decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.out.close()
        self.err.close()
        os.close(self._ours)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = Terminal()
    yield found
    found.close()


def test_the_program_prints_on_clean_lines(terminal: Terminal) -> None:
    live = LiveStatus(terminal.err, (terminal.out, terminal.err))
    live.show(["1 step", "loss 0.123456789"])
    print("a", file=terminal.out)
    live.show(["2 steps", "loss 0.123456789"])
    print("bc", file=terminal.err)
    live.show(["3 steps", "loss 0.123456789"])
    shown = terminal.read()
    assert screen(shown) == ["a", "bc", "firstnan:  3 steps  loss 0.123456789"]
    live.end()
    assert screen(shown + terminal.read()) == ["a", "bc", ""]


def test_an_unfinished_line_of_the_program_stays_as_it_is(terminal: Terminal) -> None:
    live = LiveStatus(terminal.err, (terminal.out, terminal.err))
    print("epoch 1 ", end="", file=terminal.out, flush=True)
    live.show(["1 step"])
    assert terminal.read() == "epoch 1 "
    print("done", file=terminal.out)
    live.show(["2 steps"])
    live.end()
    written = terminal.read()
    assert OURS.sub("", written) == "done\n"
    assert "2 steps" in written


def test_the_streams_are_as_before_when_it_ends(terminal: Terminal) -> None:
    live = LiveStatus(terminal.err, (terminal.out, terminal.err, None))
    assert "write" in vars(terminal.out)
    live.end()
    assert "write" not in vars(terminal.out)
    assert "write" not in vars(terminal.err)


def test_what_is_no_terminal_is_left_alone(terminal: Terminal, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w") as log:
        live = LiveStatus(terminal.err, (log, terminal.err))
        live.show(["1 step"])
        print("to the file", file=log)
        assert "write" not in vars(log)
        live.end()
    assert (tmp_path / "log").read_text() == "to the file\n"


PROGRAM = """
import torch, time
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(30):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.03)
    if step % 5 == 0:
        print("step", step, flush=True)
"""


@pytest.mark.slow
def test_a_program_under_run_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "firstnan", "run", "--live", "train.py"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the program has ended
                break
            if not part:
                break
            found += part
    os.close(ours)
    assert process.returncode == 0
    written = found.decode().replace("\r\n", "\n")
    lines = [line.rstrip() for line in screen(written)]
    assert lines == [f"step {i}" for i in range(0, 30, 5)] + [""]
    assert len(re.findall(r"firstnan:  \d+ steps?  loss", written)) >= 2
