"""`replay`: replays a captured step in your own loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.nn import Module

from firstnan.api.detector import models_given, optimizers_given
from firstnan.capsule.content import load
from firstnan.capsule.file import CapsuleError
from firstnan.engine.capsule_replay import told_by
from firstnan.engine.policies import RaiseAsItRuns
from firstnan.engine.restart import Restart
from firstnan.engine.session import Session
from firstnan.gate.gate import Gate
from firstnan.observe.sites import Ownership, directories
from firstnan.records import Report
from firstnan.records.arguments import require_callable, require_path
from firstnan.records.errors import NonFiniteError
from firstnan.tensors.models import Scope, TrainingObjects
from firstnan.tensors.state import NamelessSource


def replay(
    capsule: str | os.PathLike[str],
    *,
    step: Callable[[Any], Any],
    model: Module | Iterable[Module] | Mapping[str, Module],
    optimizer: Any = None,
) -> Report:
    """Replays the captured step in your own loop: restores its state and calls `step(batch)`, traced.

        report = firstnan.replay("firstnan-step000011.capsule", step=train_step, model=model, optimizer=optimizer)

    `step` is called once for each batch of the step (with None if no batch was captured). The report's verdict is
    "clean" if everything was finite; if it was finite with a model that does not match the captured one, this raises
    CapsuleError, since nothing is known then. Model and optimizer are left as the step leaves them.
    """
    caller = sys._getframe(1)
    require_path("capsule", capsule)
    require_callable("step", step)
    roots, optimizers = models_given(model), optimizers_given(optimizer)
    gate = Gate(thorough=True, guard=None)
    ownership = Ownership(tuple(directories(caller)))
    for one in optimizers:
        gate.optimizer_made(one)
    restart = Restart(
        load(capsule), gate, lambda: TrainingObjects.find(optimizers, roots), lambda: session.live.begin()
    )
    # The scope names only the models, so optimizers that were not given are followed too.
    session = Session(
        RaiseAsItRuns(), ownership=ownership, scope=Scope(roots), gate=gate, restart=restart, trace_block=True
    )
    source = NamelessSource()
    try:
        with session.running():
            for batch in restart.batches():
                session.handed_out(source, batch)
                step(batch)
    except NonFiniteError as error:
        if error.report is not session.report:
            raise
    if session.report is None and restart.restorer is not None and restart.restorer.mismatch:
        raise CapsuleError(f"{os.fspath(capsule)}: the step was not replayed as captured: {restart.restorer.mismatch}")
    return told_by(restart, session.report or Report("clean"), caller.f_code.co_filename)
