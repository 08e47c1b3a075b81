"""Where bad data was created: fetches the samples of a batch again, one by one, and looks inside the Dataset."""

from __future__ import annotations

from typing import Any

import torch

from firstnan.diagnose.blame import blame
from firstnan.observe.line_watch import LineWatch
from firstnan.observe.sites import Ownership, resolve, whole_statement
from firstnan.records import Origin, Trace
from firstnan.tensors.finite import is_finite, stat, tensors_in
from firstnan.tensors.state import Handout, RandomState
from firstnan.tracing.tracer import Tracer

_MOST_SAMPLES = 512


def find_maker(iterator: Any, handout: Handout, ownership: Ownership) -> tuple[Origin, Trace] | None:
    """The line inside the Dataset that creates a non-finite value of this batch, if it is created again."""
    dataset, indices = getattr(iterator, "_dataset", None), handout.indices
    if dataset is None or not isinstance(indices, list | tuple) or not hasattr(dataset, "__getitem__"):
        return None
    state = RandomState.now()
    try:
        for index in _suspects(handout.batch, list(indices)):
            found = _fetch(dataset, index, ownership)
            if found is not None:
                return found
    finally:
        state.restore()
    return None


def bad_rows(batch: Any, size: int | None = None) -> tuple[int, ...]:
    """The samples of a batch that hold a non-finite value; only tensors with `size` rows count, if that is known."""
    rows: set[int] = set()
    for _, t in tensors_in(batch, "batch"):
        if t.dim() and size in (None, t.shape[0]) and not is_finite(t):
            dense = t if t.layout is torch.strided else t.to_dense()
            rows.update((~torch.isfinite(dense)).reshape(t.shape[0], -1).any(1).nonzero().flatten().tolist())
    return tuple(sorted(rows))


def _suspects(batch: Any, indices: list[Any]) -> list[Any]:
    rows = [r for r in bad_rows(batch) if r < len(indices)]
    return [indices[r] for r in rows[:_MOST_SAMPLES]] or indices[:_MOST_SAMPLES]


def _fetch(dataset: Any, index: Any, ownership: Ownership) -> tuple[Origin, Trace] | None:
    tracer, lines = Tracer(ownership), LineWatch(ownership)
    tracer.at(region="data")
    try:
        with tracer, lines.watching():
            sample = dataset[index]
    except Exception:  # Fetching again is not part of the program, so its errors must not reach the program.
        return None
    events = [e for _, t in tensors_in(sample) if (e := tracer.last_bad(t)) is not None]
    trace = tracer.trace()
    verdict = blame(trace, events)
    origin = verdict.origin
    if origin is not None and origin.event is not None and origin.event.born and "lift_fresh" not in origin.aten:
        return origin, trace
    if lines.first is not None:
        spot, name, value = lines.first
        s = stat(name, value)
        return Origin(
            "input", "", "", site=whole_statement(resolve(spot)), inputs=(s,), produced=s, role="input", label=name
        ), trace
    return None
