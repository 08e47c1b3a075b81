"""The journal of a detector: events, counts and one-line summaries."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import Counter
from dataclasses import dataclass, replace
from time import time
from typing import Any

import torch
from torch import Tensor

from firstnan.engine.events import EventLog
from firstnan.engine.handouts import Handouts
from firstnan.engine.statistics import Statistics
from firstnan.engine.world import world
from firstnan.gate.growth_guard import Alarm
from firstnan.gate.step_counter import StepCounter
from firstnan.observe.layers import LayerFinding
from firstnan.records import NaNEvent, Noticed, Report, TensorStat
from firstnan.tensors.finite import stat
from firstnan.tensors.names import Models
from firstnan.tensors.optimizers import largest_gradient, parameters_of

_EVENTS_IN_REPORT = 32
_OFTEN = 16
_PLACES: dict[str, tuple[Any, Any]] = {
    "loss": ("forward", "loss"),
    "gradient": ("backward", "gradient"),
    "parameter": ("optimizer", "parameter"),
    "buffer": ("forward", "buffer"),
}


@dataclass
class Counts:
    """Counts of what happened so far."""

    steps: int = 0
    nonfinite: int = 0
    skipped: int = 0
    rolled_back: int = 0
    clipped: int = 0
    warnings: int = 0


class Journal:
    """Adds place and time to events, and the events to reports (a layers.Sink)."""

    def __init__(
        self,
        events: EventLog,
        stats: Statistics | None,
        steps: StepCounter,
        handouts: Handouts,
        models: Models,
        counts: Counts,
        *,
        names_layers: bool,
    ) -> None:
        self.events, self.stats, self.steps, self.handouts, self.models = events, stats, steps, handouts, models
        self._seen: Counter[tuple[str, str, str]] = Counter()
        """How often each input and output of each layer was non-finite."""
        self.counts = counts
        self._names_layers = names_layers
        self.epoch: int | None = None

    def epoch_begins(self) -> None:
        self.epoch = 0 if self.epoch is None else self.epoch + 1

    def add(self, event: NaNEvent, *, level: int | None = None) -> None:
        latest = self.handouts.latest
        self.events.add(
            replace(
                event,
                batch=latest.index if latest is not None and event.step is not None else None,
                epoch=self.epoch if event.step is not None else None,
                thread=event.thread or threading.current_thread().name,
                rank=world().rank,
                time=time(),
            ),
            level=level,
        )

    def layer_event(self, found: LayerFinding) -> None:
        """A layer read or wrote a non-finite value; if this keeps happening, fewer and fewer events are recorded."""
        key = (found.layer, found.phase, found.what)
        self._seen[key] = seen = self._seen[key] + 1
        if seen > _OFTEN and seen.bit_count() > 1:
            return
        shape, dtype = found.shape, str(found.dtype).removeprefix("torch.")
        tensor = stat(found.place, found.tensor) if found.tensor is not None else TensorStat(found.place, shape, dtype)
        of = f"the gradient of its {found.what}" if found.phase == "backward" else f"its {found.what}"
        kinds = [kind for kind, n in (("NaN", tensor.nan), ("Inf", tensor.inf)) if n] or ["not finite"]
        step = self.steps.current if found.in_step else None
        event = NaNEvent(
            "nonfinite",
            f"{f'step {step}: ' if step is not None else ''}layer {found.layer or 'the model'} ({found.layer_type}): "
            f"{of}{found.place} is {' and '.join(kinds)}",
            step,
            phase=found.phase,
            what=found.what,
            layer=found.layer,
            paths=found.paths,
            layer_type=found.layer_type,
            call=found.call,
            tensor=tensor,
            thread=found.thread,
        )
        self.add(event)

    def magnitude(self, layer: str, phase: str, norm: float, low: float, high: float) -> None:
        if self.stats is not None:
            self.stats.add(self.steps.current, layer, phase, norm, low, high)  # type: ignore[arg-type]

    def tripped(self, noticed: Noticed, tensors: list[Tensor], step: int | None, norm: float | None) -> None:
        """Records the trip itself as an event."""
        self.counts.nonfinite += 1
        phase, what = _PLACES.get(noticed.what, ("forward", "loss"))
        name = noticed.name or next((n for t in tensors if (n := self.models.name(t))), "")
        seen = stat(name or noticed.what, tensors[0]) if tensors else None
        kinds = [kind for kind, n in (("NaN", seen.nan), ("Inf", seen.inf)) if n] if seen else ["not finite"]
        place = f"the {what} of {name}" if what == "gradient" and name else f"the {what} {name}".rstrip()
        text = f"step {step}: {place} is {' and '.join(kinds)}"
        event = NaNEvent("nonfinite", text, step, phase=phase, what=what, layer=name, tensor=seen, grad_norm=norm)
        self.add(event, level=logging.INFO)

    def alarmed(self, alarm: Alarm, optimizer: Any) -> None:
        """Records a warning, with the parameter that dominates the norm."""
        self.counts.warnings += 1
        name, text = "", alarm.text
        spike = optimizer is not None and alarm.kind != "explosion"
        if spike:
            parameter, share = largest_gradient(optimizer)
            name = self.models.name(parameter)
            whose = f"the gradient of {name or 'a parameter'} {list(parameter.shape)}"
            text = f"{text.rstrip('.')}; {share:.0%} of it is {whose}" if share == share else text
        event = NaNEvent(
            "explosion" if alarm.kind == "explosion" else "spike",
            text,
            alarm.step,
            phase="backward",
            what="gradient",
            layer=name,
            grad_norm=alarm.norm,
        )
        self.add(event)

    def clip(self, optimizer: Any, norm: float | None, limit: float | None) -> None:
        """Clips the gradients if their norm exceeds the limit; of many clips in a row fewer and fewer are logged."""
        if optimizer is None or norm is None or not limit or not limit < norm < math.inf:
            return
        torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), limit)
        self.counts.clipped += 1
        if self.counts.clipped.bit_count() == 1:
            step = self.steps.of(optimizer)
            text = f"step {step}: gradients clipped from norm {norm:.3g} to {limit:.3g}"
            self.add(NaNEvent("clipped", text, step, phase="backward", what="gradient", grad_norm=norm))

    def skipped(self, report: Report) -> None:
        self.counts.skipped += 1
        self.add(NaNEvent("skipped", f"step {report.step}: skipped: {one_line(report)}", report.step))

    def rolled_back(self, report: Report, good_step: int) -> None:
        self.counts.rolled_back += 1
        to = f"after step {good_step - 1}" if good_step else "before training"
        text = f"step {report.step}: rolled back to the state {to}: {one_line(report)}"
        self.add(NaNEvent("rolled_back", text, report.step))

    def completed(self, report: Report) -> Report:
        """The report with the events of its step, the statistics of the layers and the rank."""
        where, size = world()
        if self._names_layers:
            self._name_layer(report)
        events = [e for e in self.events if e.step == report.step][:_EVENTS_IN_REPORT]
        history = replace(report.history, layers=self.stats.tracks()) if self.stats is not None else report.history
        return replace(report, events=tuple(events), history=history, rank=where, world_size=size)

    def _name_layer(self, report: Report) -> None:
        """Records the failing layer as an event if only the replay has shown it: most steps are not read by layer."""
        origin = report.origin
        if origin is None or not origin.module or origin.phase not in ("forward", "backward"):
            return
        if not any(e.step == report.step and e.layer_type for e in self.events):
            what: Any = "output" if origin.phase == "forward" else "input"
            of = "its output" if what == "output" else "the gradient of its input"
            text = f"step {report.step}: layer {origin.module} ({origin.module_type}): {of} is not finite"
            where: Any = {"phase": origin.phase, "what": what, "layer": origin.module, "layer_type": origin.module_type}
            self.add(NaNEvent("nonfinite", text, report.step, tensor=origin.produced, **where))


def one_line(report: Report) -> str:
    """What was non-finite, where it originated and why, in one line."""
    noticed, origin = report.noticed, report.origin
    text = f"{noticed.what} {noticed.name}".strip() + " is not finite" if noticed else "not finite"
    if origin is not None and origin.site is not None:
        text += f", originated at {os.path.basename(origin.site.file)}:{origin.site.line}"
    return text + (f" [{report.cause.slug}]" if report.cause else "")
