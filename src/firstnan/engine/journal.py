"""What a detector has noticed: events within bounds, statistics per layer, counts."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from time import time
from typing import Any, Literal, overload

import torch
from torch import Tensor

from firstnan.engine.handouts import Handouts
from firstnan.engine.ranks import world
from firstnan.gate.growth_guard import Alarm
from firstnan.gate.layer_histories import LayerHistories
from firstnan.gate.step_counter import StepCounter
from firstnan.observe.layers import LayerFinding
from firstnan.records import Forecast, LayerTrack, NaNEvent, Noticed, Report, TensorStat, words
from firstnan.records.codec import encode
from firstnan.records.forecast_words import sentence, subject
from firstnan.tensors.finite import stat
from firstnan.tensors.models import Models, largest_gradient, parameters_of

_EVENTS_IN_REPORT, _LAYERS_IN_REPORT = 32, 600
_OFTEN = 16
_ALL_LOGGED = 8
"""So many batches that the loop skips itself are all logged; after that fewer and fewer."""
_PLACES: dict[str, tuple[Any, Any]] = {
    "loss": ("forward", "loss"),
    "gradient": ("backward", "gradient"),
    "parameter": ("optimizer", "parameter"),
    "state": ("optimizer", "state"),
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
        reports: list[Report],
        *,
        names_layers: bool,
        epoch: int | None = None,
    ) -> None:
        self.events, self.stats, self.steps, self.handouts, self.models = events, stats, steps, handouts, models
        self._seen: Counter[tuple[str, str, str]] = Counter()
        """How often each input and output of each layer was non-finite."""
        self.counts, self._reports = counts, reports
        self._names_layers = names_layers
        self.epoch = epoch
        self._batch: int | None = None
        self._replaying: Callable[[], bool] = lambda: False
        self._trains: Callable[[], bool] = lambda: True
        self._calls: Callable[[], int] = lambda: 0
        self._noting = False
        self._left_out = 0
        """How many bad batches the loop has skipped itself."""
        self._noted: list[NaNEvent] = []
        self._replayed: list[NaNEvent] = []
        """What the layer watch has found in its notes of the failing step, and in a replay of it."""
        self._outputs = 0
        self.layers = LayerHistories(self.foreseen)

    def tell_forecasts(self, foresees: Callable[[Forecast], None]) -> None:
        """Forecasts of layers go there."""
        self.layers = LayerHistories(foresees)

    def epoch_begins(self, number: int | None = None) -> None:
        """The next epoch, or the one with this number."""
        self.epoch = number if number is not None else 0 if self.epoch is None else self.epoch + 1

    def batch_begins(self, number: int) -> None:
        """The number of the batch, as a framework counts it."""
        self._batch = number

    def add(self, event: NaNEvent, *, level: int | None = None) -> None:
        latest, trains, in_step = self.handouts.latest, self._trains(), event.step is not None
        self.events.add(
            replace(
                event,
                batch=(self._number_of(latest) if in_step else None) if trains else self.handouts.position(),
                epoch=self.epoch if in_step or not trains else None,
                thread=event.thread or threading.current_thread().name,
                rank=world().rank,
                time=time(),
            ),
            level=level,
        )

    def _number_of(self, latest: Any) -> int | None:
        return self._batch if self._batch is not None else latest.index if latest is not None else None

    def keep_layers_apart(self, replaying: Callable[[], bool]) -> None:
        """While `replaying()` holds, the layer watch sees a replay: its findings are kept apart."""
        self._replaying = replaying

    @contextlib.contextmanager
    def noting_layers(self) -> Iterator[None]:
        """What the layer watch finds meanwhile is used only if no replay shows it better."""
        self._noting, self._noted, self._replayed = True, [], []
        try:
            yield
        finally:
            self._noting = False

    @property
    def layers_of_replay(self) -> tuple[NaNEvent, ...]:
        return tuple(self._replayed)

    def replayed_layers(self, events: Sequence[NaNEvent]) -> None:
        """A replay in another process has shown these."""
        self._replayed = list(events)

    def layer_event(self, found: LayerFinding) -> None:
        """A layer read or wrote a non-finite value; if this keeps happening, fewer and fewer events are recorded."""
        if self._noting or self._replaying():
            kept = self._noted if self._noting else self._replayed
            if len(kept) < _EVENTS_IN_REPORT:
                kept.append(self._event_of(found))
            return
        key = (found.layer, found.phase, found.what)
        self._seen[key] = seen = self._seen[key] + 1
        if seen <= _OFTEN or seen.bit_count() == 1:
            self.add(self._event_of(found))

    def _event_of(self, found: LayerFinding) -> NaNEvent:
        shape, dtype = found.shape, str(found.dtype).removeprefix("torch.")
        tensor = stat(found.place, found.tensor) if found.tensor is not None else TensorStat(found.place, shape, dtype)
        of = f"the gradient of its {found.what}" if found.phase == "backward" else f"its {found.what}"
        kinds = [kind for kind, n in (("NaN", tensor.nan), ("Inf", tensor.inf)) if n] or ["non-finite"]
        step = self.steps.current if found.in_step and self._trains() else None
        return NaNEvent(
            "nonfinite",
            f"{self._when(step)}layer {found.layer or 'the model'} ({found.layer_type}): "
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

    def only_called(self, trains: Callable[[], bool], calls: Callable[[], int]) -> None:
        """How to know whether the model is trained, and how often it was called if it is not."""
        self._trains, self._calls = trains, calls

    def _when(self, step: int | None) -> str:
        if step is not None:
            return f"step {step}: "
        if self._trains():
            return ""
        index = self.handouts.position()
        return f"batch {index}: " if index is not None else f"call {max(self._calls() - 1, 0)} of the model: "

    def reached_output(self, found: LayerFinding) -> None:
        """A model that is not being trained returned something non-finite."""
        self._outputs += 1
        if self._outputs.bit_count() == 1:
            _say(logging.WARNING, f"{self._event_of(found).message}, and so is the model's output")

    def magnitude(
        self, layer: str, phase: str, dtype: torch.dtype, norm: float, low: float, high: float, *shares: float
    ) -> None:
        if self._replaying():
            return
        step = self.steps.current
        if phase == "forward":
            self.layers.add(step, layer, str(dtype).removeprefix("torch."), norm, _max_abs(low, high), shares)
        if self.stats is not None:
            self.stats.add(step, layer, phase, norm, low, high)  # type: ignore[arg-type]

    def tripped(self, noticed: Noticed, tensors: list[Tensor], step: int | None, norm: float | None) -> None:
        """Records the trip itself as an event."""
        self.counts.nonfinite += 1
        if noticed.what == "output":
            return  # the layer has its event
        phase, what = _PLACES.get(noticed.what, ("forward", "loss"))
        name = noticed.name or next((n for t in tensors if (n := self.models.name(t))), "")
        seen = stat(name or noticed.what, tensors[0]) if tensors else None
        kinds = [kind for kind, n in (("NaN", seen.nan), ("Inf", seen.inf)) if n] if seen else ["non-finite"]
        place = f"the {what} of {name}" if what == "gradient" and name else f"the {what} {name}".rstrip()
        text = f"step {step}: {place} is {' and '.join(kinds)}"
        event = NaNEvent("nonfinite", text, step, phase=phase, what=what, layer=name, tensor=seen, grad_norm=norm)
        self.add(event, level=logging.INFO)

    def overflowed(self, step: int, scale: float) -> None:
        """A gradient scaler skips an update: part of its search for a scale."""
        text = f"step {step}: the gradient scaler skips the update, because a gradient overflowed at scale {scale:g}"
        self.add(NaNEvent("scale", text, step, phase="backward", what="gradient"), level=logging.INFO)

    def dropped(self, step: int) -> None:
        """The program goes on after an error, and makes an update with the gradients of the step that failed."""
        why = "its gradients include those of the step that failed; optimizer.zero_grad() clears them"
        _say(logging.WARNING, f"step {step}: the update is not made: {why}")

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

    def foreseen(self, forecast: Forecast) -> None:
        """Records a forecast, or that it is withdrawn."""
        self.counts.warnings += forecast.withdrawn is None
        self.add(event_of_forecast(forecast))

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

    def left_out(self, name: str, loss: Tensor) -> None:
        """The loop itself has skipped a batch with a bad loss."""
        step, seen = self.steps.current, stat(name, loss)
        kind = "NaN" if seen.nan else "Inf"
        text = f"step {step}: the loop skipped a batch whose {name} is {kind}"
        self._left_out += 1
        level = logging.WARNING if self._left_out <= _ALL_LOGGED or self._left_out.bit_count() == 1 else logging.INFO
        what: Any = "loss" if loss.numel() == 1 else "output"
        self.add(NaNEvent("skipped", text, step, phase="forward", what=what, tensor=seen), level=level)

    def replicas_differ(self, text: str, step: int, name: str) -> None:
        self.add(NaNEvent("replicas", text, step, phase="optimizer", what="parameter", layer=name))

    def skipped(self, report: Report, kept: int) -> None:
        """`kept`: how many updates were made before with the same batch."""
        self.counts.skipped += 1
        text = f"step {report.step}: skipped: {one_line(report)}"
        if kept > 0:
            made = f"{words.count(kept, 'update')} made before with the same batch"
            text += f"; the {made} {'was' if kept == 1 else 'were'} kept"
        self.add(NaNEvent("skipped", text, report.step))

    def rolled_back(self, report: Report, good_step: int) -> None:
        self.counts.rolled_back += 1
        to = f"after step {good_step - 1}" if good_step else "before training"
        text = f"step {report.step}: rolled back to the state {to}: {one_line(report)}"
        self.add(NaNEvent("rolled_back", text, report.step))

    def completed(self, report: Report) -> Report:
        """The report with the events of its step, the statistics of the layers and the rank."""
        here = world()
        if self._names_layers:
            if not self._has_layer(report):
                for event in self._replayed or self._noted:
                    self.add(event)
            self._noted, self._replayed = [], []
            self._name_layer(report)
        events = [e for e in self.events if e.step == report.step][:_EVENTS_IN_REPORT]
        history = replace(report.history, layers=self._tracks()) if self._names_layers else report.history
        if (
            report.batch is not None
            and self._batch is not None
            and not (report.batch.index is None and report.batch.note)
        ):
            index = self._batch - self.handouts.batches_since_blamed
            report = replace(report, batch=replace(report.batch, index=index))
        return replace(report, events=tuple(events), history=history, rank=here.rank, world_size=here.size)

    def _tracks(self) -> tuple[LayerTrack, ...]:
        """The layers that grew most, in the order in which they began to grow; then the others, as they first ran."""
        measured = [(name, s.points(), s.norms()) for name, s in list(self.layers.series.items())]
        found = [
            LayerTrack(name, "forward", tuple(p[0] for p in points), norms, tuple(p[1] for p in points))
            for name, points, norms in measured
            if points
        ]
        grown = self.stats.tracks() if self.stats is not None else _grown(found)
        named = {track.layer for track in grown if track.phase == "forward"}
        tracks = (*grown, *(track for track in found if track.layer not in named))
        return tuple(self._completed_track(track) for track in tracks[:_LAYERS_IN_REPORT])

    def _completed_track(self, track: LayerTrack) -> LayerTrack:
        series = self.layers.series.get(track.layer) if track.phase == "forward" else None
        if series is None:
            return track
        shares = series.shares
        counts = tuple(map(int, shares[::3])), tuple(shares[1::3]), tuple(shares[2::3])
        return LayerTrack(
            track.layer, track.phase, track.steps, track.norm, track.max_abs, series.dtype, *counts, series.earlier()
        )

    def explained(self, report: Report, before: Report | None = None) -> None:
        """Keeps the report of an investigated failure, in the place of one made `before` for the same failure."""
        for i, kept in enumerate(self._reports):
            if kept is before:
                self._reports[i] = report
                return
        self._reports.append(report)

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def _has_layer(self, report: Report) -> bool:
        return any(e.step == report.step and e.layer_type for e in self.events)

    def _name_layer(self, report: Report) -> None:
        """Records the failing layer as an event if only the replay has shown it: most steps are not read by layer."""
        origin = report.origin
        if origin is None or not origin.module or origin.phase not in ("forward", "backward"):
            return
        if not self._has_layer(report):
            what: Any = "output" if origin.phase == "forward" else "input"
            of = "its output" if what == "output" else "the gradient of its input"
            text = f"step {report.step}: layer {origin.module} ({origin.module_type}): {of} is non-finite"
            where: Any = {"phase": origin.phase, "what": what, "layer": origin.module, "layer_type": origin.module_type}
            self.add(NaNEvent("nonfinite", text, report.step, tensor=origin.produced, **where))


_WHAT_MOVES = {
    "loss": "loss",
    "gradient": "gradient",
    "scale": "gradient",
    "weights": "parameter",
    "layer": "output",
    "operator": "input",
    "variance": "input",
    "attention": "output",
}


def event_of_forecast(forecast: Forecast) -> NaNEvent:
    kind: Literal["forecast", "withdrawn"] = "forecast" if forecast.withdrawn is None else "withdrawn"
    step = forecast.since_step if forecast.withdrawn is None else forecast.withdrawn
    text = f"step {step}: {sentence(forecast)}"
    if forecast.withdrawn is not None:
        why = f"the trend of {subject(forecast)} has reversed"
        text = f"step {step}: the forecast of step {forecast.since_step} is withdrawn: {why}"
    what: Any = _WHAT_MOVES[forecast.what] if forecast.in_steps is not None else "parameter"
    named = forecast.what in ("layer", "variance", "attention")
    return NaNEvent(kind, text, step, what=what, layer=forecast.name if named else "")


def one_line(report: Report) -> str:
    """What was non-finite, where it originated and why, in one line."""
    noticed, origin = report.noticed, report.origin
    text = f"{noticed.what} {noticed.name}".strip() + " is non-finite" if noticed else "non-finite"
    if origin is not None and origin.site is not None:
        text += f", originated at {os.path.basename(origin.site.file)}:{origin.site.line}"
    return text + (f" [{report.cause.slug}]" if report.cause else "")


_LOGGER = logging.getLogger("firstnan")
_SHOWN = 5


class EventLog(Sequence[NaNEvent]):
    """Keeps half of `max_events` from the beginning and half from the end; any thread may add events.

    `on_event` is called for every event, in the thread that noticed it, but not for events that it causes itself.
    """

    def __init__(self, max_events: int = 1000, on_event: Callable[[NaNEvent], None] | None = None) -> None:
        self._most_first = (max_events + 1) // 2
        self._first: list[NaNEvent] = []
        self._last: deque[NaNEvent] = deque(maxlen=max_events // 2)
        self._seen = 0
        self._lock = threading.Lock()
        self._on_event = on_event
        self._callback_failed = False
        self._telling = threading.local()

    def add(self, event: NaNEvent, *, level: int | None = None) -> None:
        """Keeps the event, logs it (at `level`, or at the level of its kind), and calls the callback."""
        with self._lock:
            self._seen += 1
            (self._first if len(self._first) < self._most_first else self._last).append(event)
        _say(_level(event) if level is None else level, event.message)
        if self._on_event is not None and not hasattr(self._telling, "now"):
            self._tell(self._on_event, event)

    def _tell(self, callback: Callable[[NaNEvent], None], event: NaNEvent) -> None:
        """Runs outside the lock, since the callback may use the detector or run the model."""
        self._telling.now = True
        try:
            callback(event)
        except Exception:
            if not self._callback_failed:
                self._callback_failed = True
                _say(
                    logging.ERROR,
                    "on_event raised an exception; training continues, and further exceptions are not logged",
                    trace=True,
                )
        finally:
            del self._telling.now

    @property
    def dropped(self) -> int:
        """The number of events between the first and the last ones that were not kept."""
        with self._lock:
            return self._seen - len(self._first) - len(self._last)

    @overload
    def __getitem__(self, at: int) -> NaNEvent: ...
    @overload
    def __getitem__(self, at: slice) -> list[NaNEvent]: ...
    def __getitem__(self, at: int | slice) -> NaNEvent | list[NaNEvent]:
        return list(self)[at]

    def __iter__(self) -> Iterator[NaNEvent]:
        with self._lock:
            return iter([*self._first, *self._last])

    def __len__(self) -> int:
        with self._lock:
            return len(self._first) + len(self._last)

    def __repr__(self) -> str:
        shown = [event.message for event in self]
        lines = [*shown[:_SHOWN], *([f"... {len(shown) - 2 * _SHOWN} more"] if len(shown) > 2 * _SHOWN else [])]
        lines += shown[max(_SHOWN, len(shown) - _SHOWN) :]
        dropped = f", {self.dropped} more were dropped" if self.dropped else ""
        return "\n  ".join([f"<EventLog: {len(shown)} event{'s' * (len(shown) != 1)}{dropped}>", *lines])

    def clear(self) -> None:
        with self._lock:
            self._first.clear()
            self._last.clear()
            self._seen = 0


def _level(event: NaNEvent) -> int:
    """The log level of an event. Layer events are often harmless: masks, values that never reach the loss."""
    harmless = event.kind == "nonfinite" and event.layer and event.what in ("input", "output")
    return logging.INFO if harmless else logging.WARNING


def _say(level: int, message: str, *, trace: bool = False) -> None:
    with contextlib.suppress(Exception):  # a failing log handler of the user's must not stop training
        _LOGGER.log(level, "firstnan: %s", message, exc_info=trace)


Phase = Literal["forward", "backward"]

_GREW = 4.0
"""A layer has grown if it exceeds its usual size by this factor; from batch to batch a gradient may well double."""


_MOST_ROWS = 200
"""How many rows a printed dump shows."""
_Row = tuple[int, float, float, float]
"""One layer in one step: step, norm, min, max."""


class Rows(list[dict[str, Any]]):
    """The rows of a dump; printed as a table."""

    def __repr__(self) -> str:
        if not self:
            return "no statistics"
        shown = self[-_MOST_ROWS:]
        cells = [list(shown[0])]
        cells += [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in shown]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        left_out = len(self) - len(shown)
        return "\n".join([*lines[:1], *([f"... {left_out} rows before these"] if left_out else []), *lines[1:]])

    __str__ = __repr__


class Statistics:
    """A ring buffer of the last `steps` steps of every layer, for forward (outputs) and backward (gradients).

    `print(stats)` shows the last step of each layer, `dump()` all rows. `on = False` stops recording, until it is True.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.on = True
        """Whether new rows are recorded; may be changed at any time."""
        # In the order in which the layers first ran.
        self._rings: dict[tuple[str, Phase], deque[_Row]] = {}
        self._lock = threading.Lock()

    def add(self, step: int, layer: str, phase: Phase, norm: float, low: float, high: float) -> None:
        """Adds one call of a layer; the calls of one step are merged into one row."""
        if not self.on:
            return
        with self._lock:
            ring = self._rings.get((layer, phase))
            if ring is None:
                ring = self._rings[layer, phase] = deque(maxlen=self._steps)
            if ring and ring[-1][0] == step:
                _, before, least, most = ring.pop()
                norm = math.hypot(before, norm)
                # Not min() and max(): whether they keep a NaN depends on the order of their arguments.
                low = low if low < least or low != low else least
                high = high if high > most or high != high else most
            ring.append((step, norm, low, high))

    def layers(self) -> list[str]:
        """Every layer seen so far, in the order in which they first ran."""
        with self._lock:
            return list(dict.fromkeys(layer for layer, _ in self._rings))

    def __repr__(self) -> str:
        """The last row of every layer, as a table."""
        rings = self._copy()
        steps = sum(map(len, rings.values()))
        off = "" if self.on else ", off"
        head = f"<Statistics: {len(rings)} layers and passes, {steps} rows of the last {self._steps} steps{off}>"
        last = {(row["layer"], row["phase"]): row for row in self.select()}
        return f"{head}\n{Rows(last.values())}" if last else head

    def __len__(self) -> int:
        """The number of rows."""
        return sum(map(len, self._copy().values()))

    def select(self, pattern: str | None = None) -> Rows:
        """The rows of the layers whose path matches a glob or contains the text, layer by layer."""
        if pattern is not None and not isinstance(pattern, str):
            raise TypeError(f"pattern must be a string, got {pattern!r}")
        return Rows(
            {
                "layer": layer,
                "phase": phase,
                "step": step,
                "norm": norm,
                "max_abs": _max_abs(low, high),
                "min": low,
                "max": high,
            }
            for (layer, phase), rows in self._copy().items()
            if pattern is None or _fits(layer, pattern)
            for step, norm, low, high in rows
        )

    def dump(self, path: str | os.PathLike[str] | None = None, pattern: str | None = None) -> Rows:
        """The rows of all layers; also written as JSON lines if a path is given."""
        rows = self.select(pattern)
        if path is not None:
            from firstnan.records.files import write_whole

            write_whole(path, "".join(json.dumps(encode(row), allow_nan=False) + "\n" for row in rows))
        return rows

    def tracks(self, most: int = 6) -> tuple[LayerTrack, ...]:
        """The layers that grew most up to the last step, in the order in which they began to grow."""
        tracks = [
            LayerTrack(
                layer,
                phase,
                tuple(row[0] for row in rows),
                tuple(row[1] for row in rows),
                tuple(_max_abs(low, high) for _, _, low, high in rows),
            )
            for (layer, phase), rows in self._copy().items()
        ]
        return _grown(tracks, most)

    def clear(self) -> None:
        with self._lock:
            self._rings.clear()

    def _copy(self) -> dict[tuple[str, Phase], list[_Row]]:
        with self._lock:
            return {key: list(ring) for key, ring in self._rings.items() if ring}


def _fits(layer: str, pattern: str) -> bool:
    return fnmatchcase(layer, pattern) if any(c in pattern for c in "*?[") else pattern in layer


def _max_abs(low: float, high: float) -> float:
    return math.nan if low != low or high != high else max(abs(low), abs(high))


def _grown(tracks: list[LayerTrack], most: int = 6) -> tuple[LayerTrack, ...]:
    """Those that grew most up to the last step, in the order in which they began to grow."""
    found = []
    end = max((track.steps[-1] for track in tracks), default=0)
    for track in tracks:
        # Backward of the failing step may not have run; a layer that has been idle for longer is not involved.
        if track.steps[-1] >= end - 1 and (growth := _growth(track.max_abs)):
            factor, left = growth
            found.append((factor, track.steps[left], track))
    # Of those that changed equally, the first ones: the others were only affected by them.
    found.sort(key=lambda f: (-f[0], f[1]))
    return tuple(track for _, _, track in sorted(found[:most], key=lambda f: f[1]))


def _growth(sizes: Sequence[float]) -> tuple[float, int] | None:
    """The factor by which the layer exceeds its usual size, and the index at which that began; None if it did not grow.

    The factor is 1.0 if it went from its usual size to NaN or Inf at once.
    """
    # The median of the older half, so neither the growth itself nor a single outlier counts as usual.
    older = sorted(math.inf if math.isnan(v) else v for v in sizes[: (len(sizes) + 1) // 2])
    usual = older[(len(older) - 1) // 2]
    if usual == 0:  # a head that starts at zero grows from its first real size
        usual = min((v for v in sizes if 0 < v < math.inf), default=0.0)
    if usual == math.inf:  # as it always was: a mask
        return None
    left = len(sizes)
    while left and not sizes[left - 1] <= _GREW * usual:
        left -= 1
    if left == len(sizes):
        return None
    return max((v / usual for v in sizes[left:] if math.isfinite(v)), default=1.0), left
