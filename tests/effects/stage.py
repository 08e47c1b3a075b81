"""Runs a program twice, as plain python and under firstnan, in a folder of its own each, and says what it did outside.

`Stage` owns the folders, `Outcome` is what became of a run, and the readers turn what a program left in a file, a
database or a server into records in the order in which they were made, each with the number of its step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from zygote import MARK, SOURCE, Forked, Zygote

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 90.0
"""Seconds; far more than any run needs on a busy machine, so whatever exceeds it hangs."""


class Record(NamedTuple):
    step: int
    what: object


Reader = Callable[[Path], list[Record]]


@dataclass(frozen=True)
class Outcome:
    """What a run under firstnan left behind."""

    program: Path
    code: int
    stdout: str
    stderr: str
    report: dict[str, Any] | None
    survivors: list[str]
    """Processes of this run that were still there some seconds after it."""
    left: list[str]
    """Files in the folder for temporary files and in the home folder."""

    def wrong_answer(self, step: int) -> list[str]:
        """What is wrong with the exit code and the report of a run that fails in this step."""
        wrong = [] if self.code == 3 else [f"exit code {self.code} instead of 3"]
        return wrong + self.wrong_report(step, wants_line=True)

    def wrong_report(self, step: int, *, wants_line: bool) -> list[str]:
        if self.report is None:
            return [f"no report was written, stderr: {self.stderr}"]
        if self.report["verdict"] != "nonfinite":
            return [f"the verdict is {self.report['verdict']}, stderr: {self.stderr}"]
        wrong = [] if self.report["step"] == step else [f"step {self.report['step']} instead of {step}"]
        if wants_line:
            origin, line = self.report["origin"], marked_line(self.program)
            if not origin:
                wrong.append(f"no origin was found, stderr: {self.stderr}")
            elif (Path(origin["file"]).name, origin["line"]) != (self.program.name, line):
                wrong.append(f"{origin['file']}:{origin['line']} instead of line {line}")
        return wrong

    def leftovers(self) -> list[str]:
        return [f"survived: {process}" for process in self.survivors] + [f"left behind: {name}" for name in self.left]


def marked_line(program: Path) -> int:
    lines = [n for n, line in enumerate(program.read_text().splitlines(), 1) if line.endswith("# <-")]
    assert len(lines) == 1, f"{program} has {len(lines)} marked lines"
    return lines[0]


def differences(seen: Sequence[Record], bare: Sequence[Record], step: int, where: str = "seen") -> list[str]:
    """Compares with what the bare program does until some moment of this step: the same, in this order, each once."""
    until = list(takewhile(lambda record: record.step <= step, bare))
    before = [record for record in until if record.step < step]
    assert before, "the bare program left too little to compare"
    wrong = [] if len(seen) >= len(before) else [f"{where}: lost {before[len(seen) :]}"]
    for at, record in enumerate(seen):
        if record not in until:
            wrong.append(f"{where}: {record} is not what the bare program did up to step {step}")
        elif record in seen[:at]:
            wrong.append(f"{where}: {record} again")
        elif [record] != until[at : at + 1]:
            wrong.append(f"{where}: {record} where {until[at : at + 1]} was expected")
    return wrong[:5] + ([f"{where}: and {len(wrong) - 5} more"] if len(wrong) > 5 else [])


def expect(condition: bool, otherwise: str) -> list[str]:
    return [] if condition else [otherwise]


def check(*groups: list[str]) -> None:
    """Fails with everything that is wrong, not with the first of it."""
    wrong = [text for group in groups for text in group]
    assert not wrong, "\n".join(wrong)


# --- running ------------------------------------------------------------------------------------------------------


def _heed_ctrl_c() -> None:
    """Whatever a shell starts in the background ignores this signal, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Running:
    """A process in a session of its own, with a mark in its environment: a fork, unless there are words before it."""

    def __init__(self, words: Sequence[str], stage: Stage, *, plain: bool = False, prefix: Sequence[str] = ()) -> None:
        self.stage = stage
        self.out, self.err = stage.root / "stdout", stage.root / "stderr"
        self.process: subprocess.Popen[bytes] | Forked
        if not prefix:
            self.process = stage.zygote.start(
                words, plain=plain, cwd=stage.project, out=self.out, err=self.err, env=stage.environment
            )
            self.mark = self.process.mark
            return
        self.mark = uuid.uuid4().hex
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "firstnan", *words],
                cwd=stage.project,
                env=stage.environment | {MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_heed_ctrl_c,
            )

    def processes(self) -> dict[int, str]:
        """Everything that was started by this run and is alive, by process id."""
        alive = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it has ended, or is not ours to read
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        alive[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return alive

    def wait(self, until: Callable[[], bool], what: str, limit: float = LIMIT) -> None:
        end = time.monotonic() + limit
        while not until():
            assert self.process.poll() is None, f"ended before {what}\n{self.err.read_text()}"
            assert time.monotonic() < end, f"waited {limit} s for {what}\n{self.err.read_text()}"
            time.sleep(0.01)

    def finish(self, limit: float = LIMIT) -> Outcome:
        """Waits for the end; ends whatever outlives it, after having noted it."""
        try:
            self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit} s\n{self.err.read_text()}") from None
        finally:
            survivors = self._end_all()
        report = self.stage.report
        return Outcome(
            self.stage.project / self.stage.program.name,
            self.process.wait(0),
            self.out.read_text(),
            self.err.read_text(),
            json.loads(report.read_text()) if report.exists() else None,
            survivors,
            self.stage.left(),
        )

    def _end_all(self, patience: float = 8.0) -> list[str]:
        """Loader workers look for their parent every five seconds."""
        if self.process.poll() is None:
            patience = 0.0
        end = time.monotonic() + patience
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        return sorted(alive.values())


class Stage:
    """One program in two folders, with folders of its own for temporary files and as a home."""

    def __init__(self, root: Path, zygote: Zygote, program: str) -> None:
        self.root, self.zygote = root, zygote
        self.program = PROGRAMS / program
        self.bare_project, self.project = root / "bare", root / "run"
        self.temporary, self.home, self.report = root / "tmp", root / "home", root / "report.json"
        for folder in (self.bare_project, self.project, self.temporary, self.home):
            folder.mkdir()
        for folder in (self.bare_project, self.project):
            shutil.copy(self.program, folder)
        outside = ("PYTHON", "OMP_", "TMP", "TEMP", "XDG_")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
        self.environment |= {"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        self.environment |= {"TMPDIR": str(self.temporary), "HOME": str(self.home)}

    def put(self, name: str, content: bytes) -> None:
        """A file that is there before the program starts, in both folders."""
        for folder in (self.bare_project, self.project):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def bare(self, *words: object, fresh: bool = False) -> Path:
        """Runs it as plain python does and returns its folder; in a fork that has torch already, unless `fresh`.

        A program that leaves it to the end of the interpreter to close its files needs an interpreter of its own.
        """
        argv = [self.program.name, *(str(word) for word in words)]
        if fresh:
            done = subprocess.run(
                [sys.executable, *argv], cwd=self.bare_project, env=self.environment, capture_output=True, text=True
            )
            said = done.stderr
        else:
            said = self.zygote.python([self.bare_project / argv[0], *argv[1:]], cwd=self.bare_project).stderr
        assert "Traceback" not in said, said
        return self.bare_project

    def start(self, *words: object, options: Sequence[str] = (), prefix: Sequence[str] = ()) -> Running:
        """Starts it under firstnan; with a `prefix`, which is the command of another program, as its child."""
        door = ["run", "--json", str(self.report), *options]
        return Running([*door, self.program.name, *(str(word) for word in words)], self, prefix=prefix)

    def start_plain(self, *words: object) -> Running:
        """Starts it as plain python in the folder that is otherwise firstnan's: it has a detector inside."""
        return Running([str(self.project / self.program.name), *(str(word) for word in words)], self, plain=True)

    def run(self, *words: object, options: Sequence[str] = ()) -> Outcome:
        return self.start(*words, options=options).finish()

    def left(self) -> list[str]:
        there = [path for top in (self.temporary, self.home) for path in top.rglob("*")]
        # Plain torch makes this one, empty, when the first optimizer is made.
        return sorted(str(p.relative_to(self.root)) for p in there if not p.name.startswith("torchinductor_"))

    def names(self) -> tuple[set[str], set[str]]:
        """The files in the folder of the plain run and in that of firstnan."""
        bare, run = (
            {str(path.relative_to(folder)) for path in folder.rglob("*")}
            for folder in (self.bare_project, self.project)
        )
        return bare, run

    def new_files(self) -> list[str]:
        bare, run = self.names()
        return [f"a file that the program does not make: {name}" for name in sorted(run - bare)]


# --- readers ------------------------------------------------------------------------------------------------------


def _first_number(text: str) -> int:
    """The step that a line or a name is about; what has no number comes before the first step."""
    found = re.search(r"\d+", text)
    return int(found[0]) if found else -1


def lines(name: str) -> Reader:
    """The lines of a file as bytes, each with its end: half a line is not a line."""

    def read(folder: Path) -> list[Record]:
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        return [Record(_first_number(repr(line)), line) for line in content.splitlines(keepends=True)]

    return read


def files(pattern: str) -> Reader:
    """Whole files that have the step in their name."""
    return lambda folder: [
        Record(_first_number(path.name), (path.name, hashlib.md5(path.read_bytes()).hexdigest()))
        for path in sorted(folder.glob(pattern))
    ]


def table(name: str, query: str) -> Reader:
    """The rows of a database that is intact; the first column is the step."""

    def read(folder: Path) -> list[Record]:
        with contextlib.closing(sqlite3.connect(folder / name)) as db:
            intact = db.execute("pragma integrity_check").fetchall()
            assert intact == [("ok",)], intact
            return [Record(row[0], row) for row in db.execute(query)]

    return read


# --- servers ------------------------------------------------------------------------------------------------------


@dataclass
class Posts:
    """A server that answers every post and remembers it."""

    port: int = 0
    records: list[Record] = field(default_factory=list)


@contextlib.contextmanager
def http_server() -> Iterator[Posts]:
    posts = Posts()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            posts.records.append(Record(_first_number(body), body))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        posts.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield posts
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def line_server() -> Iterator[Posts]:
    """Remembers every line that comes over any connection."""
    posts = Posts()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            for line in self.rfile:
                posts.records.append(Record(_first_number(line.decode()), line))

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        posts.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield posts
        finally:
            time.sleep(0.1)  # what was sent before the program ended is read by now
            server.shutdown()
            thread.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
