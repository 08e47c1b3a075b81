"""What is raised when training meets a value that is not finite; needs no torch."""

from __future__ import annotations

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
