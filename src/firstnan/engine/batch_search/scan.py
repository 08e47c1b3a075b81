"""Scans a dataset: tries every batch from the same state, without updates."""

from __future__ import annotations

from collections.abc import Callable

from firstnan.engine.batch_search.order import Order
from firstnan.engine.batch_search.result import BadBatch, BatchSearch
from firstnan.engine.batch_search.state import Everything
from firstnan.engine.step_check import StepCheck


def scan(
    step: StepCheck, order: Order, everything: Everything, every: bool, advance: Callable[[str], None]
) -> BatchSearch:
    """Tries the batches up to the first bad one, or all of them (`every`)."""
    found: list[BadBatch] = []
    for fetched in order.once():
        everything.restore()
        try:
            seen = step(fetched.batch, updates=False).seen
        except Exception as error:
            error.add_note(f"firstnan: raised by step(batch) with batch {fetched.index} of the loader")
            raise
        if seen:
            found.append(BadBatch(fetched.index, seen, fetched.size, fetched.indices))
        advance(f"{len(found)} bad" if found else "")
        if seen and not every:
            break
    return BatchSearch("scan", tuple(found), replays=step.calls, of=order.length)
