"""`NaNDetector`: protection inside the user's own training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from torch.nn import Module
from torch.optim.lr_scheduler import LRScheduler

from firstnan.capsule import LIMIT, Wanted
from firstnan.engine.capsule_writer import CapsuleWriter
from firstnan.engine.handouts import Handouts
from firstnan.engine.journal import Counts, EventLog, Journal, Statistics
from firstnan.engine.model_calls import BadBefore, CallReplay, ModelCalls, UpdateReplay
from firstnan.engine.policies import Policy, Raise, RaiseInSteps, Rollback, Skip, Warn
from firstnan.engine.recovery import Recovery
from firstnan.engine.replicas import Replicas
from firstnan.engine.sampling import StepSamples
from firstnan.engine.session import Session
from firstnan.engine.step_log import StepLog
from firstnan.gate.gate import Gate
from firstnan.gate.growth_guard import GrowthGuard
from firstnan.observe.layers import LayerWatch, Sink
from firstnan.observe.sites import Ownership, directories, ends_at_origin
from firstnan.records import NaNEvent, Report
from firstnan.records.arguments import require_batches, require_callable, require_path, short
from firstnan.records.errors import NonFiniteError
from firstnan.records.words import count
from firstnan.report import nonfinite_error
from firstnan.tensors.models import Scope, TrainingObjects, parameters_of, unwrapped
from firstnan.tensors.state import NamelessSource
from firstnan.tensors.step_function import StepFunction, is_step_call

OnNonfinite = Literal["raise", "warn", "skip", "rollback"]
_MOST_CAPSULES = 3
log = logging.getLogger("firstnan")


class NaNDetector:
    """Watches the training of a model: finds the first NaN or Inf, explains it, and keeps it out of the weights.

        with NaNDetector(model, optimizer) as detector:
            for batch in detector.batches(loader):
                ...  # the training step, unchanged

    `model` is a module, several, or a mapping of names to modules; `optimizer` is one or several, or None if the
    weights are updated by hand. `on_nonfinite`: "raise" NonFiniteError with the report; "warn" and continue; "skip" the
    step; "rollback" to the last good snapshot, taken every `snapshot_every` steps. With "skip" and "rollback", training
    still ends after more than `streak` bad steps in a row.

    `layers` watches every leaf layer (or those selected by `trackable(name, module)`, without those excluded by `skip`:
    types, names or globs). `stats` keeps the magnitudes of that many last steps per layer. `guard` watches the gradient
    norm: "warn", "clip" or "off"; `max_grad_norm` is an absolute limit for it. `events` keeps at most `max_events`
    events; `on_event` is called with each. `capsule_dir` is a folder for capsules: the failing step in one file of at
    most `capsule_limit` bytes, for `firstnan replay` and `firstnan.replay`. `check_replicas=N` compares the parameters
    of several ranks after every N updates. `log_to` gets the numbers of every step and
    the events: the path of a CSV file, a SummaryWriter of TensorBoard, or a run of W&B or MLflow.
    """

    def __init__(
        self,
        model: Module | Iterable[Module] | Mapping[str, Module],
        optimizer: Any = None,
        *,
        on_nonfinite: OnNonfinite = "raise",
        streak: int = 10,
        snapshot_every: int = 100,
        layers: bool = False,
        trackable: Callable[[str, Module], bool] | None = None,
        skip: type | str | Iterable[type | str] = (),
        stats: int = 0,
        guard: str = "warn",
        max_grad_norm: float | None = None,
        check_replicas: int = 0,
        max_events: int = 1000,
        on_event: Callable[[NaNEvent], None] | None = None,
        capsule_dir: str | os.PathLike[str] | None = None,
        capsule_limit: int = LIMIT,
        log_to: Any = None,
    ) -> None:
        self._roots, self._optimizers = models_given(model), optimizers_given(optimizer)
        self._superseded: list[weakref.ref[Any]] = []
        """Optimizers that were replaced while the detector was attached."""
        if on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(
                f"on_nonfinite must be one of {', '.join(get_args(OnNonfinite))}, got {short(on_nonfinite)}"
            )
        if on_nonfinite in ("skip", "rollback") and not self._optimizers and not layers:
            raise ValueError(f"on_nonfinite={on_nonfinite!r} needs an optimizer: NaNDetector(model, optimizer)")
        if guard not in ("warn", "clip", "off"):
            raise ValueError(f"guard must be 'warn', 'clip' or 'off', got {short(guard)}")
        if max_grad_norm is not None:
            require_positive("max_grad_norm", max_grad_norm)
            if guard == "off":
                raise ValueError("max_grad_norm needs guard='warn' or 'clip' (got guard='off')")
        whole = {"streak": streak, "stats": stats, "max_events": max_events, "capsule_limit": capsule_limit}
        whole["check_replicas"] = check_replicas
        for name, value in whole.items():
            require_integer(name, value, 0)
        require_integer("snapshot_every", snapshot_every, 1)
        if not isinstance(layers, bool):
            raise TypeError(f"layers must be True or False, got {short(layers)}")
        for name, called in (("trackable", trackable), ("on_event", on_event)):
            if called is not None and not callable(called):
                raise TypeError(f"{name} must be callable, got {short(called)}")
        if capsule_dir is not None:
            require_path("capsule_dir", capsule_dir)
            if os.path.exists(capsule_dir) and not os.path.isdir(capsule_dir):
                raise ValueError(f"capsule_dir must be a folder, got the file {str(capsule_dir)!r}")
        capsules = None if capsule_dir is None else Wanted(Path(os.path.abspath(capsule_dir)), capsule_limit)
        self._on_nonfinite, self._snapshot_every, self._capsules = on_nonfinite, snapshot_every, capsules
        self._guard, self._max_grad_norm, self._check_replicas = guard, max_grad_norm, check_replicas
        self._policy = _policy(on_nonfinite, streak, bool(self._optimizers))
        self._layers, self._trackable, self._skip = layers, trackable, types_and_names("skip", skip)
        self._logs: StepLog | None = None
        if log_to is not None:
            from firstnan.integrations.loggers import sink_for

            self._logs = StepLog(sink_for(log_to))
        self.events = EventLog(max_events, on_event if self._logs is None else _both(self._logs.event, on_event))
        """The NaNEvent records so far: the first ones and the last ones."""
        self.stats = Statistics(stats) if stats else None
        """Magnitudes per layer in the last steps: `dump()`, `select(pattern)`, `clear()`."""
        self.reports: list[Report] = []
        """The reports of the failures that were investigated, the first one first."""
        self._ownership = Ownership(tuple(directories(sys._getframe(1))))
        self._samples = StepSamples(self._ownership)
        self._source = NamelessSource()
        """Stands for the loader of steps that are functions."""
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._blocks = 0
        """How many `with` blocks of this detector are open, one inside the other."""
        self._last: Session | None = None
        self._counts, self._before = Counts(), Counts()
        """Like the events and the steps, these continue if the detector is attached again."""

    def attach(self) -> NaNDetector:
        """Starts watching; does nothing if already attached."""
        with self._lock:
            if self._session is None:
                session = self._new_session()
                self._before = replace(self._counts)
                try:
                    session.begin()
                except BaseException:
                    session.end()
                    raise
                self._session = self._last = session
                self._warn_of_strangers(session)
        return self

    def _new_session(self) -> Session:
        roots, optimizers, policy = self._roots, self._optimizers, self._policy
        guard = None if self._guard == "off" else lambda: GrowthGuard(self._max_grad_norm)
        gate = Gate(frugal=True, synchronous=self._on_nonfinite in ("raise", "skip"), guard=guard)
        handouts, scope = Handouts(), Scope(roots, optimizers, self._superseded)
        models = scope.models()
        watches = self._layers or self._trackable is not None or self.stats is not None
        if self._last is not None:
            gate.continue_counting(self._last.gate)
        journal = Journal(
            self.events, self.stats, gate.steps, handouts, models, self._counts, self.reports,
            names_layers=watches, epoch=self._last.journal.epoch if self._last is not None else None,
        )  # fmt: skip
        recovery = Recovery(models, optimizers, self._snapshot_every if self._on_nonfinite == "rollback" else None)
        calls = ModelCalls(roots.values(), handouts)
        capsules = None
        if self._capsules is not None:
            capsules = CapsuleWriter(
                self._capsules,
                gate,
                handouts,
                lambda: TrainingObjects.find(optimizers, roots),
                _arguments,
                most=_MOST_CAPSULES,
            )
        session = Session(
            policy,
            ownership=self._ownership,
            scope=scope,
            gate=gate,
            handouts=handouts,
            journal=journal,
            layers=self._layer_watch(journal) if watches else None,
            recovery=recovery,
            calls=calls,
            capsules=capsules,
            replicas=Replicas(self._check_replicas, journal.replicas_differ) if self._check_replicas else None,
            sources=lambda session: (
                UpdateReplay(session.microscope, recovery, session.hooks),
                BadBefore(session.microscope),
                CallReplay(session.microscope, calls, lambda: not session.through_loop),
            ),
            samples=self._samples,
            on_step=self._logs.add if self._logs is not None else None,
            clips=self._guard == "clip",
            clip_at=self._max_grad_norm if self._guard == "clip" else None,
        )
        calls.on_error(session.internal_error)
        if session.layers is not None:
            layers = session.layers
            journal.only_called(lambda: session.trains, lambda: layers.calls)
        return session

    def _warn_of_strangers(self, session: Session) -> None:
        assert session.models is not None
        wanted = {id(p) for p, _ in session.models.parameters.values() if p.requires_grad}
        trained = {id(p) for optimizer in self._optimizers for p in parameters_of(optimizer)}
        if wanted and trained and wanted.isdisjoint(trained):
            log.warning("firstnan: the optimizer holds none of this model's parameters; was either re-created?")

    def _layer_watch(self, sink: Sink) -> LayerWatch:
        before = self._last.layers if self._last is not None else None
        return LayerWatch(
            self._roots,
            sink,
            trackable=self._trackable,
            skip=self._skip,
            statistics=self.stats is not None,
            measures=True,
            defer_reads=self._on_cpu(),
            steps=before.steps if before is not None else 0,
        )

    def _on_cpu(self) -> bool:
        """On a device the loss is known too late to decide which layers to read."""
        return all(p.is_cpu for root in self._roots.values() for p in root.parameters())

    def detach(self) -> None:
        """Stops watching, and leaves model, optimizer and torch as they were; the results are kept."""
        with self._lock:
            session, self._session = self._session, None
            if session is None:
                return
            lost = session.divergence()
            session.end()
            if lost is not None:
                log.warning("%s", nonfinite_error(lost))
            if self._logs is not None:
                self._logs.flush()
            counts, before = self._counts, self._before
            bad = counts.nonfinite > before.nonfinite and self._on_nonfinite != "raise"
            if bad or counts.warnings > before.warnings:
                log.warning("firstnan: %s", _counted(self.summary()))

    def __enter__(self) -> NaNDetector:
        with self._lock:
            self.attach()
            self._blocks += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        __tracebackhide__ = True
        with self._lock:
            self._blocks = max(self._blocks - 1, 0)  # a callback is attached without a block, and ends as one does
            if self._blocks:
                return  # the block around this one goes on
        session = self._session
        report, searching = None, session is not None and session.is_searching
        if session is not None and error is None:
            session.hooks.guarded(session.batch_left, sys._getframe(1))
        try:
            report = session.left(error) if session is not None else None
        finally:
            self.detach()
        if report is None:
            return
        if searching and isinstance(error, Exception):  # raised in a replay, not by the program itself
            raise ends_at_origin(nonfinite_error(report)) from None
        if error is not None:
            error.add_note(str(nonfinite_error(report)))
        elif self._on_nonfinite == "raise":
            raise ends_at_origin(nonfinite_error(report))
        else:
            log.warning("%s", nonfinite_error(report))

    def batches(self, loader: Iterable[Any]) -> Batches:
        """The loader's batches; one that fails is handed out again, so the loop body can be traced."""
        require_batches("loader", loader)
        return Batches(self._attached, loader)

    def step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the function, which makes one training step; if that fails, it is called again and explained."""
        __tracebackhide__ = True
        require_callable("function", function)
        session = self._attached()
        session.through_the_loop()
        session.body_ended()
        session.hooks.guarded(session.handed_out, self._source, [StepFunction(function), args, kwargs])
        result = function(*args, **kwargs)
        with contextlib.suppress(StopIteration):
            while session.asks_again:
                again, given, named = session.next_batch(self._source, _no_more)
                with session.step_again():
                    result = again.call(*given, **named)
        session.body_ended()
        return result

    @property
    def report(self) -> Report | None:
        """The report of the first failure, which usually explains the later ones."""
        return self.reports[0] if self.reports else None

    def summary(self) -> dict[str, int]:
        """How many steps had their update (`steps`), and how many were non-finite, skipped, rolled back or clipped.

        A step whose update a gradient scaler has left out, to find its scale, is among `steps`."""
        return {**asdict(self._counts), "events": len(self.events), "events_dropped": self.events.dropped}

    @property
    def session(self) -> Session:
        """For the callbacks in `integrations/`, which know what a framework does."""
        return self._attached()

    def __repr__(self) -> str:
        models = ", ".join(type(root).__name__ for root in self._roots.values())
        told = _counted(self.summary()) or "no updates"
        return f"<NaNDetector of {models}: {told}{'' if self._session is None else ', attached'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NaNDetector cannot be copied or pickled, because it watches live objects")

    def _attached(self) -> Session:
        if self._session is None:
            raise RuntimeError("the detector is not attached: use `with NaNDetector(...) as detector:` or attach()")
        return self._session


def _both(first: Callable[[NaNEvent], None], second: Callable[[NaNEvent], None] | None) -> Callable[[NaNEvent], None]:
    def noticed(event: NaNEvent) -> None:
        first(event)
        if second is not None:
            second(event)

    return noticed


class Batches:
    """A loader's batches; each pass over them is an epoch, and a batch whose step fails comes again."""

    def __init__(self, session: Callable[[], Session], loader: Iterable[Any]) -> None:
        self._session, self._loader = session, loader

    def __repr__(self) -> str:
        return f"<Batches of {type(self._loader).__name__}>"

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length raises its own error

    def __iter__(self) -> Iterator[Any]:
        __tracebackhide__ = True
        session = self._session()
        session.through_the_loop()
        session.journal.epoch_begins()
        iterator = iter(self._loader)
        source = iterator if hasattr(iterator, "__weakref__") else NamelessSource()

        def following(_: Any) -> Any:
            __tracebackhide__ = True
            return next(iterator)

        while True:
            if not session.backwards.called:  # otherwise it has used its loss
                session.hooks.guarded(session.batch_left, sys._getframe(1))
            try:
                batch = session.next_batch(source, following)
            except StopIteration:
                return
            except NonFiniteError as error:
                raise ends_at_origin(error) from None
            yield batch


def _arguments(batch: Any) -> Any:
    """What the function of a step was called with: its only argument, or all of them."""
    if not is_step_call(batch):
        return batch
    _, given, named = batch
    if named:
        return (*given, named)
    return given[0] if len(given) == 1 else given


def _no_more(source: Any) -> NoReturn:
    raise StopIteration


def _policy(name: OnNonfinite, streak: int, has_optimizer: bool) -> Policy:
    if name in ("skip", "rollback") and not has_optimizer:
        return RaiseInSteps()
    if name in ("skip", "rollback"):
        return Skip(streak) if name == "skip" else Rollback(streak)
    return Raise(_with_fixes_tried) if name == "raise" else Warn()


def _with_fixes_tried(report: Report, session: Session) -> Report:
    from firstnan.engine.block_trials import with_fixes_tried  # many modules that a healthy training never needs

    return with_fixes_tried(report, session)


def models_given(model: Any) -> dict[str, Module]:
    """Name prefix -> model; a single model has no prefix."""
    if isinstance(model, Module):
        return {"": model}
    if isinstance(model, Mapping):
        found = {str(name): m for name, m in model.items()}
    elif isinstance(model, Iterable) and not isinstance(model, str):
        found = {str(i): m for i, m in enumerate(model)}
    else:
        found = {"": model}
    for name, one in found.items():
        if not isinstance(one, Module):
            raise TypeError(f"model{f'[{name}]' if name else ''} must be a torch.nn.Module, got {short(one)}")
    if not found:
        raise ValueError("model must hold at least one torch.nn.Module, got none")
    return found


def optimizers_given(optimizer: Any) -> list[Any]:
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
    for one in given:
        if isinstance(one, LRScheduler):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got the scheduler {short(one)}")
    given = [unwrapped(one) for one in given]
    for one in given:
        if not hasattr(one, "register_step_pre_hook") or not hasattr(one, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {short(one)}")
    return given


def _counted(summary: dict[str, int]) -> str:
    names = {
        "steps": "update",
        "nonfinite": "non-finite step",
        "warnings": "warning",
        "events_dropped": "dropped event",
    }
    told = [
        count(n, names[name]) if name in names else f"{n} {name.replace('_', ' ')}"
        for name, n in summary.items()
        if n and name != "events"
    ]
    return ", ".join(told)


def require_integer(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {short(value)}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {short(value)}")


def require_positive(name: str, value: Any) -> None:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a positive number, got {short(value)}")
    if not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be a positive, finite number, got {short(value)}")


def types_and_names(name: str, value: Any) -> tuple[type | str, ...]:
    """The types, names and globs in `value`, which may be a single one."""
    if isinstance(value, type | str):
        return (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} must hold types, names or globs, got {short(value)}")
    found = tuple(value)
    for one in found:
        if not isinstance(one, type | str):
            raise TypeError(f"{name} must hold types, names or globs, got {short(one)}")
    return found
