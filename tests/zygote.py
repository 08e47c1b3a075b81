"""A process that has imported torch once and forks for every run, so that a small program takes a tenth of a second.

`python zygote.py FD` is the server; as a pytest plugin this file gives the fixture `firstnan`, which runs the command
line in a fork of one server per session (so one per xdist worker) and returns what became of it.
PYTEST_DONT_REWRITE: tests import it before pytest does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

LIMIT = 120.0
SOURCE = Path(__file__).resolve().parents[1] / "src"


# --- the server ---------------------------------------------------------------------------------------------------


def serve(channel: socket.socket) -> tuple[bool, list[str]]:
    """Forks for every request; returns only in a fork: is it plain python that is asked for, and with which words?"""
    requests = channel.makefile("r")
    for line in requests:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            requests.close()
            channel.close()
            os.setsid()
            return become(request)
        code = wait(pid, request["limit"], channel)
        if code is None:
            break
        channel.sendall(f"{code}\n".encode())
    # Nothing of this process is worth tearing down, and no exit handler may run in it.
    os._exit(0)


def wait(pid: int, limit: float, channel: socket.socket) -> int | None:
    """The exit code, -SIGKILL after the time limit; None when the client is gone. No process of the run survives."""
    watched = os.pidfd_open(pid)
    ready, _, _ = select.select([watched, channel], [], [], limit)
    if watched not in ready:
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(watched)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return code if watched in ready or not ready else None


def become(request: dict[str, Any]) -> tuple[bool, list[str]]:
    """Makes this fork look as if it had just been started with these words, in this folder and environment."""
    for number, (name, flags) in enumerate(
        [
            (os.devnull, os.O_RDONLY),
            (request["stdout"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
            (request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ]
    ):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    # Generators that python seeds afresh in every process.
    random.seed()
    sys.modules["numpy"].random.seed()
    return request["plain"], request["argv"]


def load_everything() -> None:
    """Imports what programs import; nothing is computed, because a pool of threads does not survive a fork."""
    import numpy
    import torch
    import torch._dynamo
    import torch.distributions
    import torch.utils.data
    import tqdm

    import firstnan.cli
    import firstnan.investigate
    import firstnan.watch

    torch.set_num_threads(1)
    assert firstnan.watch
    assert firstnan.investigate
    assert numpy
    assert tqdm


# --- the client ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What one run left behind; `report` is None where none was written."""

    code: int
    stdout: str
    stderr: str
    report: dict[str, Any] | None

    @property
    def found(self) -> dict[str, Any]:
        """The report of a run that found something."""
        assert self.code == 3, f"exit code {self.code}\n{self.stderr}"
        assert self.report is not None
        assert self.report["verdict"] == "nonfinite"
        return self.report

    @property
    def origin(self) -> dict[str, Any]:
        origin = self.found["origin"]
        assert isinstance(origin, dict), f"no origin was found\n{self.stderr}"
        return origin

    @property
    def cause(self) -> str:
        cause = self.found["cause"]
        assert isinstance(cause, dict), f"no cause was found\n{self.stderr}"
        return str(cause["slug"])


class Zygote:
    """The client's end of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment |= {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self.channel, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=self.environment, pass_fds=[theirs.fileno()]
            )
        self.answers: IO[str] = self.channel.makefile("r")

    def __call__(self, argv: Sequence[str | Path], *, cwd: Path, limit: float = LIMIT) -> Result:
        """Does what `python -m firstnan ARGV` does in `cwd`; `run` without `--json` writes its report aside."""
        words = [str(word) for word in argv]
        report = self.folder / f"{self.runs}.json"
        if words[0] == "run" and "--json" in words:
            report = cwd / words[words.index("--json") + 1]
        elif words[0] == "run":
            words[1:1] = ["--json", str(report)]
        return self._ask(words, cwd, limit, report)

    def python(self, argv: Sequence[str | Path], *, cwd: Path, limit: float = LIMIT) -> Result:
        """Does what `python ARGV` does in `cwd`, without firstnan."""
        return self._ask([str(word) for word in argv], cwd, limit, None)

    def _ask(self, words: list[str], cwd: Path, limit: float, report: Path | None) -> Result:
        out, err = self.folder / f"{self.runs}.out", self.folder / f"{self.runs}.err"
        self.runs += 1
        request = {"argv": words, "plain": report is None, "cwd": str(cwd), "env": self.environment, "limit": limit}
        request |= {"stdout": str(out), "stderr": str(err)}
        self.channel.sendall(f"{json.dumps(request)}\n".encode())
        answer = self.answers.readline()
        assert answer, "the fork server has died"
        written = json.loads(report.read_text()) if report is not None and report.exists() else None
        return Result(int(answer), out.read_text(), err.read_text(), written)

    def close(self) -> None:
        self.answers.close()
        self.channel.close()
        self.process.wait(timeout=30)


if __name__ == "__main__":
    load_everything()
    plain, words = serve(socket.socket(fileno=int(sys.argv[1])))
    import runpy

    if plain:
        sys.argv = words
        sys.path[0] = os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")
    else:
        sys.argv = ["-m", *words]
        # Python's own `-m` is this call; the fork leaves as any python process does, through SystemExit.
        runpy._run_module_as_main("firstnan")  # type: ignore[attr-defined]
else:
    import pytest

    @pytest.fixture(scope="session")
    def firstnan() -> Iterator[Zygote]:
        """Runs the command line in a fork that has torch already."""
        with tempfile.TemporaryDirectory(prefix="firstnan-zygote-") as folder:
            zygote = Zygote(Path(folder))
            yield zygote
            zygote.close()
