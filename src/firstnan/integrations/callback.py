"""What all callbacks share: a detector that lives as long as a framework trains, and their place in its classes."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch.nn import Module

from firstnan import NaNDetector
from firstnan.engine.session import Session
from firstnan.records import NaNEvent, Report


class TrainingCallback:
    """A detector around a framework's training; `options` are those of NaNDetector."""

    frameworks: tuple[str, ...] = ()
    """The modules that may hold the base class of callbacks."""
    base = ""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # The base class is known only now: the program may import its framework after this module.
        kind: Any = cls
        return object.__new__(_joined(kind, _bases(cls.base, cls.frameworks)) if cls.base else kind)

    def __init__(self, **options: Any) -> None:
        super().__init__()
        NaNDetector(Module(), **_without_optimizer(options))  # a wrong option is an error here, not after an hour
        self._options = options
        self.detector: NaNDetector | None = None
        """The detector of the current or last training; None before the first."""
        self._early: NaNDetector | None = None

    @property
    def report(self) -> Report | None:
        """The report of the last failure."""
        return self.detector.report if self.detector is not None else None

    def prepare(self, model: Module) -> None:
        """Training will begin: some frameworks begin to fetch batches before they say that it does."""
        self.abandon()
        self._early = NaNDetector(model).attach()

    def begin(self, model: Module | Mapping[str, Module], optimizers: Any, **more: Any) -> NaNDetector:
        """Training begins: watches it."""
        self.abandon()
        own, given = more.pop("on_event", None), self._options.get("on_event")
        options = {**self._options, **more}
        if own is not None:
            options["on_event"] = own if given is None else _Both(own, given)
        self.detector = detector = NaNDetector(model, optimizers, **options).attach()
        # Some frameworks do not say that training ended with an error; then it ends with this object.
        weakref.finalize(self, detector.detach).atexit = False
        return detector

    def epoch_begins(self, number: int) -> None:
        """An epoch begins, by the framework's count."""
        if (session := self._session) is not None:
            session.journal.epoch_begins(number)

    def batch_begins(self, number: int) -> None:
        """The step of a batch begins, by the framework's count in this epoch."""
        if (session := self._session) is not None:
            session.journal.batch_begins(number)

    @property
    def _session(self) -> Session | None:
        with contextlib.suppress(RuntimeError):  # the program has detached it
            return self.detector.session if self.detector is not None else None
        return None

    def end(self, error: BaseException | None = None) -> None:
        """Training has ended: checks what it left behind, or explains the error that it ended with."""
        if self.detector is not None:
            self.detector.__exit__(type(error) if error is not None else None, error, None)

    def abandon(self) -> None:
        """Stops watching without a check."""
        for detector in (self.detector, self._early):
            if detector is not None:
                detector.detach()
        self._early = None


class _Both:
    def __init__(self, *functions: Any) -> None:
        self._functions = functions

    def __call__(self, event: NaNEvent) -> None:
        for function in self._functions:
            function(event)


def _without_optimizer(options: dict[str, Any]) -> dict[str, Any]:
    """The options to check without a model: skip and rollback need an optimizer."""
    return {**options, "on_nonfinite": "raise"} if options.get("on_nonfinite") in ("skip", "rollback") else options


def _bases(name: str, modules: tuple[str, ...]) -> tuple[type, ...]:
    """The class of this name in every module that the program has imported; otherwise in the first that exists."""
    loaded = [module for one in modules if (module := sys.modules.get(one)) is not None]
    if not loaded:
        loaded = [import_module(one) for one in modules if find_spec(one.partition(".")[0]) is not None][:1]
    if not loaded:
        raise ModuleNotFoundError(f"{' or '.join(m.partition('.')[0] for m in modules)} must be installed")
    return tuple(getattr(module, name) for module in loaded)


@lru_cache
def _joined(cls: Any, bases: tuple[Any, ...]) -> Any:
    return type(cls.__name__, (cls, *bases), {"__module__": cls.__module__, "__doc__": cls.__doc__})
