"""`find_bad_batch` and `find_bad_samples`: which data makes training non-finite."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firstnan.engine.batch_search.checkpoints import LateSearch
from firstnan.engine.batch_search.order import BatchOrder
from firstnan.engine.batch_search.result import BatchSearch
from firstnan.engine.batch_search.scan import Scan
from firstnan.engine.batch_search.training import Everything, SavedState, Training
from firstnan.engine.data_origin import bad_rows
from firstnan.engine.handouts import Handouts
from firstnan.engine.policies import Policy
from firstnan.engine.samples.cut import CutError, cut
from firstnan.engine.samples.search import search
from firstnan.engine.session import Session
from firstnan.engine.step_check import StepCheck
from firstnan.observe.sites import Ownership
from firstnan.records import Batch
from firstnan.records.arguments import require_batches, require_callable, require_flag, require_pairs
from firstnan.tensors.live_objects import find_live_objects
from firstnan.tensors.models import Models, Scope
from firstnan.tensors.state import RandomState, Schedules, restore_buffers


def find_bad_batch(
    step: Callable[[Any], Any],
    loader: Iterable[Any],
    *,
    model: Module,
    optimizer: Any = None,
    checkpoints: Iterable[tuple[int, Any]] | None = None,
    all: bool = False,
    progress: bool = True,
) -> BatchSearch:
    """Finds the first batch of a loader that breaks `step(batch)`, or the step from which training went wrong.

        found = firstnan.find_bad_batch(train_step, loader, model=model, optimizer=optimizer)
        print(found)

    `step` is your own function: forward and loss, with or without backward and `optimizer.step()`. A batch is bad if it
    holds a NaN, or if the loss, a gradient or a buffer is non-finite after it. Every batch is tried from the model's
    current state, without updates. `all` lists every bad batch. Batches that can be joined are tested in groups that
    grow and are halved where one fails, so the first bad one of n takes about 2 log2(n) calls; if no group fails, all
    are tried alone.

    `checkpoints` are states of a run that failed late: pairs (number of updates made, state), where a state is a file
    written by `torch.save`, a dict with the state dicts "model" and "optimizer", or a model's state dict. A binary
    search finds the first state that is non-finite or much worse than the first one; then the steps after the last good
    state are replayed. Batch i of the loader is assumed to belong to step i.

    Model, optimizers, schedules, scalers, gradients and random generators are restored at the end, even after an
    exception. Anything else that `step` changes is not restored.
    """
    require_callable("step", step)
    require_batches("loader", loader)
    pairs = require_pairs("checkpoints", checkpoints) if checkpoints is not None else None
    require_flag("all", all)
    require_flag("progress", progress)
    training = Training(model, optimizer)
    states = [SavedState(number, state) for number, state in pairs] if pairs is not None else None
    if states == []:
        raise ValueError("checkpoints must not be empty")
    if states is None and (bad := training.bad_state(optimizers=False)) is not None:
        return BatchSearch("scan", weights=bad)
    check = StepCheck(step, training.models, optimizers=training.all_optimizers, updated_by=training.optimizers)
    # It watches no optimizer, only which elements of the dataset the loader takes.
    sampling = Session(Policy(), ownership=Ownership(()), scope=Scope({}, []))
    order = BatchOrder(loader, sampling.handouts)
    length = order.length if states is None else None
    with Everything(training, loader) as everything, sampling.running(), _bar(progress, length) as bar:
        if states is None:
            return Scan(check, order, everything, all, bar).run()
        return LateSearch(check, order, everything, states, training, bar).search()


@contextmanager
def _bar(wanted: bool, length: int | None) -> Iterator[Callable[[str], None]]:
    """A progress bar, if stderr is a terminal; it is called once per batch with a text."""
    if not wanted or not sys.stderr.isatty():
        yield lambda text: None
        return
    columns = (
        TextColumn("firstnan:"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=length, text="")
        yield lambda text: bar.update(task, advance=1, text=text)


def find_bad_samples(step: Callable[[Any], Any], batch: Any) -> Batch:
    """Finds the bad samples by calling `step(batch)` with samples replaced by others of the batch.

        found = firstnan.find_bad_samples(lambda batch: loss_of(model, batch), batch)
        print(found.bad_samples, found.confirmed, found.features)

    A call counts as bad if what it returns, its loss or its gradients are non-finite; a loss that is returned is
    taken through backward where the step has not done so itself. Updates are dropped, and random state, buffers,
    gradients and learning-rate schedules are as before in every call and at the end. `bad_samples` is None where no
    sample is responsible; `note` says why.
    """
    require_callable("step", step)
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
    bad, note = found.bad or (), found.note
    if pieces.size == 1 and not bad:
        note = "the batch has only one sample, so no other can replace it"
    return Batch(
        None, pieces.size, found.bad, found.confirmed, None, pieces.features(bad), found.replays, note,
        values=pieces.values(bad),
    )  # fmt: skip


@contextlib.contextmanager
def _kept_as_it_is(step: Callable[[Any], Any]) -> Iterator[Callable[[Any], bool]]:
    """Yields a function that says whether the step is finite with a batch; every call starts from the current state."""
    models, handouts = Models(), Handouts()
    handouts.watch_buffers(models.slots)
    buffers, random = handouts.copied_buffers(), RandomState.now()
    there = find_live_objects(LRScheduler, Optimizer, GradScaler)
    schedules = Schedules(
        [o for o in there if isinstance(o, LRScheduler)],
        [o for o in there if isinstance(o, Optimizer) and "param_groups" in vars(o)],
        [o for o in there if isinstance(o, GradScaler)],
    )
    gradients: dict[int, tuple[Tensor, Tensor | None]] = {id(p): (p, p.grad) for p, _ in models.parameters.values()}
    check = StepCheck(step, models, results_count=True)

    def put_state_back() -> None:
        random.restore()
        restore_buffers(buffers)
        schedules.restore()

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
