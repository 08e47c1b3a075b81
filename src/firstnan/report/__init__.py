"""A report as people see it; needs no torch, so a saved report opens at once."""

from firstnan.report.files import FORMATS, write
from firstnan.report.progress import Progress
from firstnan.report.text import nonfinite_error, print_text, render_text

__all__ = ["FORMATS", "Progress", "nonfinite_error", "print_text", "render_text", "write"]
