"""Runs the program once more in a child process that traces the failing step only."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from firstnan.records import Report
from firstnan.runner import Program

VARIABLE = "FIRSTNAN_CHILD"


@dataclass(frozen=True)
class Order:
    """What a child is asked to do; travels as a small JSON file."""

    step: int | None
    what: str
    report: str
    python_random: list[Any]
    numpy_random: list[Any] | None = None
    capsule: tuple[str, int] | None = None
    """The folder for a capsule, and how large it may be."""

    @staticmethod
    def given() -> Order | None:
        """The order this process was started with; its own children are not to follow it."""
        path = os.environ.pop(VARIABLE, None)
        return Order(**json.loads(Path(path).read_text())) if path else None


class Start:
    """How this process was started, kept from before the program could change it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.random = random.getstate()
        self.numpy: list[Any] | None = None
        try:
            self.directory: str | None = os.getcwd()
        except OSError:
            self.directory = None

    def torch_imported(self) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, *rest = numpy.random.get_state()
            self.numpy = [kind, keys.tolist(), *rest]

    def follow(self, order: Order) -> None:
        """Makes the generators that nobody seeded start as they did the first time."""
        version, numbers, gauss = order.python_random
        random.setstate((version, tuple(numbers), gauss))

    def follow_numpy(self, order: Order) -> None:
        numpy = sys.modules.get("numpy")
        if numpy is not None and order.numpy_random is not None:
            kind, keys, *rest = order.numpy_random
            numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))

    def run_again(
        self, program: Program, *, step: int | None, what: str, capsule: tuple[str, int] | None = None
    ) -> Report | None:
        """The child's report, or None where it could not be had; the program's output is thrown away."""
        from firstnan.report import ReportError, load

        with tempfile.TemporaryDirectory(prefix="firstnan-") as folder:
            report, order = Path(folder, "report.json"), Path(folder, "order.json")
            wish = Order(step, what, str(report), [*self.random], self.numpy, capsule)
            order.write_text(json.dumps(asdict(wish)))
            words = [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", "firstnan", "run"]  # type: ignore[attr-defined]
            words += ["-m"] if program.module else []
            environment = {**self.environment, VARIABLE: str(order)}
            source = str(Path(__file__).resolve().parents[1])
            environment["PYTHONPATH"] = os.pathsep.join(p for p in (environment.get("PYTHONPATH"), source) if p)
            child = subprocess.Popen(
                [*words, "--", program.target, *program.args],
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=None if os.environ.get("FIRSTNAN_DEBUG") else subprocess.DEVNULL,
            )
            try:
                child.wait()
            except KeyboardInterrupt:
                child.terminate()
                child.wait()
                return None
            try:
                return load(report)
            except ReportError:
                return None
