"""Short pieces of text that several rooms use: numbers, places, and the headline of a report."""

from __future__ import annotations

import math
import os

from firstnan.records import Noticed, Origin, Report, Site, TensorStat

_NOTICED = {"gradient": "the gradient of", "parameter": "parameter", "buffer": "buffer", "output": "the output of"}


def number(value: float | None) -> str:
    """A number in at most four digits, integers below a million in full; `?` where it is not known."""
    if value is None:
        return "?"
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.4g}"


def count(n: int, what: str) -> str:
    """`1 sample`, `3 samples`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def short_path(path: str) -> str:
    """A file's name as a reader knows it: below the current directory, or below site-packages."""
    for base in ("site-packages", "dist-packages"):
        _, found, tail = path.rpartition(f"{os.sep}{base}{os.sep}")
        if found:
            return tail
    try:
        return path.removeprefix(os.getcwd() + os.sep)
    except OSError:  # the current directory is gone
        return path


def place(site: Site) -> str:
    """`train.py:10`."""
    return f"{short_path(site.file)}:{site.line}"


def kind(stat: TensorStat | None) -> str:
    """The non-finite values in a tensor: `NaN`, `Inf`, `-Inf` or several of them."""
    if stat is None or not stat.bad:
        return "a non-finite value"
    names = [name for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def noticed(what: Noticed) -> str:
    """Where it was seen first: `the loss`, `the gradient of fc.weight`."""
    if not what.name or what.name == what.what:
        return f"the {what.what or 'step'}"
    return f"{_NOTICED.get(what.what, what.what)} {what.name}"


def headline(report: Report) -> str:
    """What became non-finite first, when and where; the first line of every report."""
    if report.verdict == "clean":
        until = "" if report.step is None else f" up to step {report.step}"
        return f"clean, no NaN or Inf{until}"
    step = "" if report.step is None else f", step {report.step}"
    origin = report.origin
    if origin is None:
        where = f" in {noticed(report.noticed)}" if report.noticed else ""
        return f"a non-finite value{where}{step}; its origin is unknown"
    at = f", at {place(origin.site)}" if origin.site else ""
    return f"{kind(origin.produced)} {_creation(origin)}{step}{at}{_layer(origin)}"


def _creation(origin: Origin) -> str:
    label = origin.label or (origin.produced.name if origin.produced and not origin.op else "")
    match origin.phase:
        case "optimizer":
            return "created in the optimizer's update" + (f" of {origin.label}" if origin.label else "")
        case "input":
            where = "a buffer" if origin.role == "buffer" else "the data"
            return f"{'created in' if origin.op else 'came in with'} {where}" + (f" ({label})" if label else "")
        case "parameter":
            kept = origin.role if origin.role in ("buffer", "state") else "parameter"
            return f"{'created' if origin.op else 'was already'} in {kept} {label}".rstrip()
        case phase:
            return f"created in {phase}"


def _layer(origin: Origin) -> str:
    if not origin.module:
        return ""
    return f" in {origin.module}" + (f" ({origin.module_type})" if origin.module_type else "")
