"""The error raised for a non-finite value, and how internal errors are reported; needs no torch."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

from firstnan.records import Report
from firstnan.records.words import headline


class NonFiniteError(ArithmeticError):
    """A NaN or Inf was found: `report` holds what is known about it, `str()` is its text or at least its headline."""

    def __init__(self, report: Report, text: str = "") -> None:
        super().__init__(report, text)  # pickle calls the class with these again
        self.report, self.text = report, text

    def __str__(self) -> str:
        return self.text or f"firstnan: {headline(self.report)}"


class InternalErrors:
    """Errors of firstnan itself: the first is reported, and none stops the program."""

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self.any = False

    def __call__(self, error: Exception) -> None:
        if not self.any:
            self.any = True
            self._say(f"firstnan: internal error: {type(error).__name__}: {error} (the program goes on)")
            if "FIRSTNAN_DEBUG" in os.environ:
                traceback.print_exception(error)
