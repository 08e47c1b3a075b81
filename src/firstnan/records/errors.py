"""What is raised when a value is not finite, and how an error of our own is told; needs no torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from firstnan.records import Report

WIDTH = 100


class NonFiniteError(ArithmeticError):
    """A NaN or Inf was found; `report` holds all that is known of it, and `str()` shows it."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)  # as the only argument: that is what pickle calls the class with again
        self.report = report

    def __str__(self) -> str:
        """The report as text, its headline first; one line where a value was only looked at, outside any step."""
        report = self.report
        if report.origin is None and report.step is None and report.events:
            return f"firstnan: {report.events[0].message}"
        from firstnan.report import render_text

        return render_text(report, width=WIDTH).rstrip()


class InternalErrors:
    """Errors of our own: the first is told, and none ever stops the program."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._said = False

    def __call__(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            self._say(f"firstnan: internal error: {type(error).__name__}: {error} (the program goes on)")
            if "FIRSTNAN_DEBUG" in os.environ:
                traceback.print_exception(error)
