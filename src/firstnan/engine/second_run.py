"""Runs the program again in a child process: traced in the failing step only, or with a change to test."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from firstnan.engine import isolation
from firstnan.engine.isolation import Started
from firstnan.observe.runner import Program
from firstnan.records import Report
from firstnan.records.codec import ReportError
from firstnan.repair.verdict import Reach, TrialOutcome

VARIABLE = "FIRSTNAN_CHILD"
_COARSE_CLOCK = 5
# `python -m firstnan`, wherever firstnan is: only its own import sees its folder. With PYTHONPATH that folder, perhaps
# all of site-packages, would come before others in the program's `sys.path`, and in that of what the program starts.
_BEGIN = (
    "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); import firstnan; del sys.path[0]; "
    "runpy._run_module_as_main('firstnan')"
)


@dataclass(frozen=True)
class Instructions:
    """The instructions for a child process; passed as JSON in an open file."""

    step: int | None
    what: str
    python_random: list[Any]
    numpy_random: list[Any] | None = None
    torch_seed: int | None = None
    contents: dict[str, str] = field(default_factory=dict)
    """Real path of a source file -> the content to run instead, each byte as one character."""
    reach: dict[str, Any] | None = None
    """How far a trial goes."""
    first_batch: tuple[list[int], int] | None = None
    """The samples that the program's loader fetches first, and the size of its dataset."""
    updates: int | None = None
    """After how many updates, of all optimizers, operators are recorded."""
    lines: tuple[int, int] | None = None
    """Between which two updates the lines of the program are watched; until its first step if that is not known."""
    made: tuple[str, int, int] | None = None
    """File, line and column where the optimizer whose steps are counted is created."""
    reads_decide: bool = False
    """Whether the first bad loss that the program reads is the failure, even if it would skip it and go on."""
    capsule: tuple[str, int] | None = None
    """The folder for a capsule, and its maximum size."""
    result: int = -1
    """The open file, which takes the answer; nothing else that the child writes is kept."""

    @staticmethod
    def given() -> Instructions | None:
        """The instructions that this process was started with; its own children must not follow them."""
        given = os.environ.pop(VARIABLE, None)
        if not given:
            return None
        number = int(given) if given.isdigit() else os.open(given, os.O_RDWR)
        os.set_inheritable(number, False)
        isolation.started_as_child()
        return Instructions(**json.loads(os.pread(number, os.fstat(number).st_size, 0)), result=number)

    def answer(self, data: Any) -> None:
        """Replaces the answer given so far."""
        text = json.dumps({"answer": data}).encode()
        os.ftruncate(self.result, 0)
        os.pwrite(self.result, text, 0)


@dataclass(frozen=True)
class SecondRun:
    """What came of running the program again."""

    report: Report | None = None
    fate: TrialOutcome = field(default_factory=TrialOutcome)
    """How far it came, and how it ended."""
    in_time: bool = True
    bad_since: tuple[int, int] | None = None
    """Between which two updates an object of the program came to hold something non-finite."""

    @staticmethod
    def of(data: Any, in_time: bool) -> SecondRun:
        try:
            report, fate = Report.from_dict(data["report"]), TrialOutcome.of(data["fate"])
            return SecondRun(report, fate, in_time, tuple(data["bad_since"]) if data["bad_since"] else None)
        except (TypeError, KeyError, ReportError):
            return SecondRun(in_time=in_time)


def _start_of_input() -> int | None:
    """Where standard input begins, if it is a file that can be read once more."""
    try:
        if stat.S_ISREG(os.fstat(0).st_mode) and os.access("/proc/self/fd/0", os.R_OK):
            return os.lseek(0, 0, os.SEEK_CUR)
    except OSError:
        pass
    return None


def _waiting_input() -> int:
    """How many bytes wait in standard input, if it is a pipe or a connection: what is read of it is gone."""
    import fcntl
    import termios

    try:
        mode = os.fstat(0).st_mode
        if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
            return 0
        return int.from_bytes(fcntl.ioctl(0, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def _has_not_begun(answer: Any) -> bool:
    """Whether a child has ended with an error before its first step."""
    fate = answer.get("fate", answer) if isinstance(answer, dict) else {"error": "no answer"}
    return bool(fate.get("error") or fate.get("exit")) and not fate.get("passed") and not fate.get("noticed")


class Start:
    """How this process was started, recorded before the program could change it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.executable = sys.executable
        self.random = random.getstate()
        self.numpy: list[Any] | None = None
        self.torch_seed: int | None = None
        self.reads_from = _start_of_input()
        self._waiting = _waiting_input()
        # By the clock of file systems, which may be some milliseconds behind the usual one.
        self._began = time.clock_gettime(_COARSE_CLOCK) if sys.platform.startswith("linux") else time.time()
        self._hides_new = True
        try:
            self.directory: str | None = os.getcwd()
        except OSError:
            self.directory = None

    def has_lost_input(self) -> bool:
        """Whether the program has read something of its standard input that cannot be read again."""
        return _waiting_input() < self._waiting

    def torch_imported(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            self.numpy = [kind, keys.tolist(), *rest]
        # Until a program seeds it, torch's generator has an arbitrary seed.
        self.torch_seed = sys.modules["torch"].initial_seed()

    def follow(self, order: Instructions) -> None:
        """Makes unseeded generators start as they did in the first run."""
        version, numbers, gauss = order.python_random
        random.setstate((version, tuple(numbers), gauss))

    def follow_imported(self, order: Instructions) -> None:
        """The same for torch's generators, right after torch was imported."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and order.numpy_random is not None:
            kind, keys, *rest = order.numpy_random
            numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
        if order.torch_seed is not None:
            sys.modules["torch"].default_generator.manual_seed(order.torch_seed)

    def run_again(
        self,
        program: Program,
        *,
        step: int | None,
        what: str,
        seconds: float,
        updates: int | None = None,
        lines: tuple[int, int] | None = None,
        capsule: tuple[str, int] | None = None,
        first_batch: tuple[list[int], int] | None = None,
        reads_decide: bool = False,
        isolated: bool = True,
        started: Callable[[], None] = lambda: None,
    ) -> SecondRun:
        """Runs the program again up to its failure; its output is discarded. `isolated`: it changes nothing.

        `started` is called once it runs, and not where the system does not allow it.
        """
        order = self._order(step, what)
        order = replace(order, capsule=capsule, updates=updates, lines=lines)
        order = replace(order, first_batch=first_batch, reads_decide=reads_decide)
        return SecondRun.of(*self._run(program, order, seconds, isolated, started))

    def try_out(
        self,
        program: Program,
        contents: dict[str, bytes],
        *,
        step: int,
        reach: Reach,
        seconds: float,
        made: tuple[str, int, int] | None = None,
        first_batch: tuple[list[int], int] | None = None,
        reads_decide: bool = False,
        isolated: bool = True,
    ) -> tuple[Any, bool]:
        """The child's result for the program with changed files, and whether it finished in time."""
        # Every byte is a Latin-1 character, so any file fits into JSON.
        texts = {path: content.decode("latin-1") for path, content in contents.items()}
        order = replace(self._order(step, "trial"), contents=texts, reach=asdict(reach), made=made)
        order = replace(order, first_batch=first_batch, reads_decide=reads_decide)
        return self._run(program, order, seconds, isolated)

    def _order(self, step: int | None, what: str) -> Instructions:
        return Instructions(step, what, [*self.random], self.numpy, self.torch_seed)

    def _folders(self, program: Program) -> list[str]:
        """The folders that the program was told of."""
        words = [word.rpartition("=")[2] for word in program.args]
        return [word for word in words if os.path.isabs(word) and os.path.isdir(word)]

    def _run(
        self,
        program: Program,
        order: Instructions,
        seconds: float,
        isolated: bool,
        started: Callable[[], None] = lambda: None,
    ) -> tuple[Any, bool]:
        """Runs the child to its end, or stops it and its own children after `seconds`; returns its answer, if any."""
        answer, in_time = self._run_once(program, order, seconds, isolated, started)
        if isolated and in_time and self._hides_new and _has_not_begun(answer):
            self._hides_new = False  # perhaps it lacks what it has downloaded
            return self._run_once(program, order, seconds, isolated)
        return answer, in_time

    def _run_once(
        self,
        program: Program,
        order: Instructions,
        seconds: float,
        isolated: bool,
        started: Callable[[], None] = lambda: None,
    ) -> tuple[Any, bool]:
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        source = str(Path(__file__).resolve().parents[2])
        words = [self.executable, *flags, "-c", _BEGIN, source, "run", *(["-m"] if program.module else [])]
        with tempfile.TemporaryFile() as file:
            instructions = asdict(order)
            del instructions["result"]
            file.write(json.dumps(instructions).encode())
            file.flush()
            environment = {**self.environment, VARIABLE: str(file.fileno())}
            environment.pop("FIRSTNAN", None)  # what this child starts is not watched
            shared = [order.capsule[0]] if order.capsule is not None else []
            folders = [one for one in (self.directory, *self._folders(program)) if one is not None]
            child = Started(
                [*words, "--", program.target, *program.args],
                environment,
                self.directory,
                keep=file.fileno(),
                isolated=isolated,
                shared=shared,
                reads_from=self.reads_from,
                without_new=(folders, self._began) if self._hides_new else None,
            )
            try:
                started()
                in_time = child.wait(seconds)
            finally:
                child.end()
            file.seek(0)
            try:
                return json.loads(file.read()).get("answer"), in_time
            except ValueError:
                return None, in_time
