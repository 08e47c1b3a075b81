"""Runs the program again in a child process: traced in the failing step only, or with a change to test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from firstnan.observe.runner import Program
from firstnan.records import Report

VARIABLE = "FIRSTNAN_CHILD"


@dataclass(frozen=True)
class Order:
    """The instructions for a child process; passed as a small JSON file."""

    step: int | None
    what: str
    report: str
    python_random: list[Any]
    numpy_random: list[Any] | None = None
    torch_seed: int | None = None
    contents: dict[str, str] = field(default_factory=dict)
    """Real path of a source file -> the content to run instead, each byte as one character."""
    last: int | None = None
    """The step at which a trial ends."""
    made: tuple[str, int] | None = None
    """File and line where the optimizer whose steps are counted is created."""
    capsule: tuple[str, int] | None = None
    """The folder for a capsule, and its maximum size."""

    @staticmethod
    def given() -> Order | None:
        """The instructions that this process was started with; its own children must not follow them."""
        path = os.environ.pop(VARIABLE, None)
        return Order(**json.loads(Path(path).read_text())) if path else None


class Start:
    """How this process was started, recorded before the program could change it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.random = random.getstate()
        self.numpy: list[Any] | None = None
        self.torch_seed: int | None = None
        try:
            self.directory: str | None = os.getcwd()
        except OSError:
            self.directory = None

    def torch_imported(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            self.numpy = [kind, keys.tolist(), *rest]
        # Until a program seeds it, torch's generator has an arbitrary seed.
        self.torch_seed = sys.modules["torch"].initial_seed()

    def follow(self, order: Order) -> None:
        """Makes unseeded generators start as they did in the first run."""
        version, numbers, gauss = order.python_random
        random.setstate((version, tuple(numbers), gauss))

    def follow_imported(self, order: Order) -> None:
        """The same for torch's generators, right after torch was imported."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and order.numpy_random is not None:
            kind, keys, *rest = order.numpy_random
            numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
        if order.torch_seed is not None:
            sys.modules["torch"].default_generator.manual_seed(order.torch_seed)

    def run_again(
        self, program: Program, *, step: int | None, what: str, capsule: tuple[str, int] | None = None
    ) -> Report | None:
        """The child's report, or None if there is none; the program's output is discarded."""
        from firstnan.records.codec import ReportError
        from firstnan.records.files import load

        with tempfile.TemporaryDirectory(prefix="firstnan-") as folder:
            report = Path(folder, "report.json")
            try:
                self._run(program, replace(self._order(step, what, report), capsule=capsule), folder)
                return load(report)
            except (KeyboardInterrupt, ReportError):
                return None

    def try_out(
        self,
        program: Program,
        contents: dict[str, bytes],
        *,
        step: int,
        last: int,
        seconds: float,
        made: tuple[str, int] | None = None,
    ) -> tuple[Any, bool]:
        """The child's result for the program with changed files, and whether it finished in time."""
        with tempfile.TemporaryDirectory(prefix="firstnan-") as folder:
            result = Path(folder, "outcome.json")
            # Every byte is a Latin-1 character, so any file fits into JSON.
            texts = {path: content.decode("latin-1") for path, content in contents.items()}
            order = replace(self._order(step, "trial", result), contents=texts, last=last, made=made)
            in_time = self._run(program, order, folder, seconds)
            try:
                return json.loads(result.read_text()), in_time
            except (OSError, ValueError):
                return None, in_time

    def _order(self, step: int | None, what: str, result: Path) -> Order:
        return Order(step, what, str(result), [*self.random], self.numpy, self.torch_seed)

    def _run(self, program: Program, order: Order, folder: str, seconds: float | None = None) -> bool:
        """Runs the child to its end, or stops it and its own children after `seconds`."""
        path = Path(folder, "order.json")
        path.write_text(json.dumps(asdict(order)))
        words = [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", "firstnan", "run"]  # type: ignore[attr-defined]
        words += ["-m"] if program.module else []
        environment = {**self.environment, VARIABLE: str(path)}
        source = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH"), source) if p)
        child = subprocess.Popen(
            [*words, "--", program.target, *program.args],
            cwd=self.directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if os.environ.get("FIRSTNAN_DEBUG") else subprocess.DEVNULL,
            start_new_session=seconds is not None,
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child, group=seconds is not None)
        return True


def _end(child: subprocess.Popen[bytes], *, group: bool) -> None:
    """Ends the child and the processes it started, if any are still running."""
    if group and hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.returncode is None:
        child.terminate()
    child.wait()
