"""The steps before a failure as text: how the loss, the norms and the layers grew."""

from __future__ import annotations

import math
from collections.abc import Sequence

from firstnan.records import NaNEvent, Report
from firstnan.records.words import kind, number
from firstnan.report.tensors import argument, bad_elements

GROWTH = frozenset(
    ("divergence_lr", "exploding_gradient", "overflow", "exp_overflow", "low_precision_overflow", "optimizer_overflow")
)
"""Causes that the steps before help to explain."""


def history_head(report: Report) -> str:
    """`steps 0 to 11, SGD, lr 10, momentum 0.9`."""
    history = report.history
    words = [f"steps {history.steps[0].step} to {history.steps[-1].step}", history.optimizer]
    words += [
        f"{name} {argument(value)}" for name, value in history.settings[:4] if value is not None and value is not False
    ]
    return ", ".join(w for w in words if w)


def history_rows(report: Report, most: int = 40) -> list[tuple[str, list[float], str]]:
    """(name, values, `first -> last`) of what grew in the steps before, if the cause is one of growth."""
    steps = report.history.steps[-most:]
    if len(steps) < 3 or report.cause is None or report.cause.slug not in GROWTH:
        return []
    rows = []
    for name, key in (("loss", "loss"), ("grad norm", "grad_norm"), ("param norm", "param_norm"), ("lr", "lr")):
        values = [v for v in (getattr(step, key) for step in steps) if v is not None]
        if len(values) >= 3 and _grew(values):
            rows.append((name, values, growth(values)))
    return rows


def first_bad_layer(report: Report) -> str:
    """The first layer that read or wrote a non-finite value in the failing step, if layers were watched."""
    events = [e for e in report.events if e.kind == "nonfinite" and e.layer and e.what in ("input", "output")]
    return next((f"first bad: {_layer_event(e)}" for e in events if e.step == report.step), "")


def _layer_event(event: NaNEvent) -> str:
    """`encoder.1 (Linear), output[0], NaN 3 of 512, first at [0, 2]`."""
    stat = event.tensor
    inside = stat.name if stat and stat.name.startswith(("[", ".")) else ""
    of_gradient = "gradient of its " if event.phase == "backward" else ""
    words = [event.layer + (f" ({event.layer_type})" if event.layer_type else "")]
    words += [f"call {event.call}"] if event.call else []
    words += [f"{of_gradient}{event.what}{inside}", bad_elements(stat) if stat and stat.bad else kind(stat)]
    return ", ".join(words)


def _grew(values: Sequence[float]) -> bool:
    """Whether there is a change worth drawing: at least twofold."""
    sizes = [abs(v) for v in values if math.isfinite(v)]
    return bool(sizes) and max(sizes) >= 2 * min(sizes) > 0


def growth(values: Sequence[float]) -> str:
    """The first, the last finite and the last value, each once."""
    finite = [v for v in values if math.isfinite(v)]
    marks = [*finite[:1], *finite[1:][-1:]] + ([] if math.isfinite(values[-1]) else [values[-1]])
    return " -> ".join(number(v) for v in marks)


def sparkline(values: Sequence[float], levels: str) -> str:
    """One character per value, from the lowest to the highest of `levels`; logarithmic if they span decades."""
    finite = [v for v in values if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) / min(finite) > 100:
        values = [math.log10(v) if math.isfinite(v) else v for v in values]
        finite = [v for v in values if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    # Halved first: the distance between two huge numbers of opposite sign can exceed the range of float.
    span = high / 2 - low / 2
    marks = []
    for v in values:
        share = (v / 2 - low / 2) / span if span > 0 and math.isfinite(v) else 0.0
        marks.append(levels[min(int(share * len(levels)), len(levels) - 1)] if math.isfinite(v) else "!")
    return "".join(marks)
