"""`find_bad_samples`: which samples of a batch make the user's step non-finite."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from firstnan.engine.data_origin import bad_rows
from firstnan.engine.handouts import Handouts
from firstnan.engine.samples.cut import CutError, cut
from firstnan.engine.samples.search import search
from firstnan.engine.step_check import StepCheck
from firstnan.records import Batch
from firstnan.tensors.models import Models
from firstnan.tensors.state import RandomState, restore_buffers


def find_bad_samples(step: Callable[[Any], Any], batch: Any) -> Batch:
    """Finds the bad samples by calling `step(batch)` with samples replaced by others of the batch.

        found = firstnan.find_bad_samples(lambda batch: loss_of(model, batch), batch)
        print(found.bad_samples, found.confirmed, found.features)

    A call counts as bad if what it returns, its loss or its gradients are not finite; a loss that is returned is
    taken through backward where the step has not done so itself. Updates are dropped, and random state, buffers
    and gradients are as before in every call and at the end. `bad_samples` is None where no sample is responsible;
    `note` says why.
    """
    try:
        pieces = cut(batch)
    except CutError as error:
        return Batch(note=f"the batch cannot be split into samples: {error}")
    with _kept_as_it_is(step) as is_finite:
        asking = search(pieces.size, bad_rows(batch))
        question = next(asking)
        while True:
            try:
                question = asking.send(is_finite(pieces.replaced(question)))
            except StopIteration as stop:
                found = stop.value
                break
    if not found.repeated:
        return Batch(size=pieces.size, replays=found.replays, note="the step is finite with this batch")
    features = pieces.features(found.bad) if found.bad else ()
    return Batch(None, pieces.size, found.bad, found.confirmed, None, features, found.replays, found.note)


@contextlib.contextmanager
def _kept_as_it_is(step: Callable[[Any], Any]) -> Iterator[Callable[[Any], bool]]:
    """Yields a function that says whether the step is finite with a batch; every call starts from the current state."""
    models, handouts = Models(), Handouts()
    handouts.watch_buffers(models.slots)
    buffers, random = handouts.copied_buffers(), RandomState.now()
    gradients: dict[int, tuple[Tensor, Tensor | None]] = {id(p): (p, p.grad) for p, _ in models.parameters.values()}
    check = StepCheck(step, models, results_count=True)

    def put_state_back() -> None:
        random.restore()
        restore_buffers(buffers)

    def is_finite(batch: Any) -> bool:
        put_state_back()
        for leaf, _ in gradients.values():
            leaf.grad = None
        outcome = check(batch)
        for key, kept in check.leaves.items():
            gradients.setdefault(key, kept)
        return not any(one.noticed.what != "input" for one in outcome.seen)

    try:
        yield is_finite
    finally:
        put_state_back()
        for leaf, gradient in gradients.values():
            leaf.grad = gradient
