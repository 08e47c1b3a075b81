"""Where bad data was created: makes the samples of a batch again, one by one, and the batch out of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from time import monotonic
from typing import Any

import torch
from torch.utils.data import IterableDataset

from firstnan.diagnose.blame import blame
from firstnan.engine import isolation
from firstnan.observe.forked import as_worker
from firstnan.observe.line_watch import RETURNED, BadLine, LineWatch, holds_bad
from firstnan.observe.loaders import collate_of, dataset_of
from firstnan.observe.sites import Ownership, resolve, site_of_expression, whole_statement
from firstnan.records import Origin, Trace
from firstnan.tensors.finite import histogram, is_finite, stat, tensors_in
from firstnan.tensors.state import Handout, RandomState
from firstnan.tracing.tracer import Tracer

_MOST_SAMPLES = 512
_SECONDS = 10.0
Made = tuple[Origin, Trace]
"""The line that creates a non-finite value, and what ran there."""


def find_maker(iterator: Any, handout: Handout, ownership: Ownership) -> Made | None:
    """The line in the Dataset or the collate function that creates a non-finite value of this batch, if found again."""
    dataset = dataset_of(iterator)
    if dataset is None:
        return None
    state = RandomState.now()
    try:
        if isinstance(dataset, IterableDataset):
            # A stream is read from its beginning, which may change what it holds; only where that is gone afterwards.
            return _in_stream(iterator, handout, ownership) if isolation.is_child() else None
        return _in_samples(iterator, handout, ownership)
    except Exception:  # Making it again is not part of the program, so its errors must not reach the program.
        return None
    finally:
        state.restore()


def _in_samples(iterator: Any, handout: Handout, ownership: Ownership) -> Made | None:
    dataset, indices = dataset_of(iterator), handout.indices
    if not hasattr(dataset, "__getitem__"):
        return None
    if not isinstance(indices, list | tuple):
        return _watched(lambda: dataset[indices], ownership)[2] if isinstance(indices, int) else None
    until, rows = monotonic() + _SECONDS, _suspects(handout.batch, len(indices))
    samples: dict[int, Any] = {}
    for row in dict.fromkeys((*rows, *range(len(indices)))):
        if len(samples) >= _MOST_SAMPLES or monotonic() > until:
            return None
        samples[row], bad, found = _watched(lambda row=row: dataset[indices[row]], ownership)  # type: ignore[misc]
        if bad:
            return found
    # Every sample was healthy: the batch was not when they were put together.
    whole = [samples[row] for row in range(len(indices))]
    return _watched(lambda: collate_of(iterator)(whole), ownership)[2]


def _in_stream(iterator: Any, handout: Handout, ownership: Ownership) -> Made | None:
    """Reads the stream again up to this batch, as the worker that has made it."""
    workers = int(getattr(iterator, "_num_workers", 0))
    number, mine = divmod(handout.index, workers or 1)
    size = len(handout.indices) if isinstance(handout.indices, list | tuple) else 1
    until = monotonic() + _SECONDS
    with as_worker(iterator, mine) if workers else nullcontext():
        stream = iter(iterator._dataset)
        for _ in itertools.islice(stream, number * size):
            if monotonic() > until:
                return None
        samples = []
        for _ in range(size):
            sample, bad, found = _watched(lambda: next(stream), ownership)
            if bad:
                return found
            samples.append(sample)
        return _watched(lambda: iterator._collate_fn(samples), ownership)[2] if handout.indices else None


def bad_rows(batch: Any, size: int | None = None) -> tuple[int, ...]:
    """The samples of a batch that hold a non-finite value; only tensors with `size` rows count, if that is known."""
    rows: set[int] = set()
    for _, t in tensors_in(batch, "batch"):
        if t.dim() and size in (None, t.shape[0]) and not is_finite(t):
            dense = t if t.layout is torch.strided else t.to_dense()
            rows.update((~torch.isfinite(dense)).reshape(t.shape[0], -1).any(1).nonzero().flatten().tolist())
    return tuple(sorted(rows))


def _suspects(batch: Any, size: int) -> Iterator[int]:
    return (row for row in bad_rows(batch) if row < size)


def _watched(make: Callable[[], Any], ownership: Ownership) -> tuple[Any, bool, Made | None]:
    """What `make` returns, whether that holds a non-finite value, and the line that created it."""
    tracer = Tracer(ownership)
    lines = LineWatch(ownership, unseen=tracer.pause)
    tracer.at(region="data")
    with tracer, lines.watching():
        value = make()
    bad = [t for _, t in tensors_in(value) if not is_finite(t)]
    if not bad and not holds_bad(value):
        return value, False, None
    events = [e for t in bad if (e := tracer.last_bad(t)) is not None]
    trace = tracer.trace()
    origin = blame(trace, events).origin
    if origin is not None and origin.event is not None and origin.event.born and "lift_fresh" not in origin.aten:
        return value, True, (origin, trace)
    return value, True, (made_by(lines.first), trace) if lines.first is not None else None


def made_by(line: BadLine) -> Origin:
    """A line of the program as the origin of bad data."""
    s = replace(stat(line.name, line.value), histogram=histogram(line.value))
    site = whole_statement(resolve(line.spot))
    label = "" if line.name == RETURNED else line.name
    operation = line.operation if not line.wrapped else None
    read = tuple(stat(name, value) for name, value in (operation.read if operation else line.wrapped))
    op = operation.name if operation else ""
    if operation is not None and operation.node is not None and site is not None:
        site = site_of_expression(site, operation.node)
    return Origin("input", op, "", site=site, inputs=read or (s,), produced=s, role="input", label=label)
