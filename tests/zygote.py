"""A process that has imported torch once and forks for every run, so that a small program takes a tenth of a second.

`python zygote.py FD` is the server; as a pytest plugin this file gives the fixture `firstnan`, which runs the command
line in a fork of one server per session (so one per xdist worker) and returns what became of it. A run that starts
the program again does so with `sys.executable`, which in a fork is a small script that asks the server for another.
PYTEST_DONT_REWRITE: tests import it before pytest does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

LIMIT = 120.0
MARK = "FIRSTNAN_TEST_MARK"
"""The variable that all processes of a run have in their environment: 32 characters."""
SOURCE = Path(__file__).resolve().parents[1] / "src"


def ask(address: str, request: dict[str, Any]) -> int:
    """The exit code of what the server has done for this request; one connection a request."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(address)
        channel.sendall(f"{json.dumps(request)}\n".encode())
        answers = channel.makefile().readlines()  # the process, and its exit code when it has ended
    if len(answers) != 2:
        raise ConnectionError("the fork server has died")
    return int(answers[1])


# --- the server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    pid: int
    channel: socket.socket
    deadline: float
    in_session: bool


class Server:
    """Forks for every request and answers with the exit code; a run ends with its client, all end with stdin."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.runs: dict[int, Run] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, self._leave)

    def serve(self) -> dict[str, Any]:
        """Never ends; returns in every fork, with the request it has to follow."""
        while True:
            soonest = min((run.deadline for run in self.runs.values()), default=None)
            for key, _ in self.selector.select(None if soonest is None else max(soonest - time.monotonic(), 0)):
                if key.fileobj in self.selector.get_map():  # it may have gone with one before it
                    request = key.data(key.fileobj)
                    if request is not None:
                        return dict(request)
            for run in self.runs.values():
                if run.deadline <= time.monotonic():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(run.pid, signal.SIGKILL)

    def _accept(self, listener: socket.socket) -> dict[str, Any] | None:
        channel, _ = listener.accept()
        request: dict[str, Any] = json.loads(channel.makefile().readline())
        pid = os.fork()
        if pid == 0:
            for key in list(self.selector.get_map().values()):
                if key.fileobj != 0:
                    os.close(key.fd)
            self.selector.close()
            channel.close()
            return request
        if not request.get("mark"):
            with contextlib.suppress(PermissionError):  # the fork has done it already and runs something else
                os.setpgid(pid, pid)
        ended = os.pidfd_open(pid)
        self.runs[ended] = Run(pid, channel, time.monotonic() + request["limit"], bool(request.get("mark")))
        with contextlib.suppress(BrokenPipeError):  # whoever asked has ended meanwhile
            channel.sendall(f"{pid}\n".encode())
        self.selector.register(ended, selectors.EVENT_READ, self._ended)
        self.selector.register(channel, selectors.EVENT_READ, self._abandoned)
        return None

    def _ended(self, ended: int) -> None:
        """Answers, and leaves nothing of the run behind."""
        run = self.runs.pop(ended)
        if not run.in_session:  # else what outlives it is looked for
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1])
        self.selector.unregister(ended)
        os.close(ended)
        self.selector.unregister(run.channel)
        with run.channel, contextlib.suppress(BrokenPipeError):
            run.channel.sendall(f"{code}\n".encode())

    def _abandoned(self, channel: socket.socket) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet, or no more
            os.killpg(next(run.pid for run in self.runs.values() if run.channel is channel), signal.SIGKILL)
        self._ended(next(ended for ended, run in self.runs.items() if run.channel is channel))

    def _leave(self, _: int) -> None:
        for run in self.runs.values():
            os.killpg(run.pid, signal.SIGKILL)
        os._exit(0)  # nothing here is worth tearing down, and no exit handler may run


def become(request: dict[str, Any]) -> None:
    """Makes this fork look as if it had just been started with these words, in this folder and environment."""
    if request.get("mark"):
        os.setsid()
        show_mark(request["mark"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, name in enumerate([os.devnull, request["stdout"], request["stderr"]]):
        opened = os.open(name, writing if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.executable = request["executable"]
    tempfile.tempdir = None
    # Generators that python seeds afresh in every process.
    random.seed()
    sys.modules["numpy"].random.seed()


def show_mark(mark: str) -> None:
    """Puts this in place of the server's mark in /proc/PID/environ, which forks of this process will have as well.

    The file shows the memory that the process was started with, whatever becomes of its environment.
    """
    with open("/proc/self/stat") as file:
        start = int(file.read().rpartition(")")[2].split()[47])
    with open("/proc/self/environ", "rb") as file:
        at = file.read().index(f"{MARK}=".encode()) + len(f"{MARK}=")
    ctypes.memmove(start + at, mark.encode(), len(mark))


def act(request: dict[str, Any]) -> None:
    """Runs the command line, or plain python; leaves as any python process does, as far as the program can tell."""
    words, loaded = request["argv"], set(sys.modules) - {"__main__"}
    try:
        if request["plain"]:
            sys.argv, sys.path[0] = words, os.path.dirname(words[0])
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv, sys.path[0] = ["-m", *words], request["cwd"]
            runpy._run_module_as_main("firstnan")  # type: ignore[attr-defined] # python's own -m is this call
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise
        code = error.code or 0
    else:
        code = 0
    leave(code, loaded)


def leave(code: int, loaded: set[str]) -> NoReturn:
    """Ends this fork: what the program has made is freed, what the server had `loaded` is not.

    Python itself frees everything, and since each object that is touched has to be copied first, this would take longer
    than most programs do.
    """
    threading._shutdown()  # type: ignore[attr-defined] # python's end begins with these two calls
    atexit._run_exitfuncs()
    for name, module in list(sys.modules.items()):
        if name not in loaded and vars(module) is not globals():
            vars(module).clear()
    gc.collect()
    kinds = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for file in [one for one in gc.get_objects() if type(one) in kinds]:
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # closed, or nobody reads it: there is an exit code for that
        sys.exit(code)
    ctypes.CDLL(None).fflush(None)
    os._exit(code & 0xFF)


def load_everything() -> None:
    """Imports what programs import; nothing is computed, because a pool of threads does not survive a fork."""
    for name in ("numpy", "torch", "torch._dynamo", "torch.distributions", "torch.utils.data", "tqdm"):
        __import__(name)
    for name in ("cli.main", "engine.investigation", "engine.program_watch", "engine.step_trial"):
        __import__(f"firstnan.{name}")
    sys.modules["torch"].set_num_threads(1)
    # Whoever looks at all objects of its process would otherwise have every page of memory copied.
    gc.freeze()
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # At exit it prints what was not collected.


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
        assert self.report is not None, "no report was written"
        assert self.report["verdict"] in ("nonfinite", "diverged"), self.report["verdict"]
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


# What `sys.executable` is in a fork. Python itself where it is not firstnan that is to be started.
EXECUTABLE = """\
#!{python} -SE
import json, os, sys
sys.path.insert(0, {folder!r})
words = sys.argv[1:]
at = words.index("-c") if "-c" in words else len(words)
if "import firstnan;" not in "".join(words[at + 1 : at + 2]):
    os.execv({python!r}, [{python!r}, *words])
from zygote_ask import ask
out, err = (os.readlink(f"/proc/self/fd/{{n}}") for n in (1, 2))
env = dict(os.environ)
if env.get("FIRSTNAN_CHILD", "").isdigit():  # an open file, which the fork does not inherit
    env["FIRSTNAN_CHILD"] = f"/proc/{{os.getpid()}}/fd/{{env['FIRSTNAN_CHILD']}}"
request = {{"argv": words[at + 3 :], "plain": False, "cwd": os.getcwd(), "env": env, "limit": {limit}}}
code = ask({address!r}, request | {{"stdout": out, "stderr": err, "executable": __file__}})
sys.exit(code if code >= 0 else 128 - code)
"""


class Forked:
    """A run that goes on while the test looks at it; as much of `subprocess.Popen` as that needs."""

    def __init__(self, address: str, request: dict[str, Any]) -> None:
        self.mark = request["mark"]
        self.returncode: int | None = None
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.connect(address)
        self._channel.sendall(f"{json.dumps(request)}\n".encode())
        self._answers = self._channel.makefile()
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout)
            with self._channel, self._answers:
                self.returncode = int(self._answers.readline())
        return self.returncode


class Zygote:
    """The client's end of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.environment |= {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self.address = str(folder / "socket")
        self.executable = self._write_executable()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                env=self.environment | {MARK: 32 * "-"},
                pass_fds=[listener.fileno()],
            )

    def _write_executable(self) -> str:
        path = self.folder / "python"
        text = EXECUTABLE.format(python=sys.executable, folder=str(self.folder), limit=LIMIT, address=self.address)
        path.write_text(text)
        path.chmod(0o700)
        # Only what `ask` needs: this file as a whole takes longer to import than the fork to start.
        import inspect

        header = "from __future__ import annotations\nimport json, socket\n"
        (self.folder / "zygote_ask.py").write_text(header + inspect.getsource(ask))
        return str(path)

    def __call__(self, argv: Sequence[str | Path], *, cwd: Path, limit: float = LIMIT) -> Result:
        """Does what `python -m firstnan ARGV` does in `cwd`; `run` without `--json` writes its report aside.

        Changes are tried where `--verify` asks for it: most tests are about what was found. A second run is not
        isolated: it could not ask the server then.
        """
        words = [str(word) for word in argv]
        if words[0] == "run" and "--isolation" not in words:
            words[1:1] = ["--isolation", "off"]
        if words[0] == "run" and "--verify" not in words:
            words[1:1] = ["--verify", "0"]
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
        request |= {"stdout": str(out), "stderr": str(err), "executable": self.executable}
        code = ask(self.address, request)
        written = json.loads(report.read_text()) if report is not None and report.exists() else None
        return Result(code, out.read_text(), err.read_text(), written)

    def start(
        self, argv: Sequence[str | Path], *, plain: bool, cwd: Path, out: Path, err: Path, env: dict[str, str]
    ) -> Forked:
        """Starts `python -m firstnan ARGV`, or `python ARGV`, in a session of its own with a new mark.

        Isolated as any other process is: what it starts is a python of its own, not a fork of the server.
        """
        mark = uuid.uuid4().hex
        out.touch()
        err.touch()
        request = {"argv": [str(word) for word in argv], "plain": plain, "cwd": str(cwd), "env": env | {MARK: mark}}
        request |= {"stdout": str(out), "stderr": str(err), "executable": sys.executable, "mark": mark, "limit": LIMIT}
        return Forked(self.address, request)

    def close(self) -> None:
        assert self.process.stdin is not None, "started with a pipe"
        self.process.stdin.close()
        self.process.wait(timeout=30)


if __name__ == "__main__":
    load_everything()
    request = Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    become(request)
    act(request)
else:
    import pytest

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Every test that runs whole programs is a slow one."""
        for item in items:
            if "firstnan" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.slow)

    @pytest.fixture(scope="session")
    def firstnan() -> Iterator[Zygote]:
        """Runs the command line in a fork that has torch already."""
        with tempfile.TemporaryDirectory(prefix="firstnan-zygote-") as folder:
            zygote = Zygote(Path(folder))
            yield zygote
            zygote.close()
