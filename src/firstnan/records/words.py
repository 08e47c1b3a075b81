"""Short pieces of text that several rooms use: numbers, places, and the headline of a report."""

from __future__ import annotations

import linecache
import math
import os
import sys

from firstnan.records import Noticed, OptimizerHistory, Origin, Report, Site, TensorStat

_NOTICED = {
    "gradient": "the gradient of",
    "parameter": "parameter",
    "buffer": "buffer",
    "output": "the output of",
    "state": "the optimizer's state,",
}


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
    return line_of(site.file, site.line)


def line_of(path: str, line: int) -> str:
    """`train.py:10`; `Cell In[3], line 10` in a notebook."""
    cell = cell_name(path)
    return f"{cell}, line {line}" if cell else f"{short_path(path)}:{line}"


def cell_name(path: str) -> str:
    """The name of a notebook cell by that of its source, as the notebook shows it; empty if it is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    naming = getattr(getattr(shell, "compile", None), "format_code_name", None)
    found = naming(path) if naming is not None else None
    return " ".join(map(str, found)) if found else ""


def cell_source(path: str) -> str:
    """The text of a notebook cell; empty if it is none."""
    return "".join(linecache.getlines(path)) if cell_name(path) else ""


def shortened(code: str, most: int = 80) -> str:
    """Code in one short line."""
    text = " ".join(code.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def optimizer_words(history: OptimizerHistory) -> str:
    """An optimizer as the program knows it: `opt_d (SGD)`, or `the SGD made at train.py:12`."""
    if history.name:
        return f"{history.name} ({history.optimizer})"
    at = f" made at {place(history.made_at)}" if history.made_at is not None else ""
    return f"the {history.optimizer or 'optimizer'}{at}"


def kind(stat: TensorStat | None) -> str:
    """The non-finite values in a tensor: `NaN`, `Inf`, `-Inf` or several of them."""
    if stat is None or not stat.bad:
        return "a non-finite value"
    names = [name for name, n in (("NaN", stat.nan), ("Inf", stat.posinf), ("-Inf", stat.neginf)) if n]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def came_with_numbers(origin: Origin) -> bool:
    """Whether the operator only takes over numbers from outside torch, as `from_numpy` does."""
    return origin.aten.startswith("aten.lift_fresh") and not origin.inputs


def copies_nonfinite(origin: Origin) -> bool:
    """Whether the operator only copies what was non-finite before, as loading a checkpoint does."""
    return origin.aten.startswith("aten.copy_") and any(t.nan or t.inf for t in origin.inputs)


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
    if step and report.history.others:
        step += f" of {optimizer_words(report.history)}"
    origin = report.origin
    if report.verdict == "diverged":
        what = "made" if report.history.made_at is not None else "stepped"
        made = f", optimizer {what} at {place(origin.site)}" if origin and origin.site else ""
        return f"training diverged from step {report.step} on; no NaN or Inf{made}"
    if origin is None:
        where = f" in {noticed(report.noticed)}" if report.noticed else ""
        received = report.cause is not None and report.cause.slug == "collective"
        rest = "it came from another rank" if received else "its origin is unknown"
        return f"a non-finite value{where}{step}; {rest}"
    at = f", at {place(origin.site)}" if origin.site else ""
    if origin.event is not None and origin.event.raised and not origin.produced:
        return f"{origin.op or 'an operator'} raised an error in {origin.phase}{step}{at}{_layer(origin)}"
    in_batch = report.batch is not None and bool(report.batch.bad_samples)
    return f"{kind(origin.produced)} {_creation(origin, in_batch)}{step}{at}{_layer(origin)}"


def _creation(origin: Origin, in_batch: bool) -> str:
    """`in_batch`: whether it is known which samples of the batch have it."""
    label = origin.label or (origin.produced.name if origin.produced and not origin.op else "")
    match origin.phase:
        case "backward" if origin.edits_gradient:
            return "created where the program edits gradients"
        case "optimizer":
            return "created in the optimizer's update" + (f" of {origin.label}" if origin.label else "")
        case "input" if origin.read_at is not None and came_with_numbers(origin):
            return "came in with the data" + (f" ({label})" if label else "")
        case "input" if origin.read_at is not None and (
            origin.role == "buffer" or (origin.role is None and not in_batch)
        ):
            return "created before the step" + (f" ({label})" if label else "")
        case "input" if origin.read_at is not None:
            return "created in the data" + (f" ({origin.label})" if origin.label else "")
        case "input":
            where = "a buffer" if origin.role == "buffer" else "the data"
            created = origin.op and not came_with_numbers(origin)
            return f"{'created in' if created else 'came in with'} {where}" + (f" ({label})" if label else "")
        case "parameter":
            kept = {"buffer": "buffer", "state": "the optimizer's state,"}.get(origin.role or "", "parameter")
            if copies_nonfinite(origin):
                return f"copied into {kept} {label}".rstrip()
            already = "were already" if " and " in kind(origin.produced) else "was already"
            created = origin.op and (not origin.produced or origin.inputs != (origin.produced,))
            return f"{'created' if created else already} in {kept} {label}".rstrip()
        case phase:
            return f"created in {phase}"


def _layer(origin: Origin) -> str:
    if not origin.module:
        return ""
    # The layers of a Sequential are numbered; a number alone does not read as a name.
    name = f'"{origin.module}"' if origin.module[0].isdigit() else origin.module
    return f" in {name}" + (f" ({origin.module_type})" if origin.module_type else "")
