"""Traces the operators of one step and turns them into a report."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.conclude import Evidence
from firstnan.engine.handouts import Handouts
from firstnan.gate.gate import Gate
from firstnan.observe.imports import when_imported
from firstnan.observe.sites import Ownership, Spot
from firstnan.records import Noticed, Report
from firstnan.tensors.finite import tensors_in
from firstnan.tensors.names import Models
from firstnan.tracing.tracer import Tracer

_NOTHING = contextlib.nullcontext()


class _Eager:
    """Makes compiled functions run uncompiled, in the whole process, as long as anyone needs that."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._stance: Any = None

    def ask(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._stance = torch.compiler.set_stance("force_eager")

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._stance.__exit__(None, None, None)


_eager = _Eager()


class Microscope:
    """The tracer, with what is needed to interpret its trace: tensor names, batches, the gate's history."""

    def __init__(
        self, ownership: Ownership, gate: Gate, handouts: Handouts, find_models: Callable[[], Models] = Models
    ) -> None:
        self.ownership, self.gate, self.handouts = ownership, gate, handouts
        self.find_models = find_models
        self.models: Models | None = None
        self.tracer: Tracer | None = None
        self._entry: Spot | None = None
        self._is_eager = False
        self._call_off: Callable[[], None] = lambda: None

    @property
    def running(self) -> bool:
        return self.tracer is not None and self.tracer.running

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Code run inside this context is our own and not part of the trace."""
        return _NOTHING if self.tracer is None else self.tracer.pause()

    def start(self, *, in_step: bool) -> Tracer:
        """Records every operator from now on; `in_step` if a step is about to be replayed."""
        # Compiled functions run uncompiled; but do not load the compiler just for that.
        self._call_off = when_imported("torch._dynamo", self._force_eager)
        self.tracer = tracer = Tracer(self.ownership)
        tracer.step = self.gate.steps.current
        tracer.looks_for_training = True
        if in_step:
            tracer.region = "step"
            tracer.marks = True  # It may be replayed once more, to compare.
            self.name_tensors()
        tracer.start()
        return tracer

    def stop(self) -> None:
        """Stops recording; compiled functions run compiled again."""
        if self.tracer is not None:
            self.tracer.stop()
        self._call_off()
        if self._is_eager:
            self._is_eager = False
            _eager.release()

    def _force_eager(self) -> None:
        if not self._is_eager:
            self._is_eager = True
            _eager.ask()

    def name_tensors(self) -> None:
        """Tells the tracer which tensors are weights and buffers."""
        assert self.tracer is not None
        if self.models is None:
            self.models = self.find_models()
        for p, name in self.models.parameters.values():
            self.tracer.give_role(p, "parameter", name)
        for b, name in self.models.buffers.values():
            self.tracer.give_role(b, "buffer", name)

    def mark_batch(self, batch: Any, taker: Any) -> None:
        """Tells the tracer which tensors are data, and the frame in which the program takes them."""
        assert self.tracer is not None
        self._entry = self.ownership.spots(taker)[0]
        for label, t in tensors_in(batch, "batch"):
            self.tracer.give_role(t, "input", label)

    def drop_gradients(self) -> None:
        for p, _ in self.models.parameters.values() if self.models else ():
            p.grad = None

    def raised(self) -> list[int]:
        """The last operator that raised an exception, if any."""
        return [i for i, r in enumerate(self.tracer.raws) if r.raised][-1:] if self.tracer is not None else []

    def evidence(self, noticed: Noticed, tensors: list[Tensor]) -> Evidence:
        self.models = self.find_models()
        return Evidence(self.gate, self.handouts, self.models, self.ownership, noticed, tensors, self._entry)

    def conclude(self, noticed: Noticed, tensors: list[Tensor], events: list[int], how: str) -> Report | None:
        """Finds the origin and the cause; None, and recording continues, if every non-finite value was intended."""
        tracer = self.tracer
        assert tracer is not None
        running = tracer.running
        tracer.stop()
        evidence = self.evidence(noticed, tensors)
        self.name_tensors()
        report = evidence.conclude(tracer, events, how)
        if report is None and running:
            tracer.start()
        return report
