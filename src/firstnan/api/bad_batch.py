"""`find_bad_batch`: the public function for both searches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.nn import Module

from firstnan.engine.batch_search.checkpoints import LateSearch, Order, scan
from firstnan.engine.batch_search.result import BatchSearch
from firstnan.engine.batch_search.training import Everything, SavedState, Training
from firstnan.engine.policies import Policy
from firstnan.engine.scope import Scope
from firstnan.engine.session import Session
from firstnan.engine.step_check import StepCheck
from firstnan.observe.sites import Ownership


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
    current state, without updates. `all` lists every bad batch.

    `checkpoints` are states of a run that failed late: pairs (number of updates made, state), where a state is a file
    written by `torch.save`, a dict with the state dicts "model" and "optimizer", or a model's state dict. A binary
    search finds the first state that is non-finite or much worse than the first one; then the steps after the last good
    state are replayed. Batch i of the loader is assumed to belong to step i.

    Model, optimizers, schedules, scalers, gradients and random generators are restored at the end, even after an
    exception. Anything else that `step` changes is not restored.
    """
    training = Training(model, optimizer)
    states = [SavedState(number, state) for number, state in checkpoints] if checkpoints is not None else None
    if states == []:
        raise ValueError("checkpoints must not be empty")
    if states is None and (bad := training.bad_state(optimizers=False)) is not None:
        return BatchSearch("scan", weights=bad)
    check = StepCheck(step, training.models, optimizers=training.all_optimizers, updated_by=training.optimizers)
    # It watches no optimizer, only which elements of the dataset the loader takes.
    sampling = Session(Policy(), ownership=Ownership(()), scope=Scope({}, []))
    order = Order(loader, sampling.handouts)
    length = order.length if states is None else None
    with Everything(training, loader) as everything, sampling.running(), _bar(progress, length) as bar:
        if states is None:
            return scan(check, order, everything, all, bar)
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
